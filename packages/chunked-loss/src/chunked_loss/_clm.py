"""Causal-LM losses: functions of logits, objects that run a model on a batch, and either of them compiled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chunked_loss._chunk import ChunkKernel, cross_entropy_chunk
from chunked_loss._fsdp_head import resharded_on_exception
from chunked_loss._head import (
    LinearHead,
    Projection,
    call_in_head,
    find_callable_head,
    refuse_what_follows,
    skip_lm_head,
)
from chunked_loss._labels import as_labels, check_labels
from chunked_loss._linear_cross_entropy import LossStats, linear_cross_entropy, projected_cross_entropy

Compile = Callable[[Callable], Callable]
LossT = TypeVar("LossT", bound=Callable)


def _sums(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor | None]:
    """The sum over valid tokens of the cross entropy, and that of `z_loss` * logsumexp^2; None without it."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    rows, flat_labels = wide.reshape(-1, wide.shape[-1]), labels.reshape(-1)
    cross_entropy = F.cross_entropy(
        rows, flat_labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
    )
    if not z_loss:
        return cross_entropy, None
    squares = rows.logsumexp(dim=-1).square()
    return cross_entropy, z_loss * torch.where(flat_labels == ignore_index, 0, squares).sum()


def clm_cross_entropy_loss_sum(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Sum of the cross entropy over valid tokens, plus `z_loss` * logsumexp^2 (PaLM's).

    Args:
        logits: [..., V]; computed with in fp32 (fp64 stays).
        labels: [...] int64, aligned with the logits: no shift is applied.

    Returns:
        [] fp32; 0.0 with a graph where all labels are ignored.

    Raises:
        ValueError: a label out of its range on the CPU. A device stops with an assertion then.
    """
    labels = as_labels(labels)
    check_labels(labels, logits.shape[-1], ignore_index)
    cross_entropy, of_z = _sums(logits, labels, ignore_index, label_smoothing, z_loss)
    return cross_entropy if of_z is None else cross_entropy + of_z


def clm_cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """`clm_cross_entropy_loss_sum` / `denominator`; None: the number of valid tokens here, 0.0 if there is none."""
    total = clm_cross_entropy_loss_sum(
        logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss
    )
    if denominator is None:
        denominator = (as_labels(labels) != ignore_index).sum().clamp(min=1)
    return total / denominator


class Batch(Protocol):
    """What a loss reads of a batch; `moe_core.plugins.Batch` is one."""

    @property
    def tokens(self) -> Tensor:
        """[B, S] int64."""

    @property
    def labels(self) -> Tensor:
        """[B, S] int64: labels[b, s] is the token after tokens[b, s]; ignored where `ignore_index`."""

    @property
    def document_ids(self) -> Tensor | None:
        """[B, S] int64, or None."""


class LossOutput(NamedTuple):
    """What a loss makes of one microbatch. The trainer divides `sum` by the step's denominator."""

    sum: Tensor
    """[] fp32 with a graph: the sum over this rank's valid tokens, z-loss included."""
    tokens: Tensor
    """[] int64: how many valid tokens that are."""
    parts: Mapping[str, Tensor]
    """[] fp32, detached sums over the same tokens: `cross_entropy`, and what else was computed."""


@dataclass(frozen=True, kw_only=True)
class CLMCrossEntropyLoss:
    """Cross entropy on the model's full logits: `loss(model, batch) -> LossOutput`.

    The model is called as `model(tokens, document_ids=...)` and returns logits [B, S, V].
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = -100
    shift: bool = False
    """The labels are the tokens themselves: compare position s with label s + 1, and the last with nothing."""
    core: Callable[..., tuple[Tensor, Tensor | None]] = _sums

    def __call__(self, model: nn.Module, batch: Batch) -> LossOutput:
        labels = _aligned(batch.labels, self.shift, self.ignore_index)
        logits = model(batch.tokens, document_ids=batch.document_ids)
        check_labels(labels, logits.shape[-1], self.ignore_index)
        cross_entropy, z_loss = self.core(logits, labels, self.ignore_index, self.label_smoothing, self.z_loss)
        parts = {"cross_entropy": cross_entropy.detach()}
        if z_loss is not None:
            parts["z_loss"] = z_loss.detach()
        total = cross_entropy if z_loss is None else cross_entropy + z_loss
        return LossOutput(total, (labels != self.ignore_index).sum(), parts)

    def compiled(self, compile_: Compile) -> "CLMCrossEntropyLoss":
        """This loss with its numeric core compiled."""
        return replace(self, core=compile_(self.core))


@dataclass(frozen=True, kw_only=True)
class ChunkedCLMCrossEntropyLoss:
    """Cross entropy from the model's hidden states and its head module: `loss(model, batch) -> LossOutput`.

    The model is called as `model(tokens, document_ids=..., return_hidden=True)` and returns the head's input
    [B, S, D]. The head module is then called once, on every rank and for every batch, one whose labels are
    all ignored included, so collectives of hooks on it are the same everywhere. If the head is its own
    FSDP2 unit, that makes one all-gather per call and one reduce-scatter per synchronised backward, however
    many chunks there are; and what is reduced is an fp32 gradient, also of a bf16 head.

    Raises (when called):
        ValueError: the model's head cannot be used so, or labels do not fit.
    """

    chunk_tokens: int = 512
    num_chunks: int | None = None
    """The number of chunks, instead of `chunk_tokens`."""
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    vocab_size: int | None = None
    """The head's rows past it are padding of the vocabulary: no class, no gradient."""
    ignore_index: int = -100
    shift: bool = False
    """The labels are the tokens themselves: compare position s with label s + 1, and the last with nothing."""
    head: str = "lm_head"
    """Name of the submodule with the weight [V, D]."""
    skip_head: bool = False
    """The model knows no `return_hidden`: it is called as `model(tokens)` inside `skip_lm_head`. One that changes its
    logits after the head is refused, unless `softcap` is given, which then has to stand for that."""
    keep_head_unsharded: bool = False
    """Under accumulation, keep an FSDP2 head gathered from the first microbatch of a step to the end of the
    synchronised backward: one all-gather a step instead of one a microbatch, for V * D elements of the compute
    dtype held all the while. After an exception in a backward call `head.reshard()` before weights change."""
    recompute: bool = False
    """See `linear_cross_entropy`; an FSDP2 head is then gathered again in backward."""
    core: ChunkKernel = cross_entropy_chunk

    def __call__(self, model: nn.Module, batch: Batch) -> LossOutput:
        head = self.check_head(model)
        labels = _aligned(batch.labels, self.shift, self.ignore_index)
        with resharded_on_exception(head, self.keep_head_unsharded):
            hidden = self._hidden(model, batch)
        stats: list[LossStats] = []

        def inner(rows: Tensor, projection: LinearHead | Projection) -> Tensor:
            value, of_call = self._loss_of_rows(rows, projection, labels)
            stats.append(of_call)
            return value

        total = call_in_head(
            head, hidden, inner, keep_head_unsharded=self.keep_head_unsharded, recompute=self.recompute
        )
        parts = {"cross_entropy": stats[0].cross_entropy, "correct": stats[0].correct.to(total.dtype)}
        if self.z_loss:
            parts["z_loss"] = stats[0].z_loss
        return LossOutput(total, stats[0].tokens, parts)

    def check_head(self, model: nn.Module) -> nn.Module:
        """The head of `model` that a call would use, or the ValueError that it would raise for it: before any step."""
        return find_callable_head(model, self.head, recompute=self.recompute)

    def _loss_of_rows(
        self, rows: Tensor, projection: LinearHead | Projection, labels: Tensor
    ) -> tuple[Tensor, LossStats]:
        options: Any = {
            "ignore_index": self.ignore_index,
            "chunk_tokens": self.chunk_tokens,
            "num_chunks": self.num_chunks,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "softcap": self.softcap,
            "vocab_size": self.vocab_size,
            "core": self.core,
        }
        if not isinstance(projection, LinearHead):
            return projected_cross_entropy(rows, projection, labels, **options)
        weight, bias = projection
        return linear_cross_entropy(
            rows, weight, labels, bias=bias, reduction="sum", recompute=self.recompute, return_stats=True, **options
        )

    def _hidden(self, model: nn.Module, batch: Batch) -> Tensor:
        if not self.skip_head:
            hidden: Tensor = model(batch.tokens, document_ids=batch.document_ids, return_hidden=True)
            return hidden
        if batch.document_ids is not None:
            raise ValueError(
                "skip_head = True: the model is called as model(tokens), so documents packed into one row would see "
                "each other; give a batch without document_ids, or a model that takes them"
            )
        with skip_lm_head(model, self.head) as skipped:
            output = model(batch.tokens)
        if self.softcap is None:  # which is one of the things that a model does after its head
            refuse_what_follows(getattr(output, "logits", output), skipped.hidden, self.head)
        return skipped.hidden

    def compiled(self, compile_: Compile) -> "ChunkedCLMCrossEntropyLoss":
        """This loss with its numeric core compiled: what happens to one chunk of logits."""
        if self.recompute:
            raise ValueError("recompute = True: it has no core to compile; leave one of the two out")
        return replace(self, core=compile_(self.core))


def _aligned(labels: Tensor, shift: bool, ignore_index: int) -> Tensor:
    labels = as_labels(labels)
    if not shift:
        return labels
    nothing = torch.full_like(labels[:, :1], ignore_index)
    return torch.cat([labels[:, 1:], nothing], dim=1)


def compiled(loss: LossT, **options: Any) -> LossT:
    """`loss` with only its arithmetic compiled; model, head and their collectives run as before.

    Args:
        loss: `clm_cross_entropy_loss`, `clm_cross_entropy_loss_sum` or any function on tensors, which is
            compiled as a whole; or a loss object with a method `compiled(compile_)`, as this package's have.
        options: for `torch.compile`.

    Raises:
        ValueError: an object that does not say what its core is.
    """
    compile_ = partial(torch.compile, **options)
    if hasattr(loss, "compiled"):
        return loss.compiled(compile_)
    if hasattr(loss, "__code__"):
        return compile_(loss)  # type: ignore[return-value]  # torch.compile keeps the signature
    raise ValueError(
        f"{type(loss).__name__} has no numeric core to compile: give a function on tensors, or an object with a method "
        "compiled(compile_) that returns a copy of it"
    )

"""`linear_cross_entropy`: the head's product and the cross entropy, chunk by chunk, with exact gradients."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from chunked_loss._chunk import ChunkKernel, ChunkLosses, Problem, Terms, cross_entropy_chunk
from chunked_loss._gradients_in_forward import LossPerToken, SumOfLosses, sum_of_projected_losses
from chunked_loss._labels import as_labels, check_labels, kept_rows
from chunked_loss._recomputing import recomputed_losses

Reduction = Literal["mean", "sum", "none"]


class LossStats(NamedTuple):
    """What a trainer logs, from the same pass: detached, on the device, no synchronisation."""

    cross_entropy: Tensor
    """[] fp32, sum over valid tokens, without the z-loss; smoothing and weights included."""
    z_loss: Tensor
    """[] fp32, sum over valid tokens of z_loss * logsumexp^2, weights included."""
    tokens: Tensor
    """[] int64, how many tokens are valid."""
    correct: Tensor
    """[] int64, how many of them have their label's logit at the maximum: accuracy is correct / tokens."""


class _Options(TypedDict, total=False):
    bias: Tensor | None
    ignore_index: int
    reduction: Reduction
    chunk_tokens: int
    num_chunks: int | None
    label_smoothing: float
    z_loss: float
    softcap: float | None
    class_weight: Tensor | None
    token_weight: Tensor | None
    denominator: Tensor | float | None
    vocab_size: int | None
    valid_tokens: int | None
    accumulate_dtype: torch.dtype
    recompute: bool
    core: ChunkKernel


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, return_stats: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, LossStats]: ...


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, return_stats: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_tokens: int = 512,
    num_chunks: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    denominator: Tensor | float | None = None,
    vocab_size: int | None = None,
    valid_tokens: int | None = None,
    accumulate_dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    core: ChunkKernel = cross_entropy_chunk,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, LossStats]:
    """Cross entropy of `softcap * tanh((hidden @ weight^T + bias) / softcap)`, never holding [T, V] logits.

    Gradients are formed chunk by chunk while the chunk's logits are there (6 T D V FLOPs; recomputing them
    in backward would take 8), so a call holds one chunk of logits and the gradients: in fp32
    chunk * V * 4 + V * D * 4 + T * D * 4 bytes. Logits, losses and sums are fp32 (fp64 for fp64 inputs) whatever
    the inputs' dtype. The result does not depend on `chunk_tokens`.

    Gradients are rounded once, at the end. Two kinds of device round the gradient of the logits of bf16 inputs as
    well (relative error up to 2^-9 each, independent of the number of chunks): GPUs, and for hidden's gradient
    CPUs with bf16 instructions.

    Token t costs cross entropy (with `label_smoothing` and `class_weight` as in
    `torch.nn.functional.cross_entropy`) plus `z_loss * logsumexp(logits_t)^2` (PaLM's), all of it times
    `token_weight_t`. Ignored tokens cost exactly 0, and their hidden states, NaN included, reach nothing. Where
    knowing them costs no synchronisation (labels on the CPU, or `valid_tokens`) they are not computed at all.

    Args:
        hidden: [..., D], any floating dtype.
        weight: [V, D]; a plain tensor. For a sharded head, call its module: `ChunkedCLMCrossEntropyLoss`.
        labels: [...] int64 (or smaller), the classes, on hidden's device or the CPU; `ignore_index` counts nowhere.
        bias: [V].
        reduction: "sum"; "mean": sum / sum_t token_weight_t class_weight_{y_t}, 0.0 if nothing counts;
            "none": one value per token, whose gradient is computed again in backward.
        chunk_tokens: how many tokens' logits are held at once.
        num_chunks: the number of chunks, instead of `chunk_tokens`; T need not be a multiple of it.
        softcap: None or > 0.
        class_weight: [V], no gradient.
        token_weight: [...], no gradient.
        denominator: what "mean" divides by instead, e.g. `global_denominator`'s; never 0.
        vocab_size: the rows of weight, bias and class_weight past it are padding of the vocabulary: they are in no
            softmax and no smoothing, and their gradient is exactly 0.
        valid_tokens: how many labels are not ignored, if the host knows (more is allowed); saves the products of the
            others where the labels are not on the CPU.
        accumulate_dtype: torch.float32, or torch.float64 for a reference.
        recompute: form no gradients in forward, but compute each chunk again in backward, by plain autograd:
            slower, and differentiable twice. A second derivative holds the logits of all chunks.
        core: what is computed on one chunk of logits; to be replaced by a compiled one.
        return_stats: also return `LossStats`.

    Returns:
        [] (or [...] for "none") fp32, or fp64 for fp64 inputs; with `return_stats` a pair.

    Raises:
        ValueError: shapes that do not fit, or an option out of its range; a label out of its range on the CPU. A device
            stops with an assertion then, without a synchronisation before.
        RuntimeError: backward with create_graph=True, without `recompute`.
    """
    _check_options(reduction, chunk_tokens, num_chunks, label_smoothing, softcap, denominator, accumulate_dtype)
    _check_tensors(hidden, weight, labels, bias, class_weight, token_weight)
    _check_counts(weight.shape[0], labels, vocab_size, valid_tokens)
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    labels = as_labels(labels)
    check_labels(labels, vocab_size, ignore_index)
    dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else accumulate_dtype
    if class_weight is not None:
        class_weight = class_weight[:vocab_size].to(dtype)
    rows = _rows(hidden, labels, token_weight, ignore_index, valid_tokens, dtype)
    row_weight = rows.weight
    if reduction == "mean":
        row_weight = row_weight / _denominator(rows, class_weight, denominator)
    terms = Terms(label_smoothing, z_loss, softcap, class_weight)
    chunk_rows = chunk_tokens if num_chunks is None else max(1, -(-labels.numel() // num_chunks))
    problem = Problem(rows.labels, rows.valid, row_weight, terms, vocab_size, chunk_rows, core)
    value, losses = _value(rows.hidden, weight, bias, problem, reduction, recompute)
    if reduction == "none":
        value = _every_row(value, rows.kept, labels)
    return (value, _stats(losses, rows)) if return_stats else value


def projected_cross_entropy(
    hidden: Tensor,
    project: Callable[[Tensor], Tensor],
    labels: Tensor,
    *,
    ignore_index: int,
    chunk_tokens: int,
    num_chunks: int | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    vocab_size: int | None,
    core: ChunkKernel,
) -> tuple[Tensor, LossStats]:
    """The sum that `linear_cross_entropy` gives, of logits [C, V] = `project`(rows [C, D]) instead of a product."""
    _check_options("sum", chunk_tokens, num_chunks, label_smoothing, softcap, None, torch.float32)
    _check_labels_shape(hidden, labels)
    labels = as_labels(labels)
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    rows = _rows(hidden, labels, None, ignore_index, None, dtype)
    terms = Terms(label_smoothing, z_loss, softcap, None)
    chunk_rows = chunk_tokens if num_chunks is None else max(1, -(-labels.numel() // num_chunks))
    problem = Problem(rows.labels, rows.valid, rows.weight, terms, 0, chunk_rows, core)

    def classes_of(rows_of_head: int) -> int:
        _check_counts(rows_of_head, labels, vocab_size, None)
        classes = rows_of_head if vocab_size is None else vocab_size
        check_labels(labels, classes, ignore_index)
        return classes

    value, losses = sum_of_projected_losses(rows.hidden, project, problem, classes_of)
    return value, _stats(losses, rows)


def _check_options(
    reduction: str,
    chunk_tokens: int,
    num_chunks: int | None,
    label_smoothing: float,
    softcap: float | None,
    denominator: Any,
    accumulate_dtype: torch.dtype,
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction = {reduction!r}: must be "mean", "sum" or "none"')
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens = {chunk_tokens}: must be at least 1")
    if num_chunks is not None and num_chunks < 1:
        raise ValueError(f"num_chunks = {num_chunks}: must be at least 1, or None to go by chunk_tokens")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing = {label_smoothing}: must be between 0 and 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap = {softcap}: must be above 0, or None for none")
    if denominator is not None and reduction != "mean":
        raise ValueError(f'denominator with reduction = {reduction!r}: only "mean" divides')
    if accumulate_dtype not in (torch.float32, torch.float64):
        raise ValueError(f"accumulate_dtype = {accumulate_dtype}: must be torch.float32 or torch.float64")


def _check_tensors(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{name} is a DTensor: call the head's module, so that its hooks gather the weight once "
                "(ChunkedCLMCrossEntropyLoss does), or pass .full_tensor()"
            )
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}: must be [..., D] and [V, D]")
    _check_labels_shape(hidden, labels)
    for name, vector in (("bias", bias), ("class_weight", class_weight)):
        if vector is not None and vector.shape != weight.shape[:1]:
            raise ValueError(f"{name} {tuple(vector.shape)}: must be [V] = [{weight.shape[0]}]")
    if token_weight is not None and token_weight.shape != labels.shape:
        raise ValueError(
            f"token_weight {tuple(token_weight.shape)}: must have the shape of labels {tuple(labels.shape)}"
        )
    for name, constant in (("class_weight", class_weight), ("token_weight", token_weight)):
        if constant is not None and constant.requires_grad:
            raise ValueError(f"{name} requires a gradient, which is not formed: detach it")


def _check_labels_shape(hidden: Tensor, labels: Tensor) -> None:
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels {tuple(labels.shape)}: must have hidden's shape without its last dim, {tuple(hidden.shape[:-1])}"
        )


def _check_counts(head_rows: int, labels: Tensor, vocab_size: int | None, valid_tokens: int | None) -> None:
    if vocab_size is not None and not 1 <= vocab_size <= head_rows:
        raise ValueError(f"vocab_size = {vocab_size}: must be between 1 and the rows of weight, {head_rows}")
    if valid_tokens is not None and not 0 <= valid_tokens <= labels.numel():
        raise ValueError(f"valid_tokens = {valid_tokens}: must be between 0 and the number of labels, {labels.numel()}")


class _Rows(NamedTuple):
    """The rows that are computed, and what each one counts before any division."""

    hidden: Tensor
    """[T, D]."""
    labels: Tensor
    """[T] int64, 0 where ignored."""
    valid: Tensor
    """[T] bool."""
    weight: Tensor
    """[T] in the accumulation dtype, 0 where ignored."""
    kept: Tensor | None
    """Which rows of the batch they are; None: all."""


def _rows(
    hidden: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    ignore_index: int,
    valid_tokens: int | None,
    dtype: torch.dtype,
) -> _Rows:
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    weight = None if token_weight is None else token_weight.reshape(-1).to(dtype)
    kept = kept_rows(labels != ignore_index, valid_tokens, on_host=labels.device.type == "cpu")
    if kept is not None:
        labels = labels[kept]
        kept = kept.to(hidden.device, non_blocking=True)
        hidden = hidden.index_select(0, kept)
        weight = None if weight is None else weight.index_select(0, kept)
    labels = labels.to(hidden.device, non_blocking=True)
    valid = labels != ignore_index
    weight = valid.to(dtype) if weight is None else torch.where(valid, weight, 0)
    return _Rows(hidden, torch.where(valid, labels, 0), valid, weight, kept)


def _denominator(rows: _Rows, class_weight: Tensor | None, given: Tensor | float | None) -> Tensor | float:
    if given is not None:
        return given.to(rows.weight.dtype) if isinstance(given, Tensor) else given
    total = (rows.weight if class_weight is None else rows.weight * class_weight[rows.labels]).sum()
    return torch.where(total == 0, 1, total)  # nothing counts: 0.0, not NaN


def _value(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem, reduction: Reduction, recompute: bool
) -> tuple[Tensor, ChunkLosses]:
    if recompute:
        per_token, losses = recomputed_losses(hidden, weight, bias, problem)
        return (per_token if reduction == "none" else per_token.sum()), losses
    function = LossPerToken if reduction == "none" else SumOfLosses
    value, *columns = function.apply(hidden, weight, bias, problem, torch.is_grad_enabled())
    return value, ChunkLosses(*columns)


def _every_row(value: Tensor, kept: Tensor | None, labels: Tensor) -> Tensor:
    if kept is not None:
        value = value.new_zeros(labels.numel()).index_copy(0, kept, value)
    return value.reshape(labels.shape)


def _stats(losses: ChunkLosses, rows: _Rows) -> LossStats:
    return LossStats(
        cross_entropy=torch.where(rows.valid, rows.weight * losses.cross_entropy, 0).sum().detach(),
        z_loss=torch.where(rows.valid, rows.weight * losses.z_loss, 0).sum().detach(),
        tokens=rows.valid.sum(),
        correct=(rows.valid & losses.is_correct).sum(),
    )

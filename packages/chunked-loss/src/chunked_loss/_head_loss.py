"""From the caller's arguments to the result and its statistics, by whichever way the gradients are formed."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from chunked_loss._checks import check_options, check_tensors
from chunked_loss._chunk import ChunkLosses, Terms, cross_entropy_chunk
from chunked_loss._gradients_in_forward import LossPerToken, SumOfLosses
from chunked_loss._kept_rows import kept_rows
from chunked_loss._problem import ChunkKernel, Problem
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


class HeadLoss(NamedTuple):
    """The result in the accumulation dtype, straight from autograd's function, and the statistics."""

    value: Tensor
    stats: LossStats


def head_loss(
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
    kernel: ChunkKernel = cross_entropy_chunk,
) -> HeadLoss:
    """`linear_cross_entropy` with the chunk's arithmetic (`kernel`) to be replaced by a compiled one."""
    check_options(
        reduction=reduction,
        chunk_tokens=chunk_tokens,
        num_chunks=num_chunks,
        label_smoothing=label_smoothing,
        softcap=softcap,
        denominator=denominator,
        accumulate_dtype=accumulate_dtype,
    )
    check_tensors(
        hidden,
        weight,
        labels,
        bias=bias,
        class_weight=class_weight,
        token_weight=token_weight,
        vocab_size=vocab_size,
        valid_tokens=valid_tokens,
    )
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else accumulate_dtype
    if class_weight is not None:
        class_weight = class_weight[:vocab_size].to(dtype)
    rows = _rows(hidden, labels, token_weight, ignore_index, valid_tokens, dtype)
    row_weight = rows.weight
    if reduction == "mean":
        row_weight = row_weight / _denominator(rows, class_weight, denominator)
    problem = Problem(
        labels=rows.labels,
        valid=rows.valid,
        row_weight=row_weight,
        terms=Terms(label_smoothing, z_loss, softcap, class_weight),
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens if num_chunks is None else max(1, -(-labels.numel() // num_chunks)),
        kernel=kernel,
    )
    value, losses = _value(rows.hidden, weight, bias, problem, reduction, recompute)
    if reduction == "none":
        value = _every_row(value, rows.kept, labels)
    return HeadLoss(value, _stats(losses, rows))


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

"""One chunk of rows: what is asked of it, its three matrix products, and the arithmetic on its logits.

Which way the products of low-precision operands are taken depends on what the device has; results and sums are in the
accumulation dtype:

- a product of low-precision operands with a wider result (GPUs): the logits use it, and in bf16 the gradients too,
  after rounding the gradient of the logits to the operands' dtype (in fp16 it would underflow);
- a CPU with instructions for bf16, where torch's products round their results: only the gradient of the rows is
  one, as it is rounded to bf16 afterwards anyway. Rounded logits would show in the loss, and a rounded gradient of
  the weight would add up over the chunks;
- everything else, such as a CPU without these instructions, where torch's 16-bit products take 10 to 40 times as
  long as those in fp32: all three in fp32, with the weight widened a tile at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TILE_ROWS = 8192
"""Vocabulary rows that are widened, or rounded, at once."""


class Terms(NamedTuple):
    """What the loss of one token is made of, besides its cross entropy."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    class_weight: Tensor | None = None
    """[V] in the dtype of the logits."""


class ChunkLosses(NamedTuple):
    """Per token of the chunk, [C] each; unweighted by `row_weight`."""

    cross_entropy: Tensor
    z_loss: Tensor
    is_correct: Tensor


ChunkKernel = Callable[[Tensor, Tensor, Terms, Tensor | None], tuple[ChunkLosses, Tensor]]


class Problem(NamedTuple):
    """T rows of hidden states against a vocabulary, and what each row counts."""

    labels: Tensor
    """[T] int64, 0 where ignored."""
    valid: Tensor
    """[T] bool."""
    row_weight: Tensor
    """[T] in the accumulation dtype: d(result)/d(loss of token t), 0 where ignored."""
    terms: Terms
    vocab_size: int
    """Rows of the weight that are classes; the others are padding."""
    chunk_tokens: int
    kernel: ChunkKernel


def slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def joined(parts: list[ChunkLosses], like: Tensor) -> ChunkLosses:
    """The losses of all chunks; of no chunk too."""
    if not parts:
        empty = like.new_zeros(0)
        return ChunkLosses(empty, empty, empty.bool())
    return ChunkLosses(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Products go by the rules of this package; some devices, like meta, have no autocast to switch off."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def cross_entropy_chunk(
    logits: Tensor, labels: Tensor, terms: Terms, row_weight: Tensor | None
) -> tuple[ChunkLosses, Tensor]:
    """Losses of one chunk, and its gradient with respect to the logits.

    With l = softcap(logits), lse_t = logsumexp_v l_tv, y the label, w the class weights (1 without) and s the
    smoothing, token t costs

        (1 - s) w_y (lse_t - l_ty) + s/V sum_v w_v (lse_t - l_tv) + z_loss lse_t^2

    Args:
        logits: [C, V] fp32 (fp64 allowed), **overwritten** - by the gradient if `row_weight` is given.
        labels: [C] int64, each in range(V); rows that count nowhere have any label and weight 0.
        row_weight: [C], d(loss)/d(loss of token t); None: no gradient is formed.

    Returns:
        the losses, and `logits`.
    """
    cap_slope = None
    if terms.softcap is not None:
        logits.div_(terms.softcap).tanh_()
        if row_weight is not None:
            cap_slope = logits.square().neg_().add_(1.0)
        logits.mul_(terms.softcap)
    peak = logits.amax(dim=-1)
    logits.sub_(peak[:, None])
    index = labels[:, None]
    at_label = logits.gather(1, index)[:, 0]
    smoothing_sum = _weighted_sum(logits, terms) if terms.label_smoothing else None
    logits.exp_()
    total = logits.sum(dim=-1)
    log_total = total.log()
    lse = log_total + peak
    label_weight = (1.0 - terms.label_smoothing) * _weight_at(labels, terms, log_total)
    cross_entropy = label_weight * (log_total - at_label)
    if smoothing_sum is not None:
        share = terms.label_smoothing / logits.shape[1]
        cross_entropy = cross_entropy + share * (_weight_total(logits, terms) * log_total - smoothing_sum)
    losses = ChunkLosses(cross_entropy, terms.z_loss * lse.square(), at_label == 0)
    if row_weight is not None:
        _gradient_(logits, index, terms, row_weight, total, lse, label_weight)
        if cap_slope is not None:
            logits.mul_(cap_slope)
    return losses, logits


def _gradient_(
    exps: Tensor, index: Tensor, terms: Terms, row_weight: Tensor, total: Tensor, lse: Tensor, label_weight: Tensor
) -> None:
    """Turn exp(l - max) into d(sum_t row_weight_t loss_t)/dl, in place.

    The probabilities share one factor per row, so one product and one scattered subtraction are enough.
    """
    share = terms.label_smoothing / exps.shape[1]
    factor = label_weight + 2.0 * terms.z_loss * lse
    if share:
        factor = factor + share * _weight_total(exps, terms)
    exps.mul_((row_weight * factor / total)[:, None])
    exps.scatter_add_(1, index, -(row_weight * label_weight)[:, None])
    if not share:
        return
    if terms.class_weight is None:
        exps.sub_((share * row_weight)[:, None])
    else:
        exps.addr_(row_weight, terms.class_weight, alpha=-share)


def _weight_at(labels: Tensor, terms: Terms, like: Tensor) -> Tensor:
    return torch.ones_like(like) if terms.class_weight is None else terms.class_weight[labels]


def _weight_total(logits: Tensor, terms: Terms) -> Tensor | float:
    return float(logits.shape[1]) if terms.class_weight is None else terms.class_weight.sum()


def _weighted_sum(logits: Tensor, terms: Terms) -> Tensor:
    return logits.sum(dim=-1) if terms.class_weight is None else logits @ terms.class_weight


class Products(NamedTuple):
    """What low-precision operands are used as they are for; where False, they are widened."""

    widening_logits: bool = False
    widening_gradients: bool = False
    native_d_rows: bool = False

    def logits_(self, out: Tensor, rows: Tensor, weight: Tensor) -> None:
        """out [C, V] = rows [C, D] @ weight [V, D]^T."""
        if self.widening_logits:
            torch.mm(rows, weight.T, out_dtype=out.dtype, out=out)
        elif weight.dtype == out.dtype:
            torch.mm(rows.to(out.dtype), weight.T, out=out)
        else:
            wide = rows.to(out.dtype)
            for tile in tiles(weight):
                torch.mm(wide, weight[tile].to(out.dtype).T, out=out[:, tile])

    def d_rows_(self, out: Tensor, d_logits: Tensor, weight: Tensor) -> None:
        """out [C, D] = d_logits [C, V] @ weight [V, D]."""
        if self.widening_gradients:
            torch.mm(d_logits.to(weight.dtype), weight, out_dtype=out.dtype, out=out)
        elif self.native_d_rows:
            out.copy_(d_logits.to(weight.dtype) @ weight)
        elif weight.dtype == out.dtype:
            torch.mm(d_logits, weight, out=out)
        else:
            out.zero_()
            for tile in tiles(weight):
                out.addmm_(d_logits[:, tile], weight[tile].to(out.dtype))

    def add_d_weight_(self, total: Tensor, d_logits: Tensor, rows: Tensor) -> None:
        """total [V, D] += d_logits [C, V]^T @ rows [C, D]."""
        if self.widening_gradients:
            total.add_(torch.mm(d_logits.T.to(rows.dtype), rows, out_dtype=total.dtype))
        else:
            total.addmm_(d_logits.T, rows.to(total.dtype))


def products_for(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Products:
    """The way for operands of these dtypes with results in `dtype`."""
    operand, device_type = weight.dtype, weight.device.type
    if operand != hidden.dtype or operand not in (torch.bfloat16, torch.float16) or dtype != torch.float32:
        return Products()
    if _widens(device_type, operand):
        return Products(widening_logits=True, widening_gradients=operand == torch.bfloat16)
    return Products(native_d_rows=operand == torch.bfloat16 and device_type == "cpu" and _cpu_multiplies_bf16())


def tiles(matrix: Tensor) -> Iterator[slice]:
    """Its rows, some thousand at a time."""
    return slices(matrix.shape[0], _TILE_ROWS)


@cache
def _widens(device_type: str, dtype: torch.dtype) -> bool:
    """Whether this device multiplies `dtype` into an fp32 result; asked by trying, as it differs by build."""
    probe = torch.ones(16, 16, dtype=dtype, device=device_type)
    try:
        torch.mm(probe, probe, out_dtype=torch.float32)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


@cache
def _cpu_multiplies_bf16() -> bool:
    """Whether this machine's CPU has instructions for it; False where torch does not tell."""
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if known.get("architecture") == "x86_64":
        return bool(known.get("avx512_bf16", False) or known.get("amx_bf16", False))
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(known) and supported is not None and bool(supported())

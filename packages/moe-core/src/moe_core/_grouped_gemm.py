"""One matrix product per expert over consecutive rows, by `F.grouped_mm` or by a loop.

Both compute `rows[s:t] @ weight[i].T` for the rows s..t of expert i, give experts without rows a gradient of
exact zeros, and give rows past the last expert's, which may hold anything, zeros in the result and in the
gradient, written over what is there so that a NaN does not spread.

The operators that multiply carry the attribute `expensive`: a policy for selective activation checkpointing that knows
only torch's products can keep their results as well.

A CPU without instructions for a 16-bit dtype takes up to 40 times longer for its products than for those in fp32;
there both take them in fp32 and round the results, which is the same arithmetic.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_core import _kept_memory
from moe_core._numerics import BLAS_BYTES, aligned

_STRIDE_BYTES = 16
"""What `F.grouped_mm` asks of the strides of its operands."""


class GroupedGemm(Protocol):
    """A back end. `exact` says that no rows lie past the last expert's, `host_counts` is a copy of
    `tokens_per_expert` on the host if there is one; both only save work."""

    def __call__(
        self,
        rows: Tensor,
        weight: Tensor,
        tokens_per_expert: Tensor,
        *,
        exact: bool = False,
        host_counts: Tensor | None = None,
    ) -> Tensor:
        """[R, I], [e, O, I], [e] int64 -> [R, O], all of one dtype."""
        ...


def grouped_mm(
    rows: Tensor,
    weight: Tensor,
    tokens_per_expert: Tensor,
    *,
    exact: bool = False,
    host_counts: Tensor | None = None,
) -> Tensor:
    """[R, I], [e, O, I], [e] int64 -> [R, O] by `torch.nn.functional.grouped_mm`; no host sync.

    Raises:
        ValueError: a dtype, device or width that `F.grouped_mm` does not take; see `grouped_mm_takes`.
    """
    _check_shapes(rows, weight, tokens_per_expert)
    reason = why_not_grouped_mm(rows, weight)
    if reason:
        raise ValueError(f'grouped_gemm = "grouped_mm": {reason}; use "loop", or "auto" to choose by case')
    offsets = tokens_per_expert.cumsum(0, dtype=torch.int32)
    return _GroupedMM.apply(rows, weight, offsets, exact)


def loop(
    rows: Tensor,
    weight: Tensor,
    tokens_per_expert: Tensor,
    *,
    exact: bool = False,
    host_counts: Tensor | None = None,
) -> Tensor:
    """[R, I], [e, O, I], [e] int64 -> [R, O], expert by expert, in any dtype and width.

    Reads the counts on the host: one sync, unless `host_counts` or `tokens_per_expert` is there already.
    """
    _check_shapes(rows, weight, tokens_per_expert)
    if rows.is_meta:
        return F.linear(rows, weight[0])
    counts = tokens_per_expert.to("cpu") if host_counts is None else host_counts
    return _Loop.apply(rows, weight, counts.tolist())


def why_not_grouped_mm(rows: Tensor, weight: Tensor) -> str:
    """Why `F.grouped_mm` cannot compute rows [R, I] x weight [e, O, I]; empty if it can."""
    if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {rows.dtype} is none of float32, bfloat16, float16"
    if rows.is_meta:
        return "it has no kernel for meta tensors"
    for width in weight.shape[1:]:
        if width * rows.element_size() % _STRIDE_BYTES:
            multiple = _STRIDE_BYTES // rows.element_size()
            return f"width {width} is not a multiple of {multiple} ({rows.dtype})"
    return ""


def pick(rows: Tensor, *weights: Tensor) -> GroupedGemm:
    """The back end for these operands: `grouped_mm` where it has a fast kernel, else `loop`.

    Off the CPU that is bf16 (other dtypes go expert by expert there too, and read the counts back). On the CPU
    narrow widths leave an expert's rows unaligned, where only `loop` keeps the result independent of that; and
    where products of a 16-bit dtype are taken in fp32, `loop` converts one expert at a time.
    """
    if any(why_not_grouped_mm(rows, weight) for weight in weights) or _through_fp32(rows):
        return loop
    if rows.device.type == "cpu":
        widths = [width for weight in weights for width in weight.shape[1:]]
        return loop if any(width * rows.element_size() % BLAS_BYTES for width in widths) else grouped_mm
    return grouped_mm if rows.dtype == torch.bfloat16 else loop


def resolve(grouped_gemm: "str | GroupedGemm") -> "GroupedGemm | None":
    """The back end by name or as it is; None for "auto"."""
    if callable(grouped_gemm):
        return grouped_gemm
    if grouped_gemm == "auto":
        return None
    if grouped_gemm not in ("grouped_mm", "loop"):
        raise ValueError(f'grouped_gemm = {grouped_gemm!r}: must be "auto", "grouped_mm", "loop" or a callable')
    return grouped_mm if grouped_gemm == "grouped_mm" else loop


def check_dtypes(rows: Tensor, weight: Tensor) -> None:
    """Raises ValueError unless they are the same."""
    if rows.dtype != weight.dtype:
        raise ValueError(
            f"rows are {rows.dtype} and the experts' weights {weight.dtype}: cast one of them, or give the experts "
            "the mixed-precision policy of the layers around them"
        )


def _check_shapes(rows: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> None:
    check_dtypes(rows, weight)
    if rows.shape[-1] != weight.shape[-1] or tokens_per_expert.shape != weight.shape[:1]:
        raise ValueError(
            f"rows {tuple(rows.shape)}, weight {tuple(weight.shape)} and tokens_per_expert "
            f"{tuple(tokens_per_expert.shape)} must be [R, I], [e, O, I] and [e]"
        )


def _through_fp32(rows: Tensor) -> bool:
    """Whether products of these rows are taken in fp32."""
    return rows.device.type == "cpu" and not _has_instructions(rows.dtype)


@cache
def _has_instructions(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU multiplies in `dtype`."""
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if not known:  # an older torch does not tell
        return True
    if known.get("architecture") == "x86_64":
        names = ("avx512_bf16", "amx_bf16") if dtype == torch.bfloat16 else ("avx512_fp16", "amx_fp16")
        return any(known.get(name, False) for name in names)
    bf16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.bfloat16 and bf16


def _grouped_product(left: Tensor, right: Tensor, offsets: Tensor, exact: bool) -> Tensor:
    """[R, I], [e, I, O], where each expert's rows end [e] -> [R, O]; zeros past the last expert's rows."""
    if left.device.type == "cpu":
        return _products_on_cpu(left, right, offsets)
    out = _grouped_product_by_torch(left, right, offsets)
    return out if exact else _zero_past(out, offsets[-1])


def _grouped_product_by_torch(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    if _through_fp32(left):
        return F.grouped_mm(left.float(), right.float(), offs=offsets).to(left.dtype)
    return F.grouped_mm(left, right, offs=offsets)


def _weight_gradient_by_offsets(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    if grad.device.type == "cpu":
        return _weight_gradient_on_cpu(grad, rows, offsets)
    return _grouped_product_by_torch(grad.t(), rows, offsets)


def _zero_past(rows: Tensor, end: Tensor) -> Tensor:
    inside = torch.arange(rows.shape[0], device=rows.device) < end
    return torch.where(inside.unsqueeze(1), rows, 0)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor, exact: bool) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        ctx.exact = exact
        if rows.shape[0] == 0:
            return rows.new_zeros(0, weight.shape[1])
        return _grouped_product(rows, weight.transpose(1, 2), offsets, exact)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight, offsets = ctx.saved_tensors
        needs_rows, needs_weight = ctx.needs_input_grad[:2]
        if grad.shape[0] == 0:
            return rows.new_zeros(rows.shape), torch.zeros_like(weight), None, None
        grad = grad.contiguous()  # an expanded gradient has strides that the kernel refuses
        grad_rows = grad_weight = None
        if needs_rows:
            grad_rows = _grouped_product(grad, weight, offsets, ctx.exact)
        if needs_weight:
            grad_weight = _weight_gradient_by_offsets(grad, rows, offsets)
        return grad_rows, grad_weight, None, None


class _Loop(torch.autograd.Function):
    """Writes each expert's weight gradient into one stack; indexing `weight[i]` under autograd would make a
    gradient of the full stack for every expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        return _products(rows, weight.transpose(1, 2), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = _products(grad, weight, ctx.counts) if ctx.needs_input_grad[0] else None
        grad_weight = _weight_gradient(grad, rows, ctx.counts) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weight, None


# Operators of their own, since a checkpointing policy that keeps the results of matrix products would keep those
# of `mm(..., out=...)` as well, and leave `out` unwritten in the recomputation.
@torch.library.custom_op("moe_core::grouped_products", mutates_args=())
def _products(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """[R, I], [e, I, O] -> [R, O]; zeros past the last expert's rows."""
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            end = start + count
            _multiply(aligned(rows[start:end]), aligned(weight[expert]), out[start:end])
        start += count
    out[start:].zero_()
    return out


@_products.register_fake
def _(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@torch.library.custom_op("moe_core::grouped_weight_gradient", mutates_args=())
def _weight_gradient(grad: Tensor, rows: Tensor, counts: list[int]) -> Tensor:
    """[R, O], [R, I] -> [e, O, I]; zeros for experts without rows."""
    stack = _kept_memory.new_empty(rows, (len(counts), grad.shape[1], rows.shape[1]))
    start = 0
    for expert, count in enumerate(counts):
        if count:
            end = start + count
            _multiply(aligned(grad[start:end]).t(), aligned(rows[start:end]), stack[expert])
        else:
            stack[expert].zero_()
        start += count
    return stack


@_weight_gradient.register_fake
def _(grad: Tensor, rows: Tensor, counts: list[int]) -> Tensor:
    return rows.new_empty(len(counts), grad.shape[1], rows.shape[1])


@torch.library.custom_op("moe_core::grouped_products_on_cpu", mutates_args=())
def _products_on_cpu(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """[R, I], [e, I, O] -> [R, O] by torch's operator, which a compiler can trace in bf16 only; zeros past the end.

    On a CPU the host reads the end at no cost, and need not pass over all rows for those that lie past it.
    """
    out = _grouped_product_by_torch(rows, weight, offsets)
    end = int(offsets[-1]) if len(offsets) else 0
    out[end:].zero_()
    return out


@_products_on_cpu.register_fake
def _(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@torch.library.custom_op("moe_core::grouped_weight_gradient_on_cpu", mutates_args=())
def _weight_gradient_on_cpu(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """The same from where each expert's rows end, [e], which on a CPU the host can read at no cost."""
    ends = [int(end) for end in offsets]
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    stack: Tensor = _weight_gradient(grad, rows, counts)
    return stack


@_weight_gradient_on_cpu.register_fake
def _(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(offsets.shape[0], grad.shape[1], rows.shape[1])


for _operator in (torch.ops.moe_core.grouped_products.default, torch.ops.moe_core.grouped_products_on_cpu.default):
    setattr(_operator, "expensive", True)  # noqa: B010 - mypy knows no such attribute


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    if _through_fp32(out):
        out.copy_(torch.mm(left.float(), right.float()))
        return
    # which kernel BLAS takes, and with it the last bit, depends on the alignment of its operands
    if out.device.type == "cpu" and out.data_ptr() % BLAS_BYTES:
        out.copy_(torch.mm(left, right))
    else:
        torch.mm(left, right, out=out)

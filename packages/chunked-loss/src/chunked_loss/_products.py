"""The three matrix products of the loss, with low-precision operands and results in the accumulation dtype.

Which way they are taken depends on what the device has:

- a product of low-precision operands with a wider result (GPUs): the logits use it, and in bf16 the gradients too,
  after rounding the gradient of the logits to the operands' dtype (in fp16 it would underflow);
- a CPU with instructions for bf16, where torch's products round their results: only the gradient of the rows is
  one, as it is rounded to bf16 afterwards anyway. Rounded logits would show in the loss, and a rounded gradient of
  the weight would add up over the chunks;
- everything else, such as a CPU without these instructions, where torch's 16-bit products take 10 to 40 times as
  long as those in fp32: all three in fp32, with the weight widened a tile at a time.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TILE_ROWS = 8192
"""Vocabulary rows that are widened, or rounded, at once."""


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
    for start in range(0, matrix.shape[0], _TILE_ROWS):
        yield slice(start, min(start + _TILE_ROWS, matrix.shape[0]))


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

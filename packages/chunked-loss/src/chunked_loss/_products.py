"""Matrix products of low-precision operands that come out, and add up, in the accumulation dtype."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

_TILE_ROWS = 8192
"""Vocabulary rows that are widened at once where the device has no product with a wider result."""


def accumulate_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """fp64 if an operand is fp64, else fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


@cache
def _widens(device_type: str, dtype: torch.dtype) -> bool:
    """Whether this device multiplies `dtype` into an fp32 result; asked by trying, as it differs by build."""
    probe = torch.ones(16, 16, dtype=dtype, device=device_type)
    try:
        torch.mm(probe, probe, out_dtype=torch.float32)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def logits_(out: Tensor, rows: Tensor, weight: Tensor) -> None:
    """out [C, V] = rows [C, D] @ weight [V, D]^T."""
    if weight.dtype == out.dtype:
        torch.mm(rows.to(out.dtype), weight.T, out=out)
    elif rows.dtype == weight.dtype and _widens(weight.device.type, weight.dtype):
        torch.mm(rows, weight.T, out_dtype=out.dtype, out=out)
    else:
        wide = rows.to(out.dtype)
        for tile in _tiles(weight):
            torch.mm(wide, weight[tile].to(out.dtype).T, out=out[:, tile])


def d_rows(d_logits: Tensor, weight: Tensor) -> Tensor:
    """d_logits [C, V] @ weight [V, D], in the dtype of d_logits."""
    if weight.dtype == d_logits.dtype:
        return d_logits @ weight
    if _widens(weight.device.type, weight.dtype):
        return torch.mm(d_logits.to(weight.dtype), weight, out_dtype=d_logits.dtype)
    total = d_logits.new_zeros(d_logits.shape[0], weight.shape[1])
    for tile in _tiles(weight):
        total.addmm_(d_logits[:, tile], weight[tile].to(total.dtype))
    return total


def add_d_weight_(total: Tensor, d_logits: Tensor, rows: Tensor) -> None:
    """total [V, D] += d_logits [C, V]^T @ rows [C, D]; `total` has the accumulation dtype."""
    if rows.dtype != total.dtype and _widens(rows.device.type, rows.dtype):
        total.add_(torch.mm(d_logits.T.to(rows.dtype), rows, out_dtype=total.dtype))
    else:
        total.addmm_(d_logits.T, rows.to(total.dtype))


def _tiles(weight: Tensor) -> Iterator[slice]:
    for start in range(0, weight.shape[0], _TILE_ROWS):
        yield slice(start, min(start + _TILE_ROWS, weight.shape[0]))

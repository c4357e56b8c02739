"""Arithmetic whose result for a row does not depend on which rows lie beside it.

Expert parallelism spreads the rows of a batch over ranks, and promises the bits of one process. On the CPU
two things would break that: BLAS computes a product of very few rows with another kernel, and vectorised
elementwise functions compute the last, incomplete vector with the scalar function of the C library.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_FEWEST_ROWS = 16
_ELEMENTS = 64
"""Two AVX-512 vectors of floats for each of two threads: a multiple of this leaves no incomplete vector."""


def linear(rows: Tensor, weight: Tensor) -> Tensor:
    """[R, I], [O, I] -> [R, O] = rows @ weight.T."""
    count = rows.shape[0]
    if 0 < count < _FEWEST_ROWS:
        padded = F.linear(F.pad(rows, (0, 0, 0, _FEWEST_ROWS - count)), weight)
        # a module must not hand out a view: FSDP's hooks take its outputs for tensors of their own
        return padded[:count].clone()
    return F.linear(rows, weight)


def elementwise(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """[R, F] -> function(rows), [R, F]; the function must work on each element alone."""
    width = rows.shape[-1]
    missing = -width % _ELEMENTS
    if missing and rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64):
        return function(F.pad(rows, (0, missing)))[..., :width]
    return function(rows)

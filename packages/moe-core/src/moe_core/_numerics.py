"""Arithmetic whose result does not depend on what surrounds it: the rows beside a row, autocast, shardings.

Expert parallelism spreads the rows of a batch over ranks, and promises the bits of one process. On the CPU
three things would break that: BLAS computes a product of few rows with another kernel, and so the last rows of
a narrow matrix, or those of one that begins at an odd address; and vectorised elementwise functions compute the
last, incomplete vector with the scalar function of the C library.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

_FEWEST_ROWS = 16
_WIDTH = 16
"""With both widths of a product a multiple of this, all its rows go through one kernel of BLAS."""
_ELEMENTS = 64
"""Two AVX-512 vectors of 16-bit numbers, or four of floats: half of a multiple of this is no incomplete vector."""
_SHARES = 2
_GRAIN = 32768
"""Elements from which on torch shares elementwise work among threads."""
BLAS_BYTES = 64
"""From this alignment on a BLAS result does not depend on where in memory its operands lie."""


class Linear(nn.Linear):
    """`nn.Linear` without bias whose output and input gradient for a row do not depend on the other rows."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if input.dim() == 2:
            return linear(input, self.weight)
        return linear(input.reshape(-1, self.in_features), self.weight).view(*input.shape[:-1], self.out_features)


def linear(rows: Tensor, weight: Tensor) -> Tensor:
    """[R, I], [O, I] -> [R, O] = rows @ weight.T; invariant in the gradient of the rows too.

    Where it takes padding to get there, the gradients are computed from the padded matrices as well.
    """
    (count, width), outputs = rows.shape, weight.shape[0]
    multiple = _WIDTH if rows.device.type == "cpu" else 1
    more_rows = max(_FEWEST_ROWS - count, 0) if count else 0
    more_width, more_outputs = -width % multiple, -outputs % multiple
    rows = F.pad(rows, (0, more_width, 0, more_rows)) if more_rows or more_width else aligned(rows)
    weight = F.pad(weight, (0, more_width, 0, more_outputs)) if more_width or more_outputs else aligned(weight)
    product = F.linear(rows, weight)
    if more_rows or more_outputs:
        # a module must not hand out a view: FSDP's hooks take its outputs for tensors of their own
        return product[:count, :outputs].clone()
    if product.requires_grad and _has_an_address(product):
        product.register_hook(aligned)
    return product


def elementwise(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """[R, F] -> function(rows), [R, F]; the function must work on each element alone."""
    if rows.device.type != "cpu":
        return function(rows)
    count, width = rows.shape
    missing = -width % _ELEMENTS
    more_rows = _rows_to_share(count, width + missing) - count
    if missing or more_rows:
        return function(F.pad(rows, (0, missing, 0, more_rows)))[:count, :width]
    # a part of wider rows goes another way, unless it is one row alone
    return function(rows.contiguous())


def _rows_to_share(count: int, width: int) -> int:
    """The rows, and how many more it takes for threads to share them without breaking a vector.

    Torch gives each of n threads a n-th of the elements, n being at most one for each `_GRAIN`.
    """
    threads = torch.get_num_threads()
    if threads <= _SHARES or torch.compiler.is_compiling():
        return count
    while True:
        shares = min(threads, -(-count * width // _GRAIN))
        if shares <= _SHARES or count % shares == 0:
            return count
        count += -count % shares


def aligned(matrix: Tensor) -> Tensor:
    """The matrix, or a copy at an address from which BLAS always takes the same way."""
    return matrix.clone() if _has_an_address(matrix) and matrix.data_ptr() % BLAS_BYTES else matrix


def _has_an_address(matrix: Tensor) -> bool:
    """Whether it lies in this process's memory, and not in a device's, a compiler's or a subclass's."""
    plain = type(matrix) in (Tensor, nn.Parameter)
    return plain and matrix.device.type == "cpu" and not torch.compiler.is_compiling()


def local_tensor(weight: Tensor) -> Tensor:
    """A plain tensor as it is; of a DTensor the local shard, with the right gradient.

    Where a weight is replicated, ranks use it on different tokens: their gradients are parts of a sum.
    """
    if not isinstance(weight, DTensor):
        return weight
    gradient = [Partial() if isinstance(p, Replicate) else p for p in weight.placements]
    return weight.to_local(grad_placements=gradient)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """fp32, or the tensor's dtype if that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast computes in on these devices; None where it is off or there is none."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """A block that autocast leaves alone."""
    return nullcontext() if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)

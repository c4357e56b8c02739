"""The part of a parameter that this rank computes with."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate


def local_tensor(weight: Tensor) -> Tensor:
    """A plain tensor as it is; of a DTensor the local shard, with the right gradient.

    Where a weight is replicated, ranks use it on different tokens: their gradients are parts of a sum.
    """
    if not isinstance(weight, DTensor):
        return weight
    gradient = [Partial() if isinstance(p, Replicate) else p for p in weight.placements]
    return weight.to_local(grad_placements=gradient)


def owned_rows(weight: Tensor) -> list[int]:
    """The rows of the whole weight that this rank holds, in the order in which they lie in its shard.

    Collective for a DTensor: each rank marks its rows, and looks for its marks in the whole. How nested shardings
    cut a dim (FSDP's of a stack that is sharded over experts already, evenly or not) is thus left to torch.

    Raises:
        ValueError: the weight is cut along another dim than its first, or holds parts of a sum.
    """
    if not isinstance(weight, DTensor):
        return list(range(weight.shape[0]))
    for placement in weight.placements:
        if getattr(placement, "dim", None) != 0 and not isinstance(placement, Replicate):
            raise ValueError(
                f"a weight placed as {weight.placements} cannot be drawn row by row: only its first dim may be sharded"
            )
    local, mesh = weight.to_local(), weight.device_mesh
    first_mark = torch.distributed.get_rank() * weight.shape[0]
    marks = torch.arange(first_mark, first_mark + local.shape[0], device=local.device)
    shape = weight.shape[:1]
    whole = DTensor.from_local(marks, mesh, weight.placements, run_check=False, shape=shape, stride=(1,)).full_tensor()
    rows = {mark: row for row, mark in enumerate(whole.tolist())}
    return [rows[mark] for mark in marks.tolist()]

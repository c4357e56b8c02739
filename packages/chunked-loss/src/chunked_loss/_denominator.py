"""The count of valid tokens that a step's loss is divided by."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


def global_denominator(
    labels_of_all_microbatches: Iterable[Tensor],
    dp_mesh: DeviceMesh | ProcessGroup | None,
    *,
    ignore_index: int = -100,
) -> Tensor:
    """Valid tokens of the whole step / number of data-parallel ranks.

    FSDP and DDP average gradients over the data-parallel ranks. A rank that divides the *sum* of its own
    losses by this number therefore contributes to the mean over all valid tokens of the step, whatever the
    share of each rank and microbatch, and the trainer needs no factor of its own.

    Args:
        labels_of_all_microbatches: this rank's label tensors of one optimizer step, int64, any shapes.
        dp_mesh: all data-parallel ranks: a mesh (one all-reduce per axis, so 1-D means one collective), or
            a process group; None for one process. Every rank must call.

    Returns:
        [] fp32 on the labels' device, without a host synchronisation. Never 0: with no valid token anywhere it
        is 1.0, so that the loss is 0.0 and not NaN.

    Raises:
        ValueError: no label tensor is given.
    """
    counts = [(labels != ignore_index).sum() for labels in labels_of_all_microbatches]
    if not counts:
        raise ValueError("labels_of_all_microbatches is empty: give the labels of each microbatch of the step")
    total = torch.stack(counts).sum()
    ranks = 1
    for group in _groups(dp_mesh):
        dist.all_reduce(total, group=group)
        ranks *= group.size()
    return torch.where(total == 0, ranks, total).to(torch.float32) / ranks


def _groups(dp_mesh: DeviceMesh | ProcessGroup | None) -> list[ProcessGroup]:
    if dp_mesh is None:
        return []
    if isinstance(dp_mesh, ProcessGroup):
        return [dp_mesh]
    return [dp_mesh.get_group(axis) for axis in range(dp_mesh.ndim)]

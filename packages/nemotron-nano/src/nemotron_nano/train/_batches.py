"""Batches that all ranks have as many of: each is a collective pass through the model, and one more would hang."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_core.plugins import Batch


class TrainingError(RuntimeError):
    """Training can't go on; raised on all ranks alike."""


def as_many_on_every_rank(batches: Sequence[Batch], dp_mesh: DeviceMesh, source: str) -> Sequence[Batch]:
    """The batches, once all ranks of `dp_mesh` have said how many they have; one collective and one host sync.

    Args:
        source: what gave the batches, for the message.

    Raises:
        TrainingError: on all ranks, if they have different numbers of batches, or none.
    """
    mine = torch.tensor([len(batches)], device=dp_mesh.device_type)
    by_rank = [torch.empty_like(mine) for _ in range(dp_mesh.size())]
    dist.all_gather(by_rank, mine, group=dp_mesh.get_group())
    counts = torch.cat(by_rank).tolist()
    if len(set(counts)) > 1 or counts[0] == 0:
        raise TrainingError(
            f"{source} gave ranks {counts} batches: must be as many on every rank, and at least one; pad the short "
            "ranks with batches whose labels are all ignored"
        )
    return batches

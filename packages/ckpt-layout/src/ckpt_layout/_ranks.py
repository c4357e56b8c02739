"""What all ranks do together: fail on all if one does, and prove that what they have copies of is the same."""

import hashlib
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ckpt_layout._errors import PeerError, ReplicaMismatchError
from ckpt_layout._shards import local_of, model_tensors, raw_bytes, region_of


def world() -> tuple[int, int]:
    """(rank, number of ranks) of the default process group; (0, 1) without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gathered(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """`value` of every rank, by rank."""
    if group is None and world()[1] == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def together(what: str, group: ProcessGroup | None = None) -> Iterator[None]:
    """Leave the block on all ranks or raise on all: the own error where there is one, `PeerError` elsewhere.

    The block must hold no collective, for a rank that failed does not take part in the next one.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # raised again below, once the peers know of it
        error = caught
    reports = gathered(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    failed = [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report is not None]
    if failed:
        raise PeerError(f"{what} failed on {'; '.join(failed)}")


@contextmanager
def removed_on_failure(partial: Path) -> Iterator[None]:
    """Remove the folder `partial` if the block raises, so that a full disk is not full of what is of no use.

    The block must raise on all ranks or on none, as `together` does: then nobody writes there any more.
    """
    try:
        yield
    except Exception:  # whatever it was: it is raised again below, once the folder is gone
        if world()[0] == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def assert_replicated(model: nn.Module, mesh_or_group: DeviceMesh | ProcessGroup | None = None) -> None:
    """Compare, bit by bit, every parameter and persistent buffer that several ranks hold. All ranks must call.

    Ranks that hold the same region of the same tensor must hold the same bytes: plain tensors on all ranks,
    the shards of HSDP replicas, an expert-parallel shard on the ranks that repeat it. A router bias that
    drifted apart is found here, before a file gets the value of whichever rank wrote it.

    Args:
        mesh_or_group: the ranks to compare; None: all of the default process group.

    Raises:
        ReplicaMismatchError: on all ranks, with each tensor's name and which ranks agree with each other.
    """
    groups: list[ProcessGroup | None]
    if isinstance(mesh_or_group, DeviceMesh):
        groups = [mesh_or_group.get_group(axis) for axis in range(mesh_or_group.ndim)]
    else:
        groups = [mesh_or_group]
    if mesh_or_group is None and world()[1] == 1:
        return
    found = [line for group in groups for line in _different(model, group)]
    if len(groups) > 1:  # what others found along another axis, so that all ranks raise or none
        for group in groups:
            found = list(dict.fromkeys(line for theirs in gathered(found, group) for line in theirs))
    if found:
        raise ReplicaMismatchError(
            "these must be equal on all ranks that hold them, and are not (ranks that agree are listed together): "
            + "; ".join(found)
        )


def _different(model: nn.Module, group: ProcessGroup | None) -> list[str]:
    size = world()[1] if group is None else group.size()
    mine = {
        name: (region_of(tensor), _digest(local_of(tensor)))
        for name, tensor in model_tensors(model).items()
        if _has_copies(tensor, size)
    }
    by_tensor: dict[tuple, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    ranks = range(size) if group is None else dist.get_process_group_ranks(group)
    for rank, theirs in zip(ranks, gathered(mine, group), strict=True):
        for name, (region, checksum) in theirs.items():
            by_tensor[name, region][checksum].append(rank)
    return [
        f"{name}: ranks " + " / ".join(",".join(map(str, ranks)) for ranks in versions.values())
        for (name, _), versions in by_tensor.items()
        if len(versions) > 1
    ]


def _has_copies(tensor: Tensor, ranks: int) -> bool:
    if not isinstance(tensor, DTensor):
        return True
    return tensor.device_mesh.size() < ranks or any(isinstance(p, Replicate) for p in tensor.placements)


def _digest(tensor: Tensor) -> str:
    """A digest of dtype, shape and bits."""
    tensor = tensor.detach().cpu().contiguous()
    checksum = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    checksum.update(raw_bytes(tensor))
    return checksum.hexdigest()

"""Proof that what every rank has a copy of is the same on all of them."""

import ctypes
import hashlib
from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ckpt_layout._errors import ReplicaMismatchError
from ckpt_layout._model_tensors import model_tensors
from ckpt_layout._region import local_of, region_of
from ckpt_layout._together import gathered, world


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
    for group in groups:
        _compare(model, group)


def _compare(model: nn.Module, group: ProcessGroup | None) -> None:
    size = world()[1] if group is None else group.size()
    mine = {
        name: (region_of(tensor), digest(local_of(tensor)))
        for name, tensor in model_tensors(model).items()
        if _has_copies(tensor, size)
    }
    by_tensor: dict[tuple, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, theirs in enumerate(gathered(mine, group)):
        for name, (region, checksum) in theirs.items():
            by_tensor[name, region][checksum].append(rank)
    different = [
        f"{name}: ranks " + " / ".join(",".join(map(str, ranks)) for ranks in versions.values())
        for (name, _), versions in by_tensor.items()
        if len(versions) > 1
    ]
    if different:
        raise ReplicaMismatchError(
            "these must be equal on all ranks that hold them, and are not (ranks that agree are listed together): "
            + "; ".join(different)
        )


def _has_copies(tensor: Tensor, ranks: int) -> bool:
    if not isinstance(tensor, DTensor):
        return True
    return tensor.device_mesh.size() < ranks or any(isinstance(p, Replicate) for p in tensor.placements)


def digest(tensor: Tensor) -> str:
    """A digest of dtype, shape and bits."""
    tensor = tensor.detach().cpu().contiguous()
    checksum = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    checksum.update(raw_bytes(tensor))
    return checksum.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy; valid as long as the tensor is."""
    assert tensor.device == torch.device("cpu")
    assert tensor.is_contiguous()
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")

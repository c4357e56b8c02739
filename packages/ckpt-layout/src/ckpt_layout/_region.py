"""Which part of the global tensor a rank's local shard holds, for any placements on any mesh."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_layout._errors import LayoutError
from ckpt_layout._ranges import Runs, chunk_runs, describe, full_runs, runs_length, strided_chunk_runs

Region = tuple[Runs, ...]
"""Per dimension of the global tensor, the indices that the local shard holds, in its order."""

_Split = tuple[int, int, int | None]
"""One mesh axis that splits a dimension: its size, this rank's coordinate, the split factor if strided."""


def held_region(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Region:
    """The region of a global tensor of `shape` that the rank at `coordinate` of the mesh holds.

    Raises:
        LayoutError: a placement that is no sharding or replication (`Partial`).
    """
    splits: list[list[_Split]] = [[] for _ in shape]
    for size, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, _StridedShard):
            splits[placement.dim].append((size, index, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            splits[placement.dim].append((size, index, None))
        elif not isinstance(placement, Replicate):
            raise LayoutError(f"placement {placement}: only Shard and Replicate say who holds what; redistribute first")
    return tuple(_apply(full_runs(size), dim) for size, dim in zip(shape, splits, strict=True))


def _apply(runs: Runs, splits: list[_Split]) -> Runs:
    """Split a dimension by one mesh axis after the other.

    A strided shard whose factor is the number of shards that the axes after it make was put on last, on
    what those axes left (FSDP over an expert-parallel stack): so it is applied last. In uneven splits that
    order and torch's own reading of the placement can differ, and this is the one that the data has.
    """
    if not splits:
        return runs
    (size, index, factor), *rest = splits
    if factor is None:
        return _apply(chunk_runs(runs, size, index), rest)
    if rest and factor == math.prod(split[0] for split in rest):
        return chunk_runs(_apply(runs, rest), size, index)
    return _apply(strided_chunk_runs(runs, factor, size, index), rest)


def region_of(tensor: Tensor) -> Region:
    """The region that this rank holds; of a plain tensor, all of it.

    Raises:
        LayoutError: the local shard has another shape than its placements say.
    """
    if not isinstance(tensor, DTensor):
        return tuple(full_runs(size) for size in tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError(f"this rank is not in the tensor's mesh {mesh}")
    region = held_region(tensor.shape, mesh.shape, coordinate, tensor.placements)
    local, expected = tuple(tensor.to_local().shape), tuple(runs_length(runs) for runs in region)
    if local != expected and math.prod(local) + math.prod(expected) > 0:
        raise LayoutError(
            f"local tensor of shape {local}: placements {tensor.placements} of {tuple(tensor.shape)} on a mesh of "
            f"{tuple(mesh.shape)} give rank coordinate {tuple(coordinate)} the shape {expected}"
        )
    return region


def local_of(tensor: Tensor) -> Tensor:
    """This rank's own storage of a tensor, outside of autograd; no collective."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _expert_runs(tensor: Tensor) -> Runs:
    if tensor.dim() == 0:
        raise LayoutError("a stack of experts has its experts in dimension 0; this tensor has no dimensions")
    if not isinstance(tensor, DTensor):
        return full_runs(tensor.shape[0])
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError(f"this rank is not in the tensor's mesh {mesh}")
    runs = held_region(tensor.shape, mesh.shape, coordinate, tensor.placements)[0]
    local = tensor.to_local().shape[0]
    if local != runs_length(runs):
        raise LayoutError(
            f"Expected local tensor first dimension to be {runs_length(runs)} (experts {describe(runs)}), got {local}"
        )
    return runs


def expert_range(dtensor: Tensor) -> range:
    """The experts (indices of dimension 0) that this rank's shard holds; of a plain tensor, all. No collective.

    Right for any nesting of `Shard`, strided shards (FSDP2 over an expert-parallel stack) and `Replicate`
    (HSDP), shards of inner dimensions, and empty shards, whose range is empty.

    Raises:
        ValueError: the shard's experts are not consecutive (use `split_experts`), its first dimension does
            not fit its placements, or a placement is `Partial`.
    """
    runs = _expert_runs(dtensor)
    if len(runs) > 1:
        raise LayoutError(f"this shard holds experts {describe(runs)}, which is no single range: use split_experts")
    return runs[0] if runs else range(dtensor.shape[0], dtensor.shape[0])


def split_experts(dtensor: Tensor) -> dict[int, Tensor]:
    """{global expert id: this rank's part of that expert} as views, in the order held. No collective.

    Each view has the local shape without dimension 0: all of the expert, unless an inner dimension is sharded.

    Raises:
        ValueError: as `expert_range`, but any set of experts is fine.
    """
    experts = [expert for run in _expert_runs(dtensor) for expert in run]
    local = dtensor.to_local() if isinstance(dtensor, DTensor) else dtensor
    return dict(zip(experts, local.unbind(0), strict=True))

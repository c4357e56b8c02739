"""The tensors of a model and what this rank holds of each: which indices, which experts, in which memory.

Dimensions are split the way `torch.chunk` splits them, empty tails included.
"""

import ctypes
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_layout._errors import LayoutError

Runs = tuple[range, ...]
"""Indices of a dimension in the order in which a rank holds them, as non-empty consecutive ranges."""

Region = tuple[Runs, ...]
"""Per dimension of the global tensor, the indices that the local shard holds, in its order."""

# of torch.compile, activation checkpointing and FSDP1
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.)")

# -- how a dimension is split ------------------------------------------------------------------------------


def chunk_range(size: int, parts: int, index: int) -> range:
    """The indices of chunk `index` when `size` items are split into `parts` as `torch.chunk` splits them.

    The leading chunks hold ceil(size / parts), one the remainder, and those after it nothing: 5 in 4 is
    2, 2, 1, 0. An empty chunk is `range(size, size)`.

    Raises:
        ValueError: `size` < 0, `parts` < 1, or `index` outside range(parts).
    """
    _check_split(size=size, parts=parts, index=index)
    length = -(-size // parts)
    return range(min(index * length, size), min((index + 1) * length, size))


def get_sharded_expert_range(num_experts: int, world_size: int, rank: int) -> range:
    """The experts that `rank` holds of a stack that is sharded by `Shard(0)` over `world_size` ranks.

    It labels what FSDP2 or `distribute_tensor` already placed; trailing ranks may hold none (64 experts on 24
    ranks leave two empty). Do not use it to choose a placement.

    Raises:
        ValueError: `num_experts` < 0, `world_size` < 1, or `rank` outside range(world_size).
    """
    _check_split(num_experts=num_experts, world_size=world_size, rank=rank)
    return chunk_range(num_experts, world_size, rank)


def balanced_expert_range(num_experts: int, ep_size: int, rank: int) -> range:
    """The experts that `rank` should own when experts are given out as evenly as possible, to choose a placement.

    The leading ranks own one more where they do not divide: 5 on 4 is 2, 1, 1, 1, so that no rank stays without
    as long as there are as many experts as ranks. This is not what `Shard(0)` holds (2, 2, 1, 0): to label what
    was placed use `expert_range`, or `get_sharded_expert_range`.

    Raises:
        ValueError: `num_experts` < 0, `ep_size` < 1, or `rank` outside range(ep_size).
    """
    _check_split(num_experts=num_experts, ep_size=ep_size, rank=rank)
    each, more = divmod(num_experts, ep_size)
    return range(rank * each + min(rank, more), (rank + 1) * each + min(rank + 1, more))


def _check_split(**arguments: int) -> None:
    """What is split, into how many, and which of them, under the names that the caller gives them."""
    (what, size), (into, parts), (which, index) = arguments.items()
    if size < 0:
        raise ValueError(f"{what} = {size}: must be at least 0")
    if parts < 1:
        raise ValueError(f"{into} = {parts}: must be at least 1")
    if not 0 <= index < parts:
        raise ValueError(f"{which} = {index}: must be in range({parts})")


def full_runs(size: int) -> Runs:
    return _merged([range(size)])


def chunk_runs(runs: Runs, parts: int, index: int) -> Runs:
    """Chunk `index` of what `runs` hold."""
    return _taken(runs, chunk_range(runs_length(runs), parts, index))


def strided_chunk_runs(runs: Runs, split: int, parts: int, index: int) -> Runs:
    """Chunk `index` of each of the `split` chunks of what `runs` hold, one after the other."""
    chunks = (chunk_runs(chunk_runs(runs, split, outer), parts, index) for outer in range(split))
    return _merged(run for chunk in chunks for run in chunk)


def runs_length(runs: Runs) -> int:
    return sum(len(run) for run in runs)


def _taken(runs: Runs, wanted: range) -> Runs:
    """The items at positions `wanted` of the runs laid end to end."""
    taken, start = [], 0
    for run in runs:
        low, high = max(wanted.start - start, 0), min(wanted.stop - start, len(run))
        if low < high:
            taken.append(run[low:high])
        start += len(run)
    return _merged(taken)


def _merged(runs: Iterable[range]) -> Runs:
    merged: list[range] = []
    for run in runs:
        if not run:
            continue
        if merged and merged[-1].stop == run.start:
            merged[-1] = range(merged[-1].start, run.stop)
        else:
            merged.append(run)
    return tuple(merged)


def positions(runs: Runs, box: range) -> list[tuple[slice, range]]:
    """Where `runs` meet `box`: pairs of a slice of the held items and the indices that they are."""
    found, start = [], 0
    for run in runs:
        low, high = max(run.start, box.start), min(run.stop, box.stop)
        if low < high:
            found.append((slice(start + low - run.start, start + high - run.start), range(low, high)))
        start += len(run)
    return found


def describe(ranges: Sequence[range]) -> str:
    return ", ".join(f"{run.start}:{run.stop}" for run in ranges) or "none"


# -- which part of a tensor a rank holds -------------------------------------------------------------------

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
    region = _placed_region(tensor)
    local, expected = tuple(local_of(tensor).shape), tuple(runs_length(runs) for runs in region)
    if isinstance(tensor, DTensor) and local != expected and math.prod(local) + math.prod(expected) > 0:
        mesh = tensor.device_mesh
        raise LayoutError(
            f"local tensor of shape {local}: placements {tensor.placements} of {tuple(tensor.shape)} on a mesh of "
            f"{tuple(mesh.shape)} give rank coordinate {tuple(mesh.get_coordinate() or ())} the shape {expected}"
        )
    return region


def _placed_region(tensor: Tensor) -> Region:
    """As `region_of`, as far as the placements alone say it."""
    if not isinstance(tensor, DTensor):
        return tuple(full_runs(size) for size in tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError(f"this rank is not in the tensor's mesh {mesh}")
    return held_region(tensor.shape, mesh.shape, coordinate, tensor.placements)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's own storage of a tensor, outside of autograd; no collective."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def local_blocks(tensor: Tensor) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """This rank's shard as blocks that are consecutive in the whole tensor: (view of the shard, where it lies).

    No collective. Of a plain tensor one block, all of it; of an empty shard none; several for strided shards that do
    not divide evenly. What is written to the views is written to the shard.

    Raises:
        LayoutError: a ValueError: a `Partial` placement, or a shard that has another shape than its placements say.
    """
    local, region = local_of(tensor), region_of(tensor)
    for block in product(*(positions(runs, range(size)) for runs, size in zip(region, tensor.shape, strict=True))):
        yield local[tuple(held for held, _ in block)], tuple(slice(where.start, where.stop) for _, where in block)


def _expert_runs(tensor: Tensor) -> Runs:
    if tensor.dim() == 0:
        raise LayoutError("a stack of experts has its experts in dimension 0; this tensor has no dimensions")
    runs = _placed_region(tensor)[0]
    local = local_of(tensor).shape[0]
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


# -- the tensors of a model and their memory ---------------------------------------------------------------


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers in the model's order, sharded as they are; tied ones under each name.

    FSDP units that are gathered are sharded again first. Names are without what wrappers add.
    """
    state = model.state_dict(keep_vars=True)
    named = {_WRAPPERS.sub("", name).removeprefix("."): value for name, value in state.items()}
    others = [name for name, value in named.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(f"state that is no tensor cannot be stored: {', '.join(others)}")
    return named


def without_ties(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, under the first of its names."""
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy; valid as long as the tensor is."""
    assert tensor.device == torch.device("cpu")
    assert tensor.is_contiguous()
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")

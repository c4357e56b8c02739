"""Which indices a rank holds of a dimension that is split the way `torch.chunk` splits, empty tails included."""

from collections.abc import Iterable, Sequence

Runs = tuple[range, ...]
"""Indices of a dimension in the order in which a rank holds them, as non-empty consecutive ranges."""


def chunk_range(size: int, parts: int, index: int) -> range:
    """The indices of chunk `index` when `size` items are split into `parts` as `torch.chunk` splits them.

    The leading chunks hold ceil(size / parts), one the remainder, and those after it nothing: 5 in 4 is
    2, 2, 1, 0. An empty chunk is `range(size, size)`.

    Raises:
        ValueError: `size` < 0, `parts` < 1, or `index` outside range(parts).
    """
    if size < 0:
        raise ValueError(f"size = {size}: must be at least 0")
    if parts < 1:
        raise ValueError(f"parts = {parts}: must be at least 1")
    if not 0 <= index < parts:
        raise ValueError(f"index = {index}: must be in range({parts})")
    length = -(-size // parts)
    return range(min(index * length, size), min((index + 1) * length, size))


def get_sharded_expert_range(num_experts: int, world_size: int, rank: int) -> range:
    """The experts that `rank` holds of a stack that is sharded by `Shard(0)` over `world_size` ranks.

    It labels what FSDP2 or `distribute_tensor` already placed; trailing ranks may hold none (64 experts on 24
    ranks leave two empty). Do not use it to choose a placement.

    Raises:
        ValueError: `num_experts` < 0, `world_size` < 1, or `rank` outside range(world_size).
    """
    if num_experts < 0:
        raise ValueError(f"num_experts = {num_experts}: must be at least 0")
    if world_size < 1:
        raise ValueError(f"world_size = {world_size}: must be at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank = {rank}: must be in range({world_size})")
    return chunk_range(num_experts, world_size, rank)


def balanced_expert_range(num_experts: int, ep_size: int, rank: int) -> range:
    """The experts that `rank` should own when experts are given out as evenly as possible, to choose a placement.

    The leading ranks own one more where they do not divide: 5 on 4 is 2, 1, 1, 1, so that no rank stays without
    as long as there are as many experts as ranks. This is not what `Shard(0)` holds (2, 2, 1, 0): to label what
    was placed use `expert_range`, or `get_sharded_expert_range`.

    Raises:
        ValueError: `num_experts` < 0, `ep_size` < 1, or `rank` outside range(ep_size).
    """
    if num_experts < 0:
        raise ValueError(f"num_experts = {num_experts}: must be at least 0")
    if ep_size < 1:
        raise ValueError(f"ep_size = {ep_size}: must be at least 1")
    if not 0 <= rank < ep_size:
        raise ValueError(f"rank = {rank}: must be in range({ep_size})")
    each, more = divmod(num_experts, ep_size)
    return range(rank * each + min(rank, more), (rank + 1) * each + min(rank + 1, more))


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

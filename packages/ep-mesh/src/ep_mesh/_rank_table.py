"""Which rank is what: coordinates, experts, data, and the ranks it talks to. Pure: no torch, no process group."""

import itertools

import attrs

from ep_mesh._config import MeshConfig, expert_ranges


@attrs.frozen
class RankRow:
    """One rank's place in the mesh. Peers include the rank itself, in the order of the process group."""

    rank: int
    coordinates: dict[str, int]
    """Axis -> position, outermost axis first."""
    dp_shard: int
    """Position in `dp_shard`: which FSDP shard of all but the experts this rank holds."""
    data_shard: int
    """Position in `dp`: which part of the data this rank reads. Ranks of one ep group read different parts."""
    experts: range | None
    """The experts that this rank runs; None without `num_experts`."""
    all_to_all_peers: tuple[int, ...]
    """Ranks that it exchanges tokens with (axis `ep`)."""
    gather_peers: tuple[int, ...]
    """Ranks that FSDP gathers its parameters from (`dp_shard`)."""
    expert_gather_peers: tuple[int, ...]
    """Ranks that FSDP gathers its experts from (`dp_shard_mod_ep`)."""


def rank_table(config: MeshConfig, world_size: int, num_experts: int | None = None) -> list[RankRow]:
    """One row for each rank of `config` on `world_size` ranks, in the order of ranks.

    Args:
        config: degrees; -1 is resolved here.
        world_size: number of ranks.
        num_experts: experts in a layer; fills `RankRow.experts`.

    Raises:
        MeshConfigError: as `MeshConfig.resolve`.
    """
    resolved = config.resolve(world_size, num_experts)
    axes = resolved.axes
    places = [dict(zip(axes, place, strict=True)) for place in itertools.product(*map(range, axes.values()))]
    owned = expert_ranges(num_experts, resolved.ep) if num_experts is not None else None

    ep_groups = _groups(places, "ep")
    shard_groups = _groups(places, "dp_shard_mod_ep", "ep")
    expert_groups = _groups(places, "dp_shard_mod_ep")
    rows = []
    for rank, place in enumerate(places):
        dp_shard = place["dp_shard_mod_ep"] * resolved.ep + place["ep"]
        row = RankRow(
            rank=rank,
            coordinates=place,
            dp_shard=dp_shard,
            data_shard=place["dp_replicate"] * resolved.dp_shard + dp_shard,
            experts=owned[place["ep"]] if owned is not None else None,
            all_to_all_peers=ep_groups[rank],
            gather_peers=shard_groups[rank],
            expert_gather_peers=expert_groups[rank],
        )
        rows.append(row)
    return rows


def _groups(places: list[dict[str, int]], *along: str) -> list[tuple[int, ...]]:
    """By rank: the ranks that differ from it in the axes `along` only, itself included."""
    fixed = [tuple(index for axis, index in place.items() if axis not in along) for place in places]
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, key in enumerate(fixed):
        members.setdefault(key, []).append(rank)
    return [tuple(members[key]) for key in fixed]

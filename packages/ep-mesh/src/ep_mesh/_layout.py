"""Parallel degrees, the rules between them, and what they make of each rank. Pure: no torch, no process group."""

import itertools
import math
from typing import Any

import attrs

REST = -1
"""The degree that stands for what the other degrees leave of the world."""

_INFERABLE = ("dp_replicate", "dp_shard")
_MODEL_PARALLEL = ("tp", "pp", "cp")


class MeshConfigError(ValueError):
    """A degree breaks a rule; says which key, its value, the rule and a way out.

    Attributes:
        key: the argument that is wrong, e.g. "ep".
        value: what it was given.
        rule: what must hold for it.
        hint: a fix.
    """

    def __init__(self, key: str, value: object, rule: str, hint: str) -> None:
        super().__init__(key, value, rule, hint)
        self.key, self.value, self.rule, self.hint = key, value, rule, hint

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}: {self.rule} ({self.hint})"


def _is_degree(_: object, attribute: "attrs.Attribute[int]", value: Any) -> None:
    name = attribute.name
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and (value >= 1 or (value == REST and name in _INFERABLE)):
        return
    if name in _INFERABLE:
        rule, hint = "must be an integer of at least 1, or -1", "-1 takes what the other degrees leave of the world"
    else:
        rule, hint = "must be an integer of at least 1", f"{name} = 1 switches it off"
    raise MeshConfigError(name, value, rule, hint)


@attrs.frozen
class MeshConfig:
    """How many ranks each kind of parallelism takes.

    `dp_replicate * dp_shard * tp * pp * cp` is the number of ranks. `ep` is no factor of it: expert
    parallelism is carved out of `dp_shard`, so a run keeps its data shards when `ep` changes, and ranks that
    exchange tokens read different data.

    Raises:
        MeshConfigError: a degree is not an integer of at least 1 (or -1 where that is allowed).
    """

    dp_replicate: int = attrs.field(default=1, validator=_is_degree)
    """Replicas of the sharded model (HSDP); -1: what the other degrees leave of the world."""
    dp_shard: int = attrs.field(default=-1, validator=_is_degree)
    """Ranks that FSDP shards over, `ep` included; -1: what the other degrees leave of the world."""
    ep: int = attrs.field(default=1, validator=_is_degree)
    """Ranks over which the experts of a layer are divided; divides `dp_shard`."""
    tp: int = attrs.field(default=1, validator=_is_degree)
    """Tensor parallelism; cannot be combined with `ep`."""
    pp: int = attrs.field(default=1, validator=_is_degree)
    """Pipeline parallelism; cannot be combined with `ep`."""
    cp: int = attrs.field(default=1, validator=_is_degree)
    """Context parallelism; cannot be combined with `ep`."""

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the mesh with their sizes, outermost first. Needs a resolved config.

        `ep` is the innermost of the data-parallel ones, so an all-to-all spans consecutive ranks. `pp`, `cp`
        and `tp` are axes only where they are larger than 1.
        """
        for key in _INFERABLE:
            if getattr(self, key) == REST:
                raise MeshConfigError(key, REST, "is not resolved", "call config.resolve(world_size) first")
        sizes = {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard_mod_ep": self.dp_shard // self.ep,
            "ep": self.ep,
            "cp": self.cp,
            "tp": self.tp,
        }
        return {axis: size for axis, size in sizes.items() if size > 1 or axis not in _MODEL_PARALLEL}

    @property
    def world_size(self) -> int:
        """Number of ranks. Needs a resolved config."""
        return math.prod(self.axes.values())

    def resolve(self, world_size: int, num_experts: int | None = None) -> "MeshConfig":
        """This config with -1 replaced, after all rules are checked.

        Args:
            world_size: number of ranks.
            num_experts: experts in a layer, E. `Shard(0)` divides them as `torch.chunk` does (10 on 4 ranks:
                3, 3, 3, 1), and a degree that leaves a rank without any (5 on 4: 2, 2, 1, 0) is refused.

        Raises:
            MeshConfigError: more than one -1; the product is not the world size; `ep` does not divide
                `dp_shard`, is combined with `tp`, `pp` or `cp`, or leaves a rank without an expert.
        """
        broken = self.broken_rules(world_size, num_experts)
        if broken:
            raise broken[0]
        return self._fill_rest(world_size)

    def broken_rules(self, world_size: int, num_experts: int | None = None) -> list[MeshConfigError]:
        """Every rule that `resolve` would refuse these degrees for, the one that it raises first; none: it accepts.

        A rule is left out where another one that is broken leaves its numbers open.
        """
        open_rule = self._rest_rule(world_size)
        resolved = self if open_rule else self._fill_rest(world_size)
        broken = [open_rule, self._model_parallel_rule()]
        if not open_rule:
            broken.append(resolved._product_rule(world_size))
        if resolved.dp_shard != REST:
            broken += [resolved._divisor_rule(), resolved._expert_rule(num_experts)]
        return [rule for rule in broken if rule is not None]

    def _rest_rule(self, world_size: int) -> MeshConfigError | None:
        if world_size < 1:
            return MeshConfigError("world_size", world_size, "must be at least 1", "it is the number of ranks")
        unknown = [key for key in _INFERABLE if getattr(self, key) == REST]
        if len(unknown) > 1:
            rule = "only one of dp_replicate and dp_shard may be -1"
            return MeshConfigError("dp_replicate", REST, rule, "dp_replicate = 1 is FSDP over all of the world")
        others = self._factors()
        product = math.prod(others.values())
        if not unknown or world_size % product == 0:
            return None
        given = " * ".join(f"{name} {size}" for name, size in others.items() if size > 1)
        rule = f"the other degrees ({given} = {product}) must divide the world size {world_size}"
        hint = f"start a multiple of {product} ranks, or lower a degree; ep is no factor of the world"
        return MeshConfigError(unknown[0], REST, rule, hint)

    def _fill_rest(self, world_size: int) -> "MeshConfig":
        rest = world_size // math.prod(self._factors().values())
        return attrs.evolve(self, **{key: rest for key in _INFERABLE if getattr(self, key) == REST})

    def _factors(self) -> dict[str, int]:
        """The degrees whose product is the world, without those that are open."""
        degrees = {name: getattr(self, name) for name in (*_INFERABLE, *_MODEL_PARALLEL)}
        return {name: size for name, size in degrees.items() if size != REST}

    def _model_parallel_rule(self) -> MeshConfigError | None:
        combined = [f"{name} = {getattr(self, name)}" for name in _MODEL_PARALLEL if getattr(self, name) > 1]
        if self.ep == 1 or not combined:
            return None
        rule = f"cannot be combined with tensor, pipeline or context parallelism ({', '.join(combined)})"
        return MeshConfigError("ep", self.ep, rule, "set ep = 1, or tp = pp = cp = 1")

    def _product_rule(self, world_size: int) -> MeshConfigError | None:
        degrees = self._factors()
        product = math.prod(degrees.values())
        if product == world_size:
            return None
        formula = " * ".join(name for name, size in degrees.items() if size > 1 or name in _INFERABLE)
        fix = f"dp_shard = -1 takes what is left, or start {product} ranks"
        if self.ep > 1 and product * self.ep == world_size:
            fix = f"ep is carved out of dp_shard and is no factor of the world: dp_shard = {self.dp_shard * self.ep}"
        rule = f"{formula} = {product} must be the world size {world_size}"
        return MeshConfigError("dp_shard", self.dp_shard, rule, fix)

    def _divisor_rule(self) -> MeshConfigError | None:
        if self.dp_shard % self.ep == 0:
            return None
        rule = f"must divide dp_shard = {self.dp_shard}, which it is carved out of"
        return MeshConfigError("ep", self.ep, rule, f"degrees that do: {_listed(_divisors(self.dp_shard))}")

    def _expert_rule(self, num_experts: int | None) -> MeshConfigError | None:
        if num_experts is None:
            return None
        if num_experts < 1:
            return MeshConfigError("num_experts", num_experts, "must be at least 1", "experts in one layer")
        counts = [len(experts) for experts in _expert_ranges(num_experts, self.ep)]
        if min(counts) > 0:
            return None
        shown = ", ".join(map(str, counts[:8])) + (", ..." if len(counts) > 8 else "")
        rule = f"leaves a rank without an expert: {num_experts} experts on {self.ep} ranks are {shown}"
        good = [d for d in _divisors(self.dp_shard) if len(_expert_ranges(num_experts, d)[-1])]
        hint = f"degrees that work with dp_shard = {self.dp_shard}: {_listed(good)}"
        return MeshConfigError("ep", self.ep, rule, hint)


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
    owned = _expert_ranges(num_experts, resolved.ep) if num_experts is not None else None

    ep_groups, expert_groups = _groups(places, "ep"), _groups(places, "dp_shard_mod_ep")
    shard_groups = _groups(places, "dp_shard_mod_ep", "ep")
    rows = []
    for rank, place in enumerate(places):
        dp_shard = place["dp_shard_mod_ep"] * resolved.ep + place["ep"]
        rows.append(
            RankRow(
                rank=rank,
                coordinates=place,
                dp_shard=dp_shard,
                data_shard=place["dp_replicate"] * resolved.dp_shard + dp_shard,
                experts=owned[place["ep"]] if owned else None,
                all_to_all_peers=ep_groups[rank],
                gather_peers=shard_groups[rank],
                expert_gather_peers=expert_groups[rank],
            )
        )
    return rows


def _groups(places: list[dict[str, int]], *along: str) -> list[tuple[int, ...]]:
    """By rank: the ranks that differ from it in the axes `along` only, itself included."""
    fixed = [tuple(index for axis, index in place.items() if axis not in along) for place in places]
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, key in enumerate(fixed):
        members.setdefault(key, []).append(rank)
    return [tuple(members[key]) for key in fixed]


def _expert_ranges(num_experts: int, ep: int) -> list[range]:
    """The experts of each of `ep` ranks, as `torch.chunk` and `Shard(0)` divide them; later ones may be empty."""
    size = -(-num_experts // ep)
    return [range(min(i * size, num_experts), min((i + 1) * size, num_experts)) for i in range(ep)]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))

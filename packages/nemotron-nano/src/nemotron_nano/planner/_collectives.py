"""The collectives of one step, exactly: which, how many, over which ranks, and how much is handed to them."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import attrs

from ep_mesh import MeshConfig
from nemotron_nano.planner._inputs import Workload
from nemotron_nano.planner._units import Unit, expert_share

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]

_INT64, _FP32, _FP64 = 8, 4, 8


@attrs.frozen(kw_only=True)
class Collective:
    """Calls of one kind for one purpose in a step, as one rank makes them."""

    kind: Kind
    purpose: str
    calls: int
    bytes: int
    """Of the tensors that they are given, in and out, as `moe_core.testing.count_collectives` counts them."""
    sent: float
    """Bytes that the rank sends to others."""
    ranks: int
    stride: int
    """From one of these ranks to the next."""

    @property
    def span(self) -> int:
        """Consecutive ranks that the group lies in."""
        return (self.ranks - 1) * self.stride + 1


def collectives_of_a_step(
    work: Workload, mesh: MeshConfig, units: Sequence[Unit], num_parameters: int, ep_rank: int = 0
) -> list[Collective]:
    """All of them, by purpose. Loads are taken as even, so that an expert-parallel rank gets as many rows for each
    of its experts as any other; nothing else depends on data.
    """
    found = [
        *_of_units(work, units),
        *(_of_dispatch(work, mesh, ep_rank) if mesh.ep > 1 else ()),
        *_of_the_step(work, mesh, num_parameters),
    ]
    return [collective for collective in _joined(found) if collective.calls]


def _of_units(work: Workload, units: Iterable[Unit]) -> Iterator[Collective]:
    for unit in units:
        both = unit.gathered + unit.sharded
        purpose = "experts' weights" if unit.name == "experts" else "weights"
        where = {"ranks": unit.shard, "stride": unit.stride}
        if unit.shard > 1:
            calls = unit.gathers_of_a_step(work.microbatches)
            sent = float(unit.sharded * (unit.shard - 1))
            yield Collective(
                kind="all_gather",
                purpose=purpose,
                calls=calls,
                bytes=calls * both * unit.element,
                sent=calls * sent * unit.element,
                **where,
            )
            yield Collective(
                kind="reduce_scatter",
                purpose=purpose.replace("weights", "gradients"),
                calls=1,
                bytes=both * unit.reduced_element,
                sent=sent * unit.reduced_element,
                **where,
            )
        if unit.replicas > 1:
            size = unit.sharded * unit.reduced_element
            where = {"ranks": unit.replicas, "stride": unit.shard * unit.stride}
            yield _all_reduce(purpose.replace("weights", "gradients"), size, **where)


def _all_reduce(purpose: str, size: int, ranks: int, stride: int = 1) -> Collective:
    sent = 2 * size * (ranks - 1) / ranks
    return Collective(kind="all_reduce", purpose=purpose, calls=1, bytes=size, sent=sent, ranks=ranks, stride=stride)


def rows_received(work: Workload, mesh: MeshConfig, ep_rank: int = 0) -> int:
    """R of one microbatch where all experts of a layer get the same; over the ranks they add up to what was sent."""
    total, experts = rows_sent(work, mesh) * mesh.ep, work.model.num_experts
    first = min(ep_rank * expert_share(experts, mesh.ep), experts)
    past = first + expert_share(experts, mesh.ep, ep_rank)
    return total * past // experts - total * first // experts


def rows_sent(work: Workload, mesh: MeshConfig) -> int:
    """T * K of one microbatch."""
    return work.rows_per_rank(mesh.world_size) * work.sequence_length * work.model.top_k


def exchanges(work: Workload, block: int) -> tuple[int, int]:
    """How often a microbatch exchanges counts in a layer, and how often rows there and back again."""
    repeats = 1 + (work.is_checkpointed(block) and work.checkpointing != "selective")
    return repeats, repeats + 1


def _of_dispatch(work: Workload, mesh: MeshConfig, ep_rank: int) -> Iterator[Collective]:
    """A layer exchanges counts, rows there and rows back, in backward both again; recomputation repeats the forward."""
    counts = mesh.ep * (-(-work.model.num_experts // mesh.ep) + 1) * _INT64
    if work.check_splits:
        counts += mesh.ep * (2 * mesh.ep + 3) * _INT64
    there_and_back = (rows_sent(work, mesh) + rows_received(work, mesh, ep_rank)) * work.model.hidden_size
    for block, letter in enumerate(work.model.pattern):
        if letter == "E":
            of_counts, of_rows = exchanges(work, block)
            times = of_counts * work.microbatches
            yield _all_to_all("counts", mesh.ep, times * (1 + work.check_splits), times * counts)
            times = of_rows * work.microbatches
            yield _all_to_all("tokens", mesh.ep, 2 * times, times * there_and_back * work.param_bytes)


def _all_to_all(purpose: str, ranks: int, calls: int, size: int) -> Collective:
    sent = size * (ranks - 1) / ranks
    return Collective(kind="all_to_all", purpose=purpose, calls=calls, bytes=size, sent=sent, ranks=ranks, stride=1)


def _of_the_step(work: Workload, mesh: MeshConfig, num_parameters: int) -> Iterator[Collective]:
    """What the trainer asks of all data-parallel ranks; the first and the last also where there is only one."""
    ranks = mesh.world_size
    yield _all_reduce("valid tokens", _INT64, ranks)
    if work.clips and mesh.dp_shard > 1:
        infinite = getattr(work.config["clipper"].config, "norm_type", 2.0) == math.inf
        # beside each parameter's: flags of what is no number, or a norm of every rank that cannot overflow
        beside = num_parameters if infinite else mesh.dp_shard
        yield _all_reduce("gradient norm", (num_parameters + beside) * _FP32, mesh.dp_shard)
    layers = work.model.pattern.count("E")
    if layers and ranks > 1:
        yield _all_reduce("expert loads", layers * work.model.num_experts * _INT64, ranks)
    metrics = (work.loss_parts + 2) * _FP64  # and the number of tokens, and the peak of memory
    yield Collective(
        kind="all_gather",
        purpose="metrics",
        calls=1,
        bytes=metrics * (ranks + 1),
        sent=float(metrics * (ranks - 1)),
        ranks=ranks,
        stride=1,
    )


def _joined(collectives: Iterable[Collective]) -> list[Collective]:
    """Those of one kind, purpose and group as one."""
    together: dict[tuple[str, str, int, int], Collective] = {}
    for one in collectives:
        key = (one.kind, one.purpose, one.ranks, one.stride)
        if key in together:
            other = together[key]
            one = attrs.evolve(
                one, calls=one.calls + other.calls, bytes=one.bytes + other.bytes, sent=one.sent + other.sent
            )
        together[key] = one
    return list(together.values())

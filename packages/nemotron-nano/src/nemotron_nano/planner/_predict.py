"""`plan`: what a step costs at every expert-parallel degree, and which one to take."""

from collections.abc import Sequence

import attrs

from ep_mesh import MeshConfig
from moe_core.config import Config
from nemotron_nano.costs import ParameterCount, count_parameters, flops_per_token, layer_forward_flops
from nemotron_nano.planner._collectives import Collective, collectives_of_a_step, exchanges
from nemotron_nano.planner._footprint import Footprint, footprint_of_layer, footprint_of_loss, model_on_meta
from nemotron_nano.planner._inputs import GIB, Hardware, PlanError, Workload, read_workload
from nemotron_nano.planner._memory import Memory, memory_of_a_step
from nemotron_nano.planner._units import find_units


@attrs.frozen(kw_only=True)
class Prediction:
    """One expert-parallel degree, on the rank that holds most."""

    ep: int
    memory: Memory
    fits: bool
    collectives: tuple[Collective, ...]
    compute_seconds: float
    sharding_seconds: float
    """All-gathers and reductions."""
    exchange_seconds: float
    """All-to-alls."""
    step_seconds: float
    """One after the other: nothing hides behind arithmetic. Degrees are compared by it."""
    overlapped_step_seconds: float
    """With gathers and reductions hidden behind arithmetic as far as that lasts; the host waits for all-to-alls."""
    tokens_per_second: float
    """Of one GPU, in `step_seconds`."""
    mfu: float
    """Model FLOPs by what the GPUs could do in `step_seconds`; recomputation is none of them."""
    overlapped_mfu: float
    rows_per_expert: float
    """In one product, where loads are even."""


@attrs.frozen(kw_only=True)
class Plan:
    """Predictions for every valid degree of a config on some number of GPUs."""

    gpus: int
    hardware: Hardware
    parameters: ParameterCount
    flops_per_token: int
    tokens_per_step: int
    tokens_per_microbatch: int
    """T, of one rank."""
    expert_stack_bytes: int
    """What gathering the experts of one MoE layer brings to a rank at ep = 1."""
    crossover_tokens: float
    """T below which all-to-alls move fewer bytes than gathering and reducing the experts does."""
    predictions: tuple[Prediction, ...]
    refused: dict[int, str]
    """Divisors of dp_shard that are no valid degree, with the reason."""
    chosen: int
    why: str

    def of(self, ep: int) -> Prediction:
        return next(prediction for prediction in self.predictions if prediction.ep == ep)


def plan(config: Config, *, gpus: int, hardware: Hardware | None = None) -> Plan:
    """Predict memory, traffic and time of a step of the reference trainer for each valid expert-parallel degree.

    Collectives are exact; memory is followed through the step on the meta device; times take loads as even, links as
    full, and all products to run at the given speed, so they compare degrees rather than foretell a clock. No process
    group, no accelerator, and no tensor with memory is needed.

    Args:
        config: as the trainer would take it; its `mesh.ep` plays no part.
        gpus: ranks.
        hardware: default: 80 GiB, 800 TFLOP/s, 450 GB/s in a node of 8 and 50 GB/s to others.

    Raises:
        PlanError: a component whose cost is not known, rows that cannot be shared out, no valid degree.
    """
    work, hardware = read_workload(config), hardware or Hardware()
    if not work.is_sharded:
        raise PlanError("transform", [one.name for one in config["transform"]], 'must contain "fsdp"')
    meshes, refused = _valid_meshes(work, gpus)
    rows = work.rows_per_rank(gpus)
    model = model_on_meta(work)
    names = len(list(model.parameters()))
    loss, known = footprint_of_loss(work, meshes[0]), dict[tuple[str, bool, int], Footprint]()
    predictions = []
    for mesh in meshes:
        units = find_units(model, work, mesh)
        collectives = collectives_of_a_step(work, mesh, units, names)
        memory = memory_of_a_step(work, mesh, units, _footprints(work, mesh, known), loss)
        predictions.append(_predict(work, mesh, hardware, memory, collectives))
    chosen, why = _choose(predictions, hardware)
    return Plan(
        gpus=gpus,
        hardware=hardware,
        parameters=count_parameters(work.model),
        flops_per_token=flops_per_token(work.model, work.sequence_length),
        tokens_per_step=work.rows * work.sequence_length,
        tokens_per_microbatch=rows * work.sequence_length,
        expert_stack_bytes=_stack(work) * work.param_bytes,
        crossover_tokens=crossover_tokens(work),
        predictions=tuple(predictions),
        refused=refused,
        chosen=chosen,
        why=why,
    )


def _valid_meshes(work: Workload, gpus: int) -> tuple[list[MeshConfig], dict[int, str]]:
    """Resolved meshes by degree, and what is wrong with the other divisors of dp_shard."""
    base = attrs.evolve(work.mesh, ep=1).resolve(gpus)
    if extra := [axis for axis in ("tp", "pp", "cp") if getattr(base, axis) > 1]:
        raise PlanError(f"mesh.{extra[0]}", getattr(base, extra[0]), "must be 1: its cost is not known")
    if "E" not in work.model.pattern or not work.splits_experts:
        return [base], {}
    valid, refused = [], {}
    for ep in (d for d in range(1, base.dp_shard + 1) if base.dp_shard % d == 0):
        mesh = attrs.evolve(base, ep=ep)
        if broken := mesh.broken_rules(gpus, work.model.num_experts):
            refused[ep] = broken[0].rule
        else:
            valid.append(mesh)
    return valid, refused


def _footprints(work: Workload, mesh: MeshConfig, known: dict[tuple[str, bool, int], Footprint]) -> list[Footprint]:
    """By layer; layers that are alike, at other degrees too, are measured once."""
    found = []
    for block, letter in enumerate(work.model.pattern):
        key = (letter, work.is_checkpointed(block), mesh.ep if letter == "E" else 1)
        if key not in known:
            known[key] = footprint_of_layer(work, mesh, block)
        found.append(known[key])
    return found


def _stack(work: Workload) -> int:
    """E * P: numbers in the experts of one layer."""
    return 2 * work.model.num_experts * work.model.hidden_size * work.model.expert_hidden_size


def crossover_tokens(work: Workload) -> float:
    """(gathers + reductions) * E * P = all-to-alls * T * K * D, both in bytes, solved for T: the shares that stay on
    the rank are alike on both sides where ep takes all of the shard axis.
    """
    if "E" not in work.model.pattern:
        return 0.0
    gathers = (1 + work.reshard_after_forward) * work.microbatches
    moved = (gathers * work.param_bytes + work.reduce_bytes) * _stack(work)
    _, of_rows = exchanges(work, work.model.pattern.index("E"))
    per_token = 2 * of_rows * work.microbatches * work.model.top_k * work.model.hidden_size * work.param_bytes
    return moved / per_token


def _predict(
    work: Workload, mesh: MeshConfig, hardware: Hardware, memory: Memory, collectives: Sequence[Collective]
) -> Prediction:
    tokens = work.rows_per_rank(mesh.world_size) * work.sequence_length * work.microbatches
    speed = hardware.tflops * 1e12
    compute = tokens * (flops_per_token(work.model, work.sequence_length) + _recomputed(work)) / speed
    seconds = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all"), 0.0)
    for one in collectives:
        bandwidth = hardware.intra if one.span <= hardware.gpus_per_node else hardware.link
        seconds[one.kind] += one.sent / bandwidth
    exchange = seconds.pop("all_to_all")
    sharding = sum(seconds.values())
    step, overlapped = compute + sharding + exchange, max(compute, sharding) + exchange
    useful = tokens * flops_per_token(work.model, work.sequence_length) / speed
    return Prediction(
        ep=mesh.ep,
        memory=memory,
        fits=memory.peak <= hardware.memory - hardware.reserve,
        collectives=tuple(collectives),
        compute_seconds=compute,
        sharding_seconds=sharding,
        exchange_seconds=exchange,
        step_seconds=step,
        overlapped_step_seconds=overlapped,
        tokens_per_second=tokens / step,
        mfu=useful / step,
        overlapped_mfu=useful / overlapped,
        rows_per_expert=tokens / work.microbatches * work.model.top_k * mesh.ep / work.model.num_experts,
    )


def _recomputed(work: Workload) -> int:
    """Operations for a token that checkpointing does again; "selective" keeps the results of products."""
    if work.checkpointing == "selective":
        return 0
    layers = enumerate(work.model.pattern)
    return sum(layer_forward_flops(work.model, x, work.sequence_length) for i, x in layers if work.is_checkpointed(i))


def _choose(predictions: Sequence[Prediction], hardware: Hardware) -> tuple[int, str]:
    fitting = [one for one in predictions if one.fits]
    room = f"{hardware.memory / GIB:.0f} GiB"
    if not fitting:
        least = min(predictions, key=lambda one: one.memory.peak)
        return least.ep, (
            f"no degree fits in {room}; ep = {least.ep} comes closest with a peak of {least.memory.peak / GIB:.1f} GiB "
            f"({least.memory.moment})"
        )
    # of two that are as fast the smaller one, then the less split
    best = min(fitting, key=lambda one: (round(one.step_seconds, 6), one.memory.peak, one.ep))
    others = [one for one in predictions if one is not best]
    if not others:
        return best.ep, f"ep = {best.ep} is the only valid degree, and it fits in {room}"
    rival = min(others, key=lambda one: one.step_seconds)
    which = "every degree does" if len(fitting) == len(predictions) else f"{_listed(fitting)} do"
    return best.ep, (
        f"ep = {best.ep} is the fastest of those that fit in {room} ({which}): its step gathers and reduces for "
        f"{best.sharding_seconds:.2f} s and exchanges tokens for {best.exchange_seconds:.2f} s beside "
        f"{best.compute_seconds:.2f} s of arithmetic, where ep = {rival.ep} takes {rival.sharding_seconds:.2f} s and "
        f"{rival.exchange_seconds:.2f} s"
    )


def _listed(predictions: Sequence[Prediction]) -> str:
    return ", ".join(str(one.ep) for one in predictions)

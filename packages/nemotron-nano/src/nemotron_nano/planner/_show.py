"""A plan as it is shown: tables for the terminal, a chart, and JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

import attrs
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from nemotron_nano.planner._collectives import Collective
from nemotron_nano.planner._inputs import GIB
from nemotron_nano.planner._memory import KINDS
from nemotron_nano.planner._predict import Plan, Prediction
from nemotron_nano.report.summary import load_pyplot, save_figure

_KIND_NAMES = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
}

_COLORS = ("#1b4f72", "#2e86c1", "#85c1e9", "#e67e22", "#c0392b", "#7f8c8d")
"""State in blues, what moves in warm colours, activations grey."""


def to_json(plan: Plan) -> str:
    """All of it; sizes in bytes, times in seconds, `link` and `intra` in bytes a second."""
    return json.dumps(attrs.asdict(plan, value_serializer=_plain), indent=2)


def _plain(_: object, __: object, value: object) -> object:
    return value._asdict() if hasattr(value, "_asdict") else value


def show(plan: Plan, console: Console) -> None:
    """The tables, the crossover, and the sentence."""
    hardware, count = plan.hardware, plan.parameters
    console.print(
        f"{count.total:,} parameters, {count.active:,} active; {plan.flops_per_token / 1e9:.2f} GFLOP a token; "
        f"{plan.tokens_per_step:,} tokens a step on {plan.gpus} GPUs, {plan.tokens_per_microbatch:,} a microbatch"
    )
    console.print(_memory_table(plan))
    console.print(_time_table(plan))
    console.print(_collectives_table(plan))
    for ep, rule in plan.refused.items():
        console.print(f"ep = {ep} is not valid: {rule}")
    stack = f"one layer's experts are {plan.expert_stack_bytes / GIB:.2f} GiB as they are gathered"
    side = "fewer" if plan.tokens_per_microbatch < plan.crossover_tokens else "more"
    console.print(
        f"{stack}; exchanging tokens moves less than that below {plan.crossover_tokens:,.0f} tokens a microbatch, and "
        f"there are {side}"
    )
    console.print(f"times: {hardware.tflops:g} TFLOP/s, {hardware.intra / 1e9:g} GB/s in a node of "
                  f"{hardware.gpus_per_node}, {hardware.link / 1e9:g} GB/s between nodes; from gathers hidden behind "
                  "arithmetic to nothing hidden")  # fmt: skip
    console.print(f"[bold]{plan.why}[/]")


def _memory_table(plan: Plan) -> Table:
    room = f"{plan.hardware.memory / GIB:.0f} GiB"
    table = _table(f"GiB of a rank, at the most; fits in {room} with {plan.hardware.reserve / GIB:g} to spare", "ep")
    for heading in ("parameters", "gradients", "optimizer", "gather buffers", "all-to-all buffers", "activations"):
        table.add_column(heading, justify="right")
    for heading in ("peak", "fits"):
        table.add_column(heading, justify="right")
    table.add_column("at the peak")
    for one in plan.predictions:
        sizes = [f"{size / GIB:.2f}" for size in one.memory.largest.values()]
        verdict = "yes" if one.fits else "no"
        table.add_row(_degree(plan, one), *sizes, f"{one.memory.peak / GIB:.2f}", verdict, one.memory.moment)
    return table


def _time_table(plan: Plan) -> Table:
    table = _table("a step", "ep")
    for heading in ("arithmetic s", "gather+reduce s", "all-to-all s", "step s", "tokens/s/GPU", "MFU", "rows/expert"):
        table.add_column(heading, justify="right")
    for one in plan.predictions:
        table.add_row(
            _degree(plan, one),
            f"{one.compute_seconds:.3f}",
            f"{one.sharding_seconds:.3f}",
            f"{one.exchange_seconds:.3f}",
            f"{one.overlapped_step_seconds:.3f} - {one.step_seconds:.3f}",
            f"{one.tokens_per_second:,.0f}",
            f"{one.overlapped_mfu:.0%} - {one.mfu:.0%}",
            f"{one.rows_per_expert:,.0f}",
        )
    return table


def _collectives_table(plan: Plan) -> Table:
    table = _table("collectives of a step: calls, and MiB that a rank sends", "kind", "of")
    for one in plan.predictions:
        table.add_column(f"ep {_degree(plan, one)}", justify="right")
    rows = dict.fromkeys((c.kind, c.purpose) for one in plan.predictions for c in one.collectives)
    for kind, purpose in sorted(rows, key=lambda row: list(_KIND_NAMES).index(row[0])):
        cells = [_cell([c for c in one.collectives if (c.kind, c.purpose) == (kind, purpose)])
                 for one in plan.predictions]  # fmt: skip
        table.add_row(_KIND_NAMES[kind], purpose, *cells)
    return table


def _cell(collectives: Sequence[Collective]) -> str:
    if not collectives:
        return "-"
    calls, sent = sum(c.calls for c in collectives), sum(c.sent for c in collectives)
    return f"{calls} x, {sent / 2**20:,.2f}"


def _table(title: str, *headings: str) -> Table:
    return Table(*headings, title=title, title_justify="left", box=SIMPLE_HEAD)


def _degree(plan: Plan, one: Prediction) -> str:
    return f"{one.ep}{' *' if one.ep == plan.chosen else ''}"


def plot(plan: Plan, path: Path) -> Path:
    """Write the chart; the format goes by the suffix."""
    plt = load_pyplot()
    figure, (memory, time) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    degrees = [f"ep {one.ep}" for one in plan.predictions]
    bottom = [0.0] * len(degrees)
    for kind, color in zip(KINDS, _COLORS, strict=True):
        sizes = [one.memory.at_peak[kind] / GIB for one in plan.predictions]
        memory.bar(degrees, sizes, 0.6, bottom=bottom, color=color, label=kind.replace("_", " "))
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    for place, total in enumerate(bottom):
        memory.annotate(f"{total:.1f}", (place, total), xytext=(0, 3), textcoords="offset points", ha="center")
    room = plan.hardware.memory / GIB
    memory.axhline(room, color="black", linestyle="--", linewidth=1)
    memory.annotate(f"{room:.0f} GiB", (-0.45, room), xytext=(0, 3), textcoords="offset points", fontsize=9)
    memory.set_ylim(0, 1.45 * max([*bottom, room]))
    memory.set_ylabel("GiB of a rank at its peak")
    memory.legend(ncols=2, fontsize=8, loc="upper right")

    bottom = [0.0] * len(degrees)
    parts = (("arithmetic", "compute_seconds", "#7f8c8d"), ("gathers and reductions", "sharding_seconds", "#e67e22"),
             ("all-to-alls", "exchange_seconds", "#c0392b"))  # fmt: skip
    for label, field, color in parts:
        seconds = [getattr(one, field) for one in plan.predictions]
        time.bar(degrees, seconds, 0.6, bottom=bottom, color=color, label=label)
        bottom = [low + more for low, more in zip(bottom, seconds, strict=True)]
    for place, one in enumerate(plan.predictions):
        text = f"MFU {one.mfu:.0%}"
        time.annotate(text, (place, bottom[place]), xytext=(0, 3), textcoords="offset points", ha="center")
    time.set_ylim(0, 1.3 * max(bottom))
    time.set_ylabel("seconds of a step, nothing hidden")
    time.legend(fontsize=8, loc="upper right")
    chosen = [one.ep for one in plan.predictions].index(plan.chosen)
    for axis in (memory, time):
        axis.get_xticklabels()[chosen].set_fontweight("bold")
    figure.suptitle(
        f"{plan.parameters.total / 1e9:.2f}B parameters on {plan.gpus} GPUs, "
        f"{plan.tokens_per_microbatch:,} tokens a microbatch; chosen: ep {plan.chosen}",
        fontsize=11,
    )
    return save_figure(figure, path)

"""A plan as a picture: memory at the peak, and what a step moves and takes, over the degrees."""

from pathlib import Path

from nemotron_nano.planner._hardware import GIB
from nemotron_nano.planner._memory import KINDS
from nemotron_nano.planner._predict import Plan
from nemotron_nano.report.summary import _pyplot, _write

_COLORS = ("#1b4f72", "#2e86c1", "#85c1e9", "#e67e22", "#c0392b", "#7f8c8d")
"""State in blues, what moves in warm colours, activations grey."""


def plot(plan: Plan, path: Path) -> Path:
    """Write the chart; the format goes by the suffix."""
    plt = _pyplot()
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
    return _write(figure, path)

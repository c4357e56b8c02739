"""Finished runs side by side: a table on the terminal, and plots in the folder of the first."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from nemotron_nano.report.trackers import read_metrics

WARM_UP_STEPS = 3
"""Steps at the start of a run that its speed is not measured on."""

FP32_SPACING = 2.0**-23


class MissingExtraError(ImportError):
    """An optional dependency is not installed."""


class NoMetricsError(ValueError):
    """A folder without a record of training."""


@attrs.frozen
class RunRecord:
    """What `metrics.jsonl` says of one run."""

    name: str
    ep: int | None
    """Its expert-parallel degree, where the config says one."""
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        records = read_metrics(folder / "metrics.jsonl")
        steps = [record for record in records if record["event"] == "step_end"]
        if not steps:
            raise NoMetricsError(f"{folder} has no steps in metrics.jsonl")
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        evaluations = [record for record in records if record["event"] == "evaluated"]
        return cls(folder.name, config.get("mesh", {}).get("ep"), steps, evaluations)

    @property
    def tokens_per_second(self) -> float:
        timed = self.steps[WARM_UP_STEPS:] or self.steps
        return sum(step["tokens"] for step in timed) / sum(step["seconds"] for step in timed)


def report(folders: Sequence[Path]) -> None:
    """Print the table; write `loss.png`, and `expert_load.png` where the first run's model has experts."""
    runs = [RunRecord.read(folder) for folder in folders]
    console = Console(highlight=False)
    console.print(_table(runs))
    written = [plot_loss(runs, folders[0] / "loss.png")]
    if runs[0].steps[0].get("expert_load"):
        written.append(plot_expert_load(runs[0], folders[0] / "expert_load.png"))
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)


def _table(runs: Sequence[RunRecord]) -> Table:
    table = Table("run", box=SIMPLE_HEAD)
    for heading in ("ep", "steps", "loss", "bits/byte", "entropy", "tokens/s", "peak MiB"):
        table.add_column(heading, justify="right")
    for run in runs:
        last = run.steps[-1]
        evaluation = run.evaluations[-1] if run.evaluations else {}
        table.add_row(
            run.name,
            "-" if run.ep is None else str(run.ep),
            str(last["step"]),
            f"{last['loss']:.4f}",
            _number(evaluation.get("bits_per_byte")),
            _number(evaluation.get("byte_entropy_bits")),
            f"{run.tokens_per_second:,.0f}",
            " ".join(f"{size / 2**20:.0f}" for size in last["peak_memory_bytes"]),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def plot_loss(runs: Sequence[RunRecord], path: Path) -> Path:
    """Training loss of all runs over steps, with their validations; and below, how far each is from the first."""
    plt = load_pyplot()
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[3, 1], layout="constrained")
    first = {step["step"]: step["loss"] for step in runs[0].steps}
    styles = ["-", "--", ":", "-."]
    for number, run in enumerate(runs):
        steps, losses = [s["step"] for s in run.steps], [s["loss"] for s in run.steps]
        (line,) = top.plot(steps, losses, styles[number % len(styles)], label=run.name, linewidth=1.5)
        if run.evaluations:
            marks = [e["step"] for e in run.evaluations], [e["loss"] for e in run.evaluations]
            top.plot(*marks, "o", color=line.get_color(), label=f"{run.name}, validation")
        if number:
            shared = [step for step in steps if step in first]
            away = [abs(loss - first[step]) for step, loss in zip(steps, losses, strict=True) if step in first]
            bottom.plot(shared, away, color=line.get_color())
    top.set_ylabel("loss, nats per byte")
    top.legend()
    top.grid(alpha=0.3)
    bottom.set_ylabel(f"|loss - {runs[0].name}|")
    bottom.set_xlabel("step")
    # linear up to the spacing of fp32 numbers at a loss of 1, so that equal losses stand at 0
    bottom.set_yscale("symlog", linthresh=FP32_SPACING)
    bottom.set_ylim(bottom=0)
    bottom.grid(alpha=0.3)
    if len(runs) == 1:
        bottom.remove()
        top.set_xlabel("step")
    return save_figure(figure, path)


def plot_expert_load(run: RunRecord, path: Path) -> Path:
    """Share of the tokens that each expert got, over steps: one panel a layer, 1 is an even share."""
    plt = load_pyplot()
    layers = list(run.steps[0]["expert_load"])
    figure, axes = plt.subplots(len(layers), 1, figsize=(8, 1 + 2.6 * len(layers)), squeeze=False, layout="constrained")
    for layer, axis in zip(layers, axes[:, 0], strict=True):
        columns = [_even_shares(step["expert_load"][layer]) for step in run.steps]
        shares = list(zip(*columns, strict=True))
        edges = (run.steps[0]["step"] - 0.5, run.steps[-1]["step"] + 0.5, -0.5, len(shares) - 0.5)
        options = {"aspect": "auto", "origin": "lower", "interpolation": "nearest", "extent": edges}
        image = axis.imshow(shares, vmin=0, vmax=2, cmap="RdBu_r", **options)
        axis.set_title(layer, fontsize=10)
        axis.set_ylabel("expert")
        figure.colorbar(image, ax=axis, label="load / even load", extend="max")
    axes[-1, 0].set_xlabel("step")
    return save_figure(figure, path)


def _even_shares(counts: Sequence[int]) -> list[float]:
    even = sum(counts) / len(counts)
    return [count / even if even else 0.0 for count in counts]


def load_pyplot() -> Any:
    """matplotlib.pyplot, drawing into files.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingExtraError("plots need matplotlib: pip install 'nemotron-nano[plot]'") from error
    mpl.use("agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, path: Path) -> Path:
    """Write it in the format of the path's suffix."""
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path

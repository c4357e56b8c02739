"""Finished runs side by side: a table on the terminal, and plots in the folder of the first."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from nemotron_nano.report._jsonl import read_metrics

WARM_UP_STEPS = 3
"""Steps at the start of a run that its speed is not measured on."""


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
    from nemotron_nano.report._plots import plot_expert_load, plot_loss

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

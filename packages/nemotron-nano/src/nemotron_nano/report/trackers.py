"""The trackers: `console`, progress lines that also read well in a log file, and `jsonl`, every event as a line of
`metrics.jsonl` that any tool reads.
"""

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import validators
from rich.console import Console

from moe_core.plugins import Run

_log = logging.getLogger(__name__)


@attrs.frozen
class ConsoleConfig:
    """`console`: progress lines on the first rank's standard output."""

    every: int = attrs.field(default=10, validator=validators.ge(1))
    """Steps between lines; the first and the last step always have one."""


def build_console(config: ConsoleConfig, run: Run) -> "ConsoleTracker":
    return ConsoleTracker(every=config.every, enabled=run.rank == 0)


class ConsoleTracker:
    """Prints on the first rank."""

    def __init__(self, *, every: int, enabled: bool) -> None:
        self._every = every
        self._console = Console(quiet=not enabled, highlight=False, soft_wrap=True)
        self._first_step = 0
        self._begin = time.monotonic()

    def run_start(self, *, run: Run, first_step: int, steps: int, description: Mapping[str, Any], **_: Any) -> None:
        self._first_step, self._begin = first_step, time.monotonic()
        parameters = sum(parameter.numel() for parameter in run.model.parameters())
        where = f"{run.world_size} rank{'s' if run.world_size > 1 else ''} on {run.device_type}"
        self._console.print(f"[bold]{run.config.run.name}[/]: {parameters:,} parameters, {where}, {_layout(run)}")
        if "digest" in description:
            self._console.print(
                f"{description['corpus']}, digest {description['digest']}: {description['training_documents']:,} "
                f"documents, {description['training_tokens']:,} tokens for training; "
                f"{description['validation_documents']:,} documents, {description['validation_tokens']:,} tokens for "
                "validation"
            )
        if first_step:
            self._console.print(f"resumed after step {first_step}; {steps - first_step} to go")

    def step_end(self, *, step: int, steps: int, metrics: Mapping[str, Any], **_: Any) -> None:
        if step % self._every and step not in (self._first_step + 1, steps):
            return
        per_step = (time.monotonic() - self._begin) / (step - self._first_step)
        memory = " ".join(f"{size / 2**20:.0f}" for size in metrics["peak_memory_bytes"])
        count = f"{step:>{len(str(steps))}}/{steps}"
        mfu = f"MFU {metrics['mfu']:.1%}  " if "mfu" in metrics else ""
        self._console.print(
            f"step {count}  loss {metrics['loss']:.4f}  grad norm {metrics['grad_norm']:.3f}  "
            f"{metrics['tokens_per_second']:,.0f} tokens/s  {mfu}peak memory {memory} MiB  "
            f"{_duration(per_step * (steps - step))} left"
        )

    def evaluated(self, *, step: int, metrics: Mapping[str, Any], **_: Any) -> None:
        line = f"validation after step {step}: loss {metrics['loss']:.4f}"
        if "bits_per_byte" in metrics:
            bits, entropy = metrics["bits_per_byte"], metrics["byte_entropy_bits"]
            less = f"{1 - bits / entropy:.0%} less"
            line += f", [bold]{bits:.3f} bits per byte[/] (single tokens alone: {entropy:.3f}, {less})"
        self._console.print(line)

    def checkpoint_saved(self, *, step: int, path: Path, **_: Any) -> None:
        self._console.print(f"checkpoint after step {step}: {path}")


def _layout(run: Run) -> str:
    """The mesh's axes with their sizes."""
    names = run.mesh.mesh_dim_names or ()
    return ", ".join(f"{name} {size}" for name, size in zip(names, run.mesh.shape, strict=True))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


@attrs.frozen
class JsonlConfig:
    """`jsonl`: one JSON object per event in `metrics.jsonl`, and the resolved config beside it."""

    file: str = "metrics.jsonl"
    """Name in the run's folder."""


def build_jsonl(config: JsonlConfig, run: Run) -> "JsonlTracker":
    return JsonlTracker(Path(run.config.run.output_dir), config.file, enabled=run.rank == 0)


class MetricsError(ValueError):
    """A file of metrics that cannot be read."""


class JsonlTracker:
    """Writes on the first rank; a resumed run takes back the lines of steps that it does again."""

    def __init__(self, folder: Path, file: str, *, enabled: bool) -> None:
        self._folder, self._path, self._enabled = folder, folder / file, enabled

    def run_start(self, *, run: Run, first_step: int, description: Mapping[str, Any], **_: Any) -> None:
        if not self._enabled:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "config.toml").write_text(run.config.to_toml(), encoding="utf-8")
        kept = [record for record in read_metrics(self._path) if record["step"] <= first_step] if first_step else []
        self._path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        self._write("run_start", first_step, {"world_size": run.world_size, "data": dict(description)})

    def step_end(self, *, step: int, metrics: Mapping[str, Any], **_: Any) -> None:
        self._write("step_end", step, metrics)

    def evaluated(self, *, step: int, metrics: Mapping[str, Any], **_: Any) -> None:
        self._write("evaluated", step, metrics)

    def checkpoint_saved(self, *, step: int, path: Path, **_: Any) -> None:
        self._write("checkpoint_saved", step, {"path": str(path)})

    def _write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        if self._enabled:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, "step": step, **values}) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, oldest first; none if there is no such file.

    A last line that a killed run has left incomplete is passed over.

    Raises:
        MetricsError: another line is not a record.
    """
    if not path.exists():
        return []
    *lines, incomplete = path.read_text(encoding="utf-8").split("\n")
    records = [_record(path, number, line) for number, line in enumerate(lines, start=1) if line]
    if incomplete:
        _log.warning("%s: the last line is incomplete and is passed over", path)
    return records


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise MetricsError(f"{path}, line {number}: is not JSON ({error.msg}); mend or remove the line") from None
    if not isinstance(record, dict) or "event" not in record or "step" not in record:
        raise MetricsError(f"{path}, line {number}: is no record of a run, which has an event and a step")
    return record

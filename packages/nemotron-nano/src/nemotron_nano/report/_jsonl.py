"""`metrics.jsonl`: every event of a run as a line that any tool reads."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_core.plugins import Run

_log = logging.getLogger(__name__)


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

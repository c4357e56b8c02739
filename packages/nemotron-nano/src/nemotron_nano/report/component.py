"""The tracker components: config classes, which need no torch, and their factories."""

from typing import TYPE_CHECKING

import attrs
from attrs import validators

if TYPE_CHECKING:
    from moe_core.plugins import Run
    from nemotron_nano.report._console import ConsoleTracker
    from nemotron_nano.report._jsonl import JsonlTracker


@attrs.frozen
class ConsoleConfig:
    """`console`: progress lines on the first rank's standard output."""

    every: int = attrs.field(default=10, validator=validators.ge(1))
    """Steps between lines; the first and the last step always have one."""


@attrs.frozen
class JsonlConfig:
    """`jsonl`: one JSON object per event in `metrics.jsonl`, and the resolved config beside it."""

    file: str = "metrics.jsonl"
    """Name in the run's folder."""


def build_console(config: ConsoleConfig, run: "Run") -> "ConsoleTracker":
    from nemotron_nano.report._console import ConsoleTracker

    return ConsoleTracker(every=config.every, enabled=run.rank == 0)


def build_jsonl(config: JsonlConfig, run: "Run") -> "JsonlTracker":
    from pathlib import Path

    from nemotron_nano.report._jsonl import JsonlTracker

    return JsonlTracker(Path(run.config.run.output_dir), config.file, enabled=run.rank == 0)

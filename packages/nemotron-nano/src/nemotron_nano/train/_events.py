"""Run events, to every component of the run that has a method of that name."""

from typing import Any

from moe_core.plugins import Run

_LISTENERS = ("mesh", "model", "loss", "optimizer", "scheduler", "clipper", "data", "checkpointer")


def emit(run: Run, event: str, /, **info: Any) -> None:
    """Call `event` on the run's components in the order they were built, the trackers last."""
    listeners = [getattr(run, part) for part in _LISTENERS] + list(run.trackers)
    for listener in listeners:
        method = getattr(listener, event, None)
        if callable(method):
            method(**info)

"""What the host loads: config classes and references, without torch."""

import attrs

from moe_core.plugins import Component, hookimpl


@attrs.frozen
class LoopConfig:
    log_as: str = "outside"
    """Word at the start of each line."""


@attrs.frozen
class SmoothedConfig:
    smoothing: float = 0.1
    """Share of the target that is spread over the vocabulary."""


@hookimpl
def moe_components() -> list[Component]:
    return [
        Component("trainer", "outside_loop", "outside.plugin:LoopConfig", "outside.parts:build_loop"),
        Component("loss", "outside_smoothed", "outside.plugin:SmoothedConfig", "outside.parts:build_smoothed"),
    ]

"""The components that grad-clip-multimesh registers with the plugin host."""

from moe_core.plugins import Component, hookimpl


@hookimpl
def moe_components() -> list[Component]:
    return []

"""The components that ckpt-layout registers with the plugin host."""

from typing import TYPE_CHECKING, Any

import attrs

from moe_core.plugins import Component, hookimpl

if TYPE_CHECKING:
    from ckpt_layout._families import Family


@attrs.frozen
class FamilyConfig:
    """A family of models as data; it has no settings."""


def nemotron_h(config: FamilyConfig, run: Any) -> "Family":
    return _row("nemotron_h")


def mixtral(config: FamilyConfig, run: Any) -> "Family":
    return _row("mixtral")


def qwen3_moe(config: FamilyConfig, run: Any) -> "Family":
    return _row("qwen3_moe")


def deepseek_v3(config: FamilyConfig, run: Any) -> "Family":
    return _row("deepseek_v3")


def _row(name: str) -> "Family":
    from ckpt_layout._families import families

    return families()[name]


@hookimpl
def moe_components() -> list[Component]:
    here = "ckpt_layout._plugin:"
    rows = ("nemotron_h", "mixtral", "qwen3_moe", "deepseek_v3")
    return [Component("family", row, f"{here}FamilyConfig", f"{here}{row}") for row in rows]

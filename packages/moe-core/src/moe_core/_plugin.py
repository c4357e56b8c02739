"""The components that moe-core registers with the plugin host."""

from typing import TYPE_CHECKING, Any

import attrs

from moe_core.plugins import Component, hookimpl

if TYPE_CHECKING:
    from moe_core.plugins.kinds import GroupedGemm


@attrs.frozen
class GroupedMMConfig:
    """`torch.nn.functional.grouped_mm` for all experts at once; fp32, bf16 and fp16 of aligned widths."""


@attrs.frozen
class LoopConfig:
    """One product per expert; any dtype and width, and reads the counts on the host."""


def build_grouped_mm(config: GroupedMMConfig, run: Any) -> "GroupedGemm":
    from moe_core._grouped_gemm import grouped_mm

    return grouped_mm


def build_loop(config: LoopConfig, run: Any) -> "GroupedGemm":
    from moe_core._grouped_gemm import loop

    return loop


@hookimpl
def moe_components() -> list[Component]:
    here = "moe_core._plugin"
    return [
        Component("grouped_gemm", "grouped_mm", f"{here}:GroupedMMConfig", f"{here}:build_grouped_mm"),
        Component("grouped_gemm", "loop", f"{here}:LoopConfig", f"{here}:build_loop"),
    ]

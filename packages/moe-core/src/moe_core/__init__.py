"""Router, grouped experts, MoE layer and balancing; and the plugin host with its TOML loader.

The layers need torch, the host (`moe_core.plugins`) and the loader (`moe_core.config`) do not, so names
are looked up on first use: listing components or checking a config never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_core._balance import router_z_loss as router_z_loss
    from moe_core._balance import sequence_balance_loss as sequence_balance_loss
    from moe_core._balance import update_router_bias as update_router_bias
    from moe_core._experts import GroupedExperts as GroupedExperts
    from moe_core._experts import LocalDispatch as LocalDispatch
    from moe_core._moe import MoE as MoE
    from moe_core._moe_config import MoEConfig as MoEConfig
    from moe_core._router import Routing as Routing
    from moe_core._router import TopKRouter as TopKRouter
    from moe_core.config import load_config as load_config

_HOME = {
    "GroupedExperts": "moe_core._experts",
    "LocalDispatch": "moe_core._experts",
    "MoE": "moe_core._moe",
    "MoEConfig": "moe_core._moe_config",
    "Routing": "moe_core._router",
    "TopKRouter": "moe_core._router",
    "load_config": "moe_core.config",
    "router_z_loss": "moe_core._balance",
    "sequence_balance_loss": "moe_core._balance",
    "update_router_bias": "moe_core._balance",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

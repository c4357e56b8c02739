"""Nemotron-3 Nano: the model, its configs, the reference trainer, the command line.

Names are looked up on first use: configs, counts and the command line never import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemotron_nano.costs import ParameterCount as ParameterCount
    from nemotron_nano.costs import count_parameters as count_parameters
    from nemotron_nano.costs import flops_per_token as flops_per_token
    from nemotron_nano.model import NemotronNano as NemotronNano
    from nemotron_nano.model_config import NemotronNanoConfig as NemotronNanoConfig
    from nemotron_nano.model_config import NemotronNanoConfigError as NemotronNanoConfigError
    from nemotron_nano.model_config import presets as presets
    from nemotron_nano.planner import plan as plan

_HOME = {
    "NemotronNano": "nemotron_nano.model",
    "NemotronNanoConfig": "nemotron_nano.model_config",
    "NemotronNanoConfigError": "nemotron_nano.model_config",
    "ParameterCount": "nemotron_nano.costs",
    "count_parameters": "nemotron_nano.costs",
    "flops_per_token": "nemotron_nano.costs",
    "plan": "nemotron_nano.planner",
    "presets": "nemotron_nano.model_config",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

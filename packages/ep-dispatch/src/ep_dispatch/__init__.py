"""Tokens to their experts and back; experts sharded over the expert-parallel axis."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ep_dispatch._dispatchers import AllToAllDispatcher as AllToAllDispatcher
    from ep_dispatch._dispatchers import LocalDispatcher as LocalDispatcher
    from ep_dispatch._dispatchers import PlannedDispatcher as PlannedDispatcher
    from ep_dispatch._expert_stacks import ExpertParallelGroupedExperts as ExpertParallelGroupedExperts
    from ep_dispatch._expert_stacks import shard_experts as shard_experts
    from ep_dispatch._permute import build_permute_indices as build_permute_indices

_HOME = {
    "AllToAllDispatcher": "ep_dispatch._dispatchers",
    "ExpertParallelGroupedExperts": "ep_dispatch._expert_stacks",
    "LocalDispatcher": "ep_dispatch._dispatchers",
    "PlannedDispatcher": "ep_dispatch._dispatchers",
    "build_permute_indices": "ep_dispatch._permute",
    "shard_experts": "ep_dispatch._expert_stacks",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

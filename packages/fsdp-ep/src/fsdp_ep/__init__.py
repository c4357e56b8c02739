"""FSDP2 units, activation checkpointing and precision for a model whose experts live on another mesh."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_ep._checkpointing import apply_activation_checkpointing as apply_activation_checkpointing
    from fsdp_ep._fully_shard import fully_shard_moe as fully_shard_moe
    from fsdp_ep._gradients import all_reduce_gradients as all_reduce_gradients
    from fsdp_ep._gradients import set_requires_gradient_sync as set_requires_gradient_sync
    from fsdp_ep._units import ShardingError as ShardingError
    from fsdp_ep._units import Units as Units
    from fsdp_ep._units import find_embedding as find_embedding
    from fsdp_ep._units import find_units as find_units

_HOME = {
    "ShardingError": "fsdp_ep._units",
    "Units": "fsdp_ep._units",
    "all_reduce_gradients": "fsdp_ep._gradients",
    "apply_activation_checkpointing": "fsdp_ep._checkpointing",
    "find_embedding": "fsdp_ep._units",
    "find_units": "fsdp_ep._units",
    "fully_shard_moe": "fsdp_ep._fully_shard",
    "set_requires_gradient_sync": "fsdp_ep._gradients",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

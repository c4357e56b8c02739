"""lm_head and cross entropy without ever holding the [T, V] logits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chunked_loss._clm import ChunkedCLMCrossEntropyLoss as ChunkedCLMCrossEntropyLoss
    from chunked_loss._clm import CLMCrossEntropyLoss as CLMCrossEntropyLoss
    from chunked_loss._clm import LossOutput as LossOutput
    from chunked_loss._clm import clm_cross_entropy_loss as clm_cross_entropy_loss
    from chunked_loss._clm import clm_cross_entropy_loss_sum as clm_cross_entropy_loss_sum
    from chunked_loss._clm import compiled as compiled
    from chunked_loss._head import skip_lm_head as skip_lm_head
    from chunked_loss._labels import global_denominator as global_denominator
    from chunked_loss._linear_cross_entropy import LossStats as LossStats
    from chunked_loss._linear_cross_entropy import linear_cross_entropy as linear_cross_entropy

_HOME = {
    "CLMCrossEntropyLoss": "chunked_loss._clm",
    "ChunkedCLMCrossEntropyLoss": "chunked_loss._clm",
    "LossOutput": "chunked_loss._clm",
    "LossStats": "chunked_loss._linear_cross_entropy",
    "clm_cross_entropy_loss": "chunked_loss._clm",
    "clm_cross_entropy_loss_sum": "chunked_loss._clm",
    "compiled": "chunked_loss._clm",
    "global_denominator": "chunked_loss._labels",
    "linear_cross_entropy": "chunked_loss._linear_cross_entropy",
    "skip_lm_head": "chunked_loss._head",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

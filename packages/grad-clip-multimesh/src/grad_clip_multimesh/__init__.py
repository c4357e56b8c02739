"""Gradient norm and clipping over gradients on any mix of meshes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grad_clip_multimesh._clip import clip_grad_norm_ as clip_grad_norm_
    from grad_clip_multimesh._clip import clip_grads_with_norm_ as clip_grads_with_norm_
    from grad_clip_multimesh._clip import get_total_norm as get_total_norm

_HOME = {
    "clip_grad_norm_": "grad_clip_multimesh._clip",
    "clip_grads_with_norm_": "grad_clip_multimesh._clip",
    "get_total_norm": "grad_clip_multimesh._clip",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

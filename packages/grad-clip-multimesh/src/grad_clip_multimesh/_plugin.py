"""The component that grad-clip-multimesh registers with the plugin host: the clipper "multi_mesh"."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import attrs

from moe_core.plugins import Component, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.plugins import Run

_HERE = "grad_clip_multimesh._plugin"


@hookimpl
def moe_components() -> list[Component]:
    return [Component("clipper", "multi_mesh", config=f"{_HERE}:ClipperConfig", factory=f"{_HERE}:multi_mesh")]


def _is_positive(_: object, attribute: "attrs.Attribute[Any]", value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"{attribute.name} = {value}: must be above 0")


@attrs.frozen
class ClipperConfig:
    """Clipping by the norm over all gradients, whatever meshes they are on."""

    max_norm: float | None = attrs.field(default=1.0, validator=_is_positive)
    """The largest norm that gradients are left with; none: the norm is reported, and nothing scaled."""
    norm_type: float = attrs.field(default=2.0, validator=_is_positive)
    """p of the norm; inf is the largest absolute value."""
    error_if_nonfinite: bool = False
    """Stop the run, on all ranks, when the norm is NaN or infinite."""


def multi_mesh(config: ClipperConfig, run: "Run") -> "Callable[[Iterable[Tensor]], Tensor]":
    """A clipper; its result is the norm before clipping."""
    from grad_clip_multimesh._clip import clip_grad_norm_

    def clip(parameters: "Iterable[Tensor]") -> "Tensor":
        return clip_grad_norm_(parameters, config.max_norm, config.norm_type, config.error_if_nonfinite)

    return clip

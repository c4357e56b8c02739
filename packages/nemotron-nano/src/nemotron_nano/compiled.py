"""The component ("transform", "compiled"): blocks of chosen kinds under `torch.compile`. The config needs no torch."""

from typing import TYPE_CHECKING

import attrs

from nemotron_nano.model_config import BLOCK_KINDS

if TYPE_CHECKING:
    from torch import nn

    from moe_core.plugins import Run
    from nemotron_nano.model import NemotronNano


def _known_kinds(_: object, attribute: "attrs.Attribute[str]", value: str) -> None:
    if unknown := sorted(set(value) - set(BLOCK_KINDS)):
        letters = ", ".join(f"{letter!r} {name}" for letter, name in BLOCK_KINDS.items())
        raise ValueError(f"{attribute.name} = {value!r}: unknown letter {unknown[0]!r}; letters: {letters}")


@attrs.frozen
class CompiledConfig:
    """Which blocks to compile; stands before activation checkpointing and FSDP."""

    kinds: str = attrs.field(default="M*-", validator=_known_kinds)
    """Letters of the pattern. A block with experts (E) is cut into several graphs: it reads counts on the host."""
    backend: str = "inductor"
    """torch.compile's backend."""
    dynamic: bool | None = None
    """Graphs for any number of tokens; unset: only once that number has changed."""


def compile_blocks(
    model: "NemotronNano", kinds: str = "M*-", *, backend: str = "inductor", dynamic: bool | None = None
) -> "NemotronNano":
    """Compile the forward pass of each block whose letter is among `kinds`, in place.

    Blocks of a kind share their graphs, since parameters are inputs of a graph. Apply it before activation
    checkpointing and FSDP, whose hooks then stay outside of the graphs.
    """
    import torch

    for letter, layer in zip(model.config.pattern, model.backbone.layers, strict=True):
        if letter in kinds:
            layer.forward = torch.compile(layer.forward, backend=backend, dynamic=dynamic)
    return model


def build_compiled(config: CompiledConfig, run: "Run") -> "nn.Module":
    """`run.model` with its blocks compiled.

    Raises:
        ValueError: the model is another kind of model.
    """
    from nemotron_nano.model import NemotronNano

    if not isinstance(run.model, NemotronNano):
        raise ValueError(
            f'transform.compiled: the model is a {type(run.model).__name__}; it compiles "nemotron_nano" only'
        )
    return compile_blocks(run.model, config.kinds, backend=config.backend, dynamic=config.dynamic)

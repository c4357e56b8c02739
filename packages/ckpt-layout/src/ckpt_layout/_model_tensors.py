"""The tensors of a model that a checkpoint holds, by name."""

import re

import torch
from torch import Tensor, nn

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.)")


def clean_name(name: str) -> str:
    """`name` without what torch.compile and checkpoint wrappers add."""
    return _WRAPPERS.sub("", name).removeprefix(".")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers in the model's order, sharded as they are; tied ones under each name.

    FSDP units that are gathered are sharded again first.
    """
    named = {clean_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    others = [name for name, value in named.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(f"state that is no tensor cannot be stored: {', '.join(others)}")
    return named


def without_ties(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, under the first of its names."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first.values()}

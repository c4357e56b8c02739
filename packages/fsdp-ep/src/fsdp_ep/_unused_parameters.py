"""Zero gradients for parameters that a backward pass did not reach, so that a unit always reduces all of its own.

FSDP reduces the gradients that are there. Which experts got tokens differs from rank to rank and from microbatch
to microbatch: ranks would then reduce-scatter different numbers of elements, which hangs or adds up the wrong
ones, and a unit would hold accumulated gradients in the reduction's dtype beside fresh ones in the parameters',
which FSDP refuses.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def fill_unused_gradients(unit: Sequence[nn.Module], inner_units: set[nn.Module]) -> None:
    """From now on each backward pass through `unit` leaves a gradient at every trainable parameter of it.

    To be called after `fully_shard(unit)`: its hooks run around these.

    Args:
        unit: the modules of one unit; the backward pass of each fills the gradients of all.
        inner_units: units of their own, whose parameters are theirs.
    """
    owners = [
        (module, name)
        for whole in unit
        for module in _own_modules(whole, inner_units)
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)  # others were ignored
    ]

    def watch_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not torch.is_grad_enabled() or not any(_trains(owner, name) for owner, name in owners):
            return None
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        places = [i for i in tensors if leaves[i].requires_grad]
        if not places and tensors:
            # behind a frozen embedding, say; some input has to make autograd come by
            places = tensors[:1]
        if not places:
            return None
        anchor = torch.empty(0, device=leaves[places[0]].device, requires_grad=True)
        watched = _FillWhenDone.apply(owners, anchor, *(leaves[i] for i in places))
        for i, tensor in zip(places, watched, strict=True):
            leaves[i] = tensor
        return tree_unflatten(leaves, structure)

    # like FSDP's own hooks
    hook = torch.compiler.disable(watch_inputs)
    for module in unit:
        module.register_forward_pre_hook(hook, with_kwargs=True)


def _trains(module: nn.Module, name: str) -> bool:
    parameter = module._parameters[name]
    return parameter is not None and parameter.requires_grad


def _own_modules(module: nn.Module, inner_units: set[nn.Module]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if child not in inner_units:
            yield from _own_modules(child, inner_units)


class _FillWhenDone(torch.autograd.Function):
    """The inputs of a unit, unchanged. Its backward runs after the unit's own, and before FSDP reduces.

    `anchor` requires a gradient, so that there is a backward pass also where no input does.
    """

    @staticmethod
    def forward(
        ctx: Any, owners: list[tuple[nn.Module, str]], anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.owners = owners
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        for module, name in ctx.owners:
            parameter = module._parameters[name]  # FSDP swaps sharded and gathered ones
            if parameter is not None and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return None, None, *grads

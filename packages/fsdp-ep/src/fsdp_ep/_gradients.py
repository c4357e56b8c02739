"""Gradients: their scale on every mesh, when they are reduced, and zeros where a backward pass does not come by."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fsdp_ep._unit_rules import Owned
from fsdp_ep._units import ShardingError


def set_gradient_scale(unit: FSDPModule, mesh: DeviceMesh, dp_size: int) -> None:
    """Make `unit` reduce its gradients to their mean over all `dp_size` data-parallel ranks.

    An expert has already seen the tokens of the whole ep axis, so the sum over the rest of the ranks is the
    sum over all of them. FSDP would divide it by the size of `mesh` alone, `ep` times too little.

    Args:
        unit: what `fully_shard` made on `mesh`.
        mesh: 1-D (shard) or 2-D (replicate, shard).
        dp_size: all ranks that read different data.
    """
    # A factor other than the size of the group asks for PREMUL_SUM, which gloo lacks; a plain SUM that is
    # divided afterwards works everywhere.
    unit.set_force_sum_reduction_for_comms(True)
    if mesh.size(mesh.ndim - 1) > 1:
        unit.set_gradient_divide_factor(float(dp_size))
    elif (rest := dp_size // mesh.size()) > 1:
        # Where the shard axis has one rank FSDP divides by a factor of ours twice: as it copies instead of
        # reducing, and after the SUM. So it takes its own mean over `mesh`, and the rest is divided here.
        unit.set_all_reduce_hook(functools.partial(_divide, divisor=rest))


def _divide(reduced: torch.Tensor, divisor: int) -> None:
    reduced.div_(divisor)


def set_requires_gradient_sync(model: nn.Module, flag: bool) -> None:
    """Whether the next backward passes reduce gradients, in all FSDP units of `model`.

    For gradient accumulation: False for all microbatches of a step but the last, True for the last.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(flag, recurse=False)


@torch.no_grad()
def all_reduce_gradients(parameters: Iterable[nn.Parameter], dp_mesh: DeviceMesh) -> None:
    """Give every parameter its gradient's mean over the ranks of `dp_mesh`, all in one flat all-reduce.

    For what `fully_shard_moe` was told to ignore, after the last backward pass of a step. Every rank sends the
    same numbers of elements whatever its data: a parameter without a gradient counts as zeros here, and has
    one afterwards.

    Args:
        parameters: plain (not DTensor) parameters, the same in the same order on all ranks; those that do not
            require a gradient are left out. Gradients of one dtype travel together, one all-reduce a dtype.
        dp_mesh: all data-parallel ranks; with two axes (replicate, shard) there is one all-reduce an axis.

    Raises:
        ShardingError: a parameter is a DTensor, which FSDP reduces.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            rule = "is a DTensor, whose gradient is not this rank's alone"
            raise ShardingError("parameters", tuple(parameter.shape), rule, "pass the ignored_params")
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for same in by_dtype.values():
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        for axis in range(dp_mesh.ndim):
            dist.all_reduce(flat, group=dp_mesh.get_group(axis))
        flat.div_(dp_mesh.size())
        for parameter, part in zip(same, flat.split([p.numel() for p in same]), strict=True):
            parameter.grad = part.view_as(parameter)


def fill_unused_gradients(unit: Sequence[nn.Module], owned: Iterable[Owned]) -> None:
    """From now on each backward pass through `unit` leaves a gradient at every trainable parameter of it.

    FSDP reduces the gradients that are there. Which experts got tokens differs from rank to rank and from microbatch
    to microbatch: ranks would then reduce-scatter different numbers of elements, which hangs or adds up the wrong
    ones, and a unit would hold accumulated gradients in the reduction's dtype beside fresh ones in the parameters',
    which FSDP refuses. To be called after `fully_shard(unit)`: its hooks run around these.

    Args:
        unit: the modules of one unit; the backward pass of each fills the gradients of all.
        owned: the parameters of this unit, as they were before.
    """
    owners = [(one.module, one.name.rpartition(".")[2]) for one in owned]

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

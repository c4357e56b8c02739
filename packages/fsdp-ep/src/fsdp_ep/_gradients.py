"""The scale of gradients on every mesh, and when they are reduced."""

import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_ep._errors import ShardingError


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

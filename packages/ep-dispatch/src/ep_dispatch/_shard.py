"""Splitting the expert stacks of a model over the expert-parallel axis."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from ep_dispatch._all_to_all import AllToAllDispatcher
from ep_dispatch._split import ExpertShardingError, chunk_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_experts(model: nn.Module, ep_mesh: "DeviceMesh", *, dispatcher: Any = None) -> nn.Module:
    """Leave each rank of `ep_mesh` its share of every expert stack, and bring tokens there and back.

    A stack is found by its interface: a module with attributes `num_experts` (E) and `dispatcher`, and own
    parameters [E, ...]. These become `Shard(0)` DTensors of the same names and global shapes, each rank keeping
    the `torch.chunk` piece of the values that it has; `dispatcher` is set. On a 1-rank mesh nothing changes.

    Args:
        model: on the meta device or a real one; changed in place.
        ep_mesh: 1-D.
        dispatcher: what to set instead of `AllToAllDispatcher(ep_mesh)`.

    Returns:
        The model.

    Raises:
        ExpertShardingError: a ValueError: the mesh is not 1-D, a rank would hold no expert, there is no stack, a
            stack is sharded already, or `fully_shard` was applied before.
    """
    if ep_mesh.ndim != 1:
        raise ExpertShardingError(f"ep_mesh has {ep_mesh.ndim} axes: must be the 1-D expert-parallel axis of the mesh")
    if ep_mesh.size() == 1:
        return model
    stacks = dict(_find_stacks(model))
    _check(model, stacks, ep_mesh.size())
    dispatcher = dispatcher or AllToAllDispatcher(ep_mesh)
    replaced: dict[Tensor, nn.Parameter] = {}
    for module in stacks.values():
        for name, parameter in _stacked_parameters(module):
            if parameter not in replaced:
                replaced[parameter] = _shard(parameter, ep_mesh)
            module.register_parameter(name, replaced[parameter])
        module.dispatcher = dispatcher
    return model


def _find_stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(getattr(module, "num_experts", None), int) and hasattr(module, "dispatcher"):
            yield name, module


def _stacked_parameters(module: Any) -> list[tuple[str, nn.Parameter]]:
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    return [(name, p) for name, p in own if p.dim() > 0 and p.shape[0] == module.num_experts]


def _check(model: nn.Module, stacks: dict[str, nn.Module], degree: int) -> None:
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ExpertShardingError("the model went through fully_shard already: call shard_experts before it")
    if not any(_stacked_parameters(module) for module in stacks.values()):
        raise ExpertShardingError(
            "the model has no expert stack: no module with attributes `num_experts` and `dispatcher` and parameters "
            "[num_experts, ...]; wrap other experts in ep_dispatch.ExpertParallelGroupedExperts"
        )
    for path, module in stacks.items():
        try:
            chunk_size(module.num_experts, degree)  # type: ignore[arg-type]  # an int, by how it was found
        except ExpertShardingError as error:
            raise ExpertShardingError(f"{path or 'the model'}: {error}") from None
        for name, parameter in _stacked_parameters(module):
            if isinstance(parameter, DTensor):
                raise ExpertShardingError(f"{path}.{name} is sharded already, over {parameter.device_mesh}")


def _shard(parameter: nn.Parameter, ep_mesh: "DeviceMesh") -> nn.Parameter:
    degree, rank = ep_mesh.size(), ep_mesh.get_local_rank()
    # a copy, so that the memory of the other ranks' experts is freed
    local = torch.chunk(parameter.detach(), degree)[rank].clone(memory_format=torch.contiguous_format)
    placed = DTensor.from_local(
        local, ep_mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=_contiguous_stride(parameter)
    )
    return nn.Parameter(placed, requires_grad=parameter.requires_grad)


def _contiguous_stride(parameter: Tensor) -> tuple[int, ...]:
    return torch.empty(parameter.shape, device="meta").stride()

"""Expert stacks: those of a model split over the expert-parallel axis, and a module of anybody's made one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ep_dispatch._dispatchers import AllToAllDispatcher, ExpertShardingError, LocalDispatcher, chunk_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_experts(
    model: nn.Module, ep_mesh: "DeviceMesh", *, dispatcher: Any = None, require_experts: bool = True
) -> nn.Module:
    """Leave each rank of `ep_mesh` its share of every expert stack, and bring tokens there and back.

    A stack is found by its interface: a module with attributes `num_experts` (E) and `dispatcher`, and own
    parameters [E, ...]. These become `Shard(0)` DTensors of the same names and global shapes, each rank keeping
    the `torch.chunk` piece of the values that it has; `dispatcher` is set. On a 1-rank mesh nothing changes, so
    that a second call is not seen there; all else is refused as on any other.

    Args:
        model: on the meta device or a real one; changed in place.
        ep_mesh: 1-D.
        dispatcher: what to set instead of `AllToAllDispatcher(ep_mesh)`.
        require_experts: False for what need not have a stack, as a stage of a pipeline or a model without MoE layers.

    Returns:
        The model.

    Raises:
        ExpertShardingError: a ValueError, on every rank and mesh: the mesh is not 1-D, a rank would hold no expert,
            there is no stack, other experts beside them that would be left whole, a stack is sharded already or has
            parameters that are not [E, ...], or `fully_shard` was applied before.
    """
    if ep_mesh.ndim != 1:
        raise ExpertShardingError(f"ep_mesh has {ep_mesh.ndim} axes: must be the 1-D expert-parallel axis of the mesh")
    stacks = {name: module for name, module in model.named_modules() if _is_stack(module)}
    _check(model, stacks, ep_mesh.size(), require_experts)
    if ep_mesh.size() == 1:
        return model
    dispatcher = dispatcher or AllToAllDispatcher(ep_mesh)
    replaced: dict[Tensor, nn.Parameter] = {}
    for module in stacks.values():
        for name, parameter in _stacked_parameters(module):
            if parameter not in replaced:
                replaced[parameter] = _shard(parameter, ep_mesh)
            module.register_parameter(name, replaced[parameter])
        module.dispatcher = dispatcher
    return model


def _is_stack(module: nn.Module) -> bool:
    return isinstance(getattr(module, "num_experts", None), int) and hasattr(module, "dispatcher")


def _is_foreign(module: nn.Module) -> bool:
    """Holds experts without the interface; [E, D] alone would be a router."""
    own = module.parameters(recurse=False)
    experts = getattr(module, "num_experts", None)
    return not hasattr(module, "dispatcher") and any(p.dim() > 2 and p.shape[0] == experts for p in own)


def _stacked_parameters(module: Any) -> list[tuple[str, nn.Parameter]]:
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    return [(name, p) for name, p in own if p.dim() > 0 and p.shape[0] == module.num_experts]


def _check(model: nn.Module, stacks: dict[str, nn.Module], degree: int, require_experts: bool) -> None:
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ExpertShardingError("the model went through fully_shard already: call shard_experts before it")
    for path, module in model.named_modules():
        if _is_foreign(module):
            raise ExpertShardingError(
                f"{path or 'the model'}: {type(module).__name__} has {module.num_experts} experts and no attribute "
                "`dispatcher`, so every rank would keep them all: wrap it in ep_dispatch.ExpertParallelGroupedExperts, "
                "or call shard_experts on the parts of the model that are to be split"
            )
    if require_experts and not any(_stacked_parameters(module) for module in stacks.values()):
        raise ExpertShardingError(
            "the model has no expert stack: no module with attributes `num_experts` and `dispatcher` and parameters "
            "[num_experts, ...]; wrap other experts in ep_dispatch.ExpertParallelGroupedExperts, or say "
            "require_experts = False where a model need not have any"
        )
    for path, module in stacks.items():
        try:
            chunk_size(module.num_experts, degree)  # type: ignore[arg-type]  # an int, by how it was found
        except ExpertShardingError as error:
            raise ExpertShardingError(f"{path or 'the model'}: {error}") from None
        stacked = dict(_stacked_parameters(module))
        for name, parameter in module.named_parameters(path, recurse=False):
            if isinstance(parameter, DTensor):
                raise ExpertShardingError(f"{name} is sharded already, over {parameter.device_mesh}")
            if name.rpartition(".")[2] not in stacked:
                raise ExpertShardingError(
                    f"{name} is {list(parameter.shape)}: every parameter of an expert stack must be "
                    f"[{module.num_experts}, ...], others would be trained by each rank apart; move it elsewhere"
                )


def _shard(parameter: nn.Parameter, ep_mesh: "DeviceMesh") -> nn.Parameter:
    degree, rank = ep_mesh.size(), ep_mesh.get_local_rank()
    # a copy, so that the memory of the other ranks' experts is freed
    local = torch.chunk(parameter.detach(), degree)[rank].clone(memory_format=torch.contiguous_format)
    stride = torch.empty(parameter.shape, device="meta").stride()
    placed = DTensor.from_local(local, ep_mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=stride)
    return nn.Parameter(placed, requires_grad=parameter.requires_grad)


class ExpertParallelGroupedExperts(nn.Module):
    """Runs any `experts(hidden [T, D], expert_ids [T, K], expert_weights [T, K]) -> [T, D]` expert-parallel.

    That is the interface of the stacked experts of transformers 5, among others. The wrapper takes over the
    module's own parameters under their names, so a state dict does not change when the wrapper stands where the
    module stood. On its rank the module sees an expert stack of e experts, rows in the order of the experts, K = 1
    and weights of 1; the weights are applied at home, in fp32.

    The module must hold its experts in own parameters [E, ...], read them anew in each forward, and treat rows apart.

    Attributes: `num_experts` (E), `dispatcher`, and the module's parameters.
    """

    _experts: nn.Module

    def __init__(
        self, experts: nn.Module, ep_mesh: "DeviceMesh | None" = None, *, num_experts: int | None = None
    ) -> None:
        """
        Args:
            experts: its parameters move into the wrapper.
            ep_mesh: shard right away; left out, `shard_experts` of the whole model does it.
            num_experts: E, where the module has no attribute `num_experts`.

        Raises:
            ValueError: E is unknown, or parameters are not stacks [E, ...] of the module itself.
        """
        super().__init__()
        found = getattr(experts, "num_experts", None) if num_experts is None else num_experts
        if not isinstance(found, int):
            raise ValueError(f"{type(experts).__name__} has no attribute num_experts: give it as an argument")
        self.num_experts = found
        self.dispatcher: Any = LocalDispatcher()
        own = dict(experts.named_parameters())
        wrong = [name for name, p in own.items() if "." in name or p.dim() == 0 or p.shape[0] != found]
        if wrong or not own:
            raise ValueError(
                f"{type(experts).__name__}: parameters must be stacks [{found}, ...] of the module itself; "
                f"these are not: {', '.join(wrong) or '(it has none)'}"
            )
        for name, parameter in own.items():
            del experts._parameters[name]
            self.register_parameter(name, parameter)
        # not a child: the parameters are the wrapper's, and their names stay as they were
        object.__setattr__(self, "_experts", experts)
        if ep_mesh is not None:
            shard_experts(self, ep_mesh)

    def forward(
        self,
        hidden: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> Tensor:
        """[T, D], [T, K] int64 (E sends nothing), [T, K] -> [T, D] in hidden's dtype.

        Raises:
            ValueError: the shapes do not fit together, or an id is not in 0..E.
        """
        if expert_weights.shape != expert_ids.shape:
            raise ValueError(
                f"expert_ids {tuple(expert_ids.shape)} and expert_weights {tuple(expert_weights.shape)} must be [T, K]"
            )
        dispatched = self.dispatcher.dispatch(hidden, expert_ids, self.num_experts)
        if meanwhile is not None:
            meanwhile()
        dispatched = dispatched.wait()
        counts, rows = dispatched.tokens_per_expert, dispatched.rows
        weights = {name: _local(parameter) for name, parameter in self.named_parameters(recurse=False)}
        out = _IntoGraph.apply(self._run(rows, counts, weights), *weights.values())
        return self.dispatcher.combine(out, expert_weights, dispatched.handle).to(hidden.dtype)

    def _run(self, rows: Tensor, counts: Tensor, weights: dict[str, Tensor]) -> Tensor:
        if rows.shape[0] == 0:
            return rows
        # rows past the last expert's belong to no expert: they go through the first and are dropped after
        ends = counts.cumsum(0)
        index = torch.arange(rows.shape[0], device=rows.device)
        ids = torch.searchsorted(ends, index, right=True)
        past = (index >= ends[-1]).unsqueeze(1)
        with self._lent(weights, counts.shape[0]) as experts:
            out = experts(
                torch.where(past, 0, rows),
                ids.where(~past.squeeze(1), 0).unsqueeze(1),
                rows.new_ones(rows.shape[0], 1),
            )
        return torch.where(past, 0, out)

    @contextmanager
    def _lent(self, weights: dict[str, Tensor], local_experts: int) -> Iterator[nn.Module]:
        """The module with this rank's stacks as its own."""
        experts: Any = self._experts
        known = "num_experts" in vars(experts)
        experts.training = self.training
        try:
            for name, weight in weights.items():
                object.__setattr__(experts, name, weight)
            if known:
                experts.num_experts = local_experts
            yield experts
        finally:
            for name in weights:
                vars(experts).pop(name, None)
            if known:
                experts.num_experts = self.num_experts

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]  # untyped in nn.Module
        self._experts._apply(fn)  # its buffers
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"{type(self._experts).__name__}, num_experts={self.num_experts}"


class _IntoGraph(torch.autograd.Function):
    """The output, depending on all weights: idle experts get gradients of zero, not None."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros_like(weight) for weight in ctx.saved_tensors)


def _local(weight: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return weight
    gradient = [Partial() if isinstance(p, Replicate) else p for p in weight.placements]
    return weight.to_local(grad_placements=gradient)

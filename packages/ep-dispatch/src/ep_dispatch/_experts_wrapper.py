"""Expert parallelism for an experts module that knows nothing of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate

from ep_dispatch._local import LocalDispatcher
from ep_dispatch._shard import shard_experts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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

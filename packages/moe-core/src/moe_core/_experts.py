"""The experts of a layer: feed-forward networks stacked in two parameters, and the way to them on one rank."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate

from moe_core import _grouped_gemm
from moe_core._numerics import autocast_dtype, elementwise, local_tensor, wide_dtype, without_autocast

if TYPE_CHECKING:
    from moe_core.plugins.kinds import Dispatcher

Activation = Callable[[Tensor], Tensor]


def relu2(rows: Tensor) -> Tensor:
    """max(x, 0)^2 (Primer)."""
    return F.relu(rows).square()


_ACTIVATIONS: dict[str, Activation] = {
    # these two are made of operations that round correctly, so the same in vectors and alone
    "relu2": relu2,
    "relu": F.relu,
    "silu": partial(elementwise, F.silu),
    "gelu": partial(elementwise, F.gelu),
    "gelu_tanh": partial(elementwise, partial(F.gelu, approximate="tanh")),
    "sigmoid": partial(elementwise, torch.sigmoid),
    "tanh": partial(elementwise, torch.tanh),
}


def activation_function(activation: str | Activation) -> Activation:
    """The function that works on [R, F], by its name or as it is (elementwise)."""
    if not isinstance(activation, str):
        return partial(elementwise, activation)
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation = {activation!r}: must be a callable or one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


class GroupedExperts(nn.Module):
    """E experts y = down(activation(up(x))), gated: down(activation(gate(x)) * up(x)); SwiGLU is
    `activation="silu", gated=True`. No biases.

    Attributes:
        up_proj: [E, F, D] parameter; if gated instead `gate_up_proj` [E, 2F, D], the F gate rows first.
        down_proj: [E, D, F] parameter.
        num_experts: E of the whole layer. Under expert parallelism the parameters are `Shard(0)` DTensors of
            the same global shapes, and `dispatcher` brings the tokens.
        dispatcher: see `moe_core.plugins.kinds.Dispatcher`; None: all experts are on this rank.
    """

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        *,
        activation: str | Activation = "relu2",
        gated: bool = False,
        grouped_gemm: str | Callable[..., Tensor] = "auto",
        dispatcher: "Dispatcher | None" = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            dim: D; hidden_dim: F.
            activation: a name ("relu2", "silu", "gelu", ...) or an elementwise callable.
            grouped_gemm: "grouped_mm", "loop", "auto" (by case), or a callable of the component kind
                `grouped_gemm`.
        """
        super().__init__()
        for key, value in {"num_experts": num_experts, "dim": dim, "hidden_dim": hidden_dim}.items():
            if value < 1:
                raise ValueError(f"{key} = {value}: must be at least 1")
        self.num_experts, self.dim, self.hidden_dim, self.gated = num_experts, dim, hidden_dim, gated
        self.activation = activation_function(activation)
        self.grouped_gemm = _grouped_gemm.resolve(grouped_gemm)
        self.dispatcher = dispatcher
        rows = 2 * hidden_dim if gated else hidden_dim
        name = "gate_up_proj" if gated else "up_proj"
        self.register_parameter(name, nn.Parameter(torch.empty(num_experts, rows, dim, device=device, dtype=dtype)))
        self.down_proj = nn.Parameter(torch.empty(num_experts, dim, hidden_dim, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def input_projection(self) -> nn.Parameter:
        """`gate_up_proj` or `up_proj`, whichever there is."""
        return self.get_parameter("gate_up_proj" if self.gated else "up_proj")

    def reset_parameters(self) -> None:
        self.init_weights(self.dim**-0.5, self.hidden_dim**-0.5)

    @torch.no_grad()
    def init_weights(self, std: float, down_std: float | None = None, generator: torch.Generator | None = None) -> None:
        """N(0, std), the down projections N(0, down_std); drawn in fp32 and cast, expert by expert.

        The draws are of all E experts in order, and what is not on this rank is dropped: a generator on the
        same device with the same seed gives the same global stack under every layout that cuts it by experts,
        with expert parallelism, FSDP, replicas or all of them. Collective where the weights are sharded.

        Raises:
            ValueError: the weights are cut along another dim than that of the experts.
        """
        down_std = std if down_std is None else down_std
        for weight, deviation in ((self.input_projection, std), (self.down_proj, down_std)):
            _draw(weight, deviation, generator)

    def forward(
        self,
        hidden: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> Tensor:
        """hidden [T, D], expert_ids [T, K] int64, expert_weights [T, K] -> [T, D] in hidden's dtype.

        The id E (`num_experts`) sends a token nowhere. `meanwhile` is called while the tokens travel.

        Raises:
            ValueError: the shapes do not fit together, or hidden and weights differ in dtype.
            ValueError or RuntimeError, by the dispatcher: an id is not in 0..E.
        """
        self._check_shapes(hidden, expert_ids, expert_weights)
        dtype, device_type = hidden.dtype, hidden.device.type
        up, down = local_tensor(self.input_projection), local_tensor(self.down_proj)
        compute = autocast_dtype(device_type)
        if compute is not None:
            hidden, up, down = hidden.to(compute), up.to(compute), down.to(compute)
        _grouped_gemm.check_dtypes(hidden, up)  # before rows travel
        dispatcher = self.dispatcher or LocalDispatch()
        dispatched = dispatcher.dispatch(hidden, expert_ids, self.num_experts)
        if meanwhile is not None:
            meanwhile()
        dispatched = dispatched.wait()
        with without_autocast(device_type):
            rows = self._run_experts(dispatched, up, down)
            return dispatcher.combine(rows, expert_weights, dispatched.handle).to(dtype)

    def _check_shapes(self, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> None:
        tokens = hidden.shape[0]
        fits = hidden.shape == (tokens, self.dim) and expert_ids.dim() == 2 and expert_ids.shape[0] == tokens
        if not fits or expert_weights.shape != expert_ids.shape:
            raise ValueError(
                f"hidden {tuple(hidden.shape)}, expert_ids {tuple(expert_ids.shape)} and expert_weights "
                f"{tuple(expert_weights.shape)} must be [T, {self.dim}], [T, K] and [T, K]"
            )

    def _run_experts(self, dispatched: Any, up: Tensor, down: Tensor) -> Tensor:
        multiply = self._bind_gemm(dispatched, up, down)
        inner = multiply(dispatched.rows, up)
        if self.gated:
            gate, inner = inner.chunk(2, dim=-1)
            return multiply(self.activation(gate) * inner, down)
        return multiply(self.activation(inner), down)

    def _bind_gemm(self, dispatched: Any, up: Tensor, down: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        counts = dispatched.tokens_per_expert
        gemm = self.grouped_gemm or _grouped_gemm.pick(dispatched.rows, up, down)
        if gemm not in (_grouped_gemm.grouped_mm, _grouped_gemm.loop):
            return lambda rows, weight: gemm(rows, weight, counts)
        exact = getattr(dispatched, "exact", False)
        host_counts = getattr(dispatched, "host_tokens_per_expert", None)
        if host_counts is None and gemm is _grouped_gemm.loop and not dispatched.rows.is_meta:
            host_counts = counts.to("cpu")  # once for both products
        return lambda rows, weight: gemm(rows, weight, counts, exact=exact, host_counts=host_counts)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, dim={self.dim}, hidden_dim={self.hidden_dim}, gated={self.gated}"


def _draw(weight: Tensor, deviation: float, generator: torch.Generator | None) -> None:
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    if local.is_meta:
        return
    place = {expert: index for index, expert in enumerate(_owned_rows(weight))}
    for expert in range(weight.shape[0]):
        drawn = torch.empty(weight.shape[1:], dtype=torch.float32, device=local.device)
        drawn.normal_(0.0, deviation, generator=generator)
        if expert in place:
            local[place[expert]].copy_(drawn)


def _owned_rows(weight: Tensor) -> list[int]:
    """The rows of the whole weight that this rank holds, in the order in which they lie in its shard.

    Collective for a DTensor: each rank marks its rows, and looks for its marks in the whole. How nested shardings
    cut a dim (FSDP's of a stack that is sharded over experts already, evenly or not) is thus left to torch.

    Raises:
        ValueError: the weight is cut along another dim than its first, or holds parts of a sum.
    """
    if not isinstance(weight, DTensor):
        return list(range(weight.shape[0]))
    for placement in weight.placements:
        if getattr(placement, "dim", None) != 0 and not isinstance(placement, Replicate):
            raise ValueError(
                f"a weight placed as {weight.placements} cannot be drawn row by row: only its first dim may be sharded"
            )
    local, mesh = weight.to_local(), weight.device_mesh
    first_mark = torch.distributed.get_rank() * weight.shape[0]
    marks = torch.arange(first_mark, first_mark + local.shape[0], device=local.device)
    shape = weight.shape[:1]
    whole = DTensor.from_local(marks, mesh, weight.placements, run_check=False, shape=shape, stride=(1,)).full_tensor()
    rows = {mark: row for row, mark in enumerate(whole.tolist())}
    return [rows[mark] for mark in marks.tolist()]


class LocalHandle(NamedTuple):
    """How rows and tokens correspond."""

    token: Tensor
    """[T*K] int64: the token of each row."""
    place: Tensor
    """[T*K] int64: where each row's token and choice stand in the flattened [T, K]."""
    row: Tensor
    """[T, K] int64: the row of each token's choices."""


class LocalDispatched(NamedTuple):
    """Complete at once. Rows of masked choices lie past the last expert's."""

    rows: Tensor
    tokens_per_expert: Tensor
    handle: LocalHandle

    def wait(self) -> "LocalDispatched":
        return self


class LocalDispatch:
    """Tokens to experts that are all on this rank, and back: what `GroupedExperts` does without a dispatcher.

    Rows lie sorted by (expert, token, place in K), stably, and every sum over a token's K copies is taken in
    fp32 in the order of K; so the result never depends on how a kernel orders its additions.
    """

    def dispatch(self, hidden: Tensor, expert_ids: Tensor, num_experts: int) -> LocalDispatched:
        """[T, D], [T, K] int64 in 0..E (E sends nothing) -> rows [T*K, D]; no host sync.

        Raises:
            RuntimeError: an id is not in 0..E; without a host sync, so on an accelerator when it gets there.
        """
        ids = expert_ids.flatten()
        sorted_ids, place = torch.sort(ids, stable=True)
        row = torch.empty_like(place).index_copy_(0, place, torch.arange(len(place), device=place.device))
        handle = LocalHandle(place // max(expert_ids.shape[1], 1), place, row.view_as(expert_ids))
        bounds = torch.searchsorted(sorted_ids, torch.arange(num_experts + 2, device=ids.device))
        valid = (bounds[0] == 0) & (bounds[-1] == len(ids))
        torch._assert_async(valid, f"expert_ids must be in 0..num_experts = {num_experts}")
        return LocalDispatched(_Gather.apply(hidden, handle), bounds[:-1].diff(), handle)

    def combine(self, rows: Tensor, expert_weights: Tensor, handle: LocalHandle) -> Tensor:
        """[T*K, D], [T, K] -> [T, D] in the rows' dtype."""
        return _WeightedSum.apply(rows, expert_weights, handle)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, handle: LocalHandle) -> Tensor:
        ctx.row = handle.row
        return hidden.index_select(0, handle.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_over_choices(grad, ctx.row).to(grad.dtype), None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, expert_weights: Tensor, handle: LocalHandle) -> Tensor:
        ctx.save_for_backward(rows, expert_weights)
        ctx.handle = handle
        return _sum_over_choices(rows, handle.row, expert_weights).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, expert_weights = ctx.saved_tensors
        handle: LocalHandle = ctx.handle
        wide = wide_dtype(rows)
        per_row = grad.index_select(0, handle.token).to(wide)
        weight = expert_weights.flatten().index_select(0, handle.place).to(wide)
        grad_rows = (per_row * weight.unsqueeze(1)).to(rows.dtype)
        grad_weight = (per_row * rows).sum(-1).index_select(0, handle.row.flatten())
        return grad_rows, grad_weight.view_as(expert_weights).to(expert_weights.dtype), None


def _sum_over_choices(rows: Tensor, row: Tensor, weight: Tensor | None = None) -> Tensor:
    """rows [R, D], row [T, K] -> [T, D]: the sum over k, in order, of (weight[t, k] *) rows[row[t, k]].

    In fp32, or the rows' dtype if that is wider.
    """
    total = rows.new_zeros(row.shape[0], rows.shape[1], dtype=wide_dtype(rows))
    for k in range(row.shape[1]):
        term = rows.index_select(0, row[:, k]).to(total.dtype)
        # multiplied and added apart: a fused multiply-add may be used for some elements only
        total += term if weight is None else term * weight[:, k : k + 1].to(total.dtype)
    return total

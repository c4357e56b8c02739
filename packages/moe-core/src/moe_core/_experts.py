"""The experts of a layer: feed-forward networks stacked in two parameters."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_core import _activation, _grouped_gemm
from moe_core._autocast import autocast_dtype, without_autocast
from moe_core._local_dispatch import LocalDispatch
from moe_core._local_tensor import local_tensor, owned_rows

if TYPE_CHECKING:
    from moe_core.plugins.kinds import Dispatcher


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
        activation: str | _activation.Activation = "relu2",
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
        self.activation = _activation.resolve(activation)
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
    place = {expert: index for index, expert in enumerate(owned_rows(weight))}
    for expert in range(weight.shape[0]):
        drawn = torch.empty(weight.shape[1:], dtype=torch.float32, device=local.device)
        drawn.normal_(0.0, deviation, generator=generator)
        if expert in place:
            local[place[expert]].copy_(drawn)

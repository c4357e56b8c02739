"""The mixture-of-experts layer: router, routed experts, shared expert."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from moe_core._experts import Activation, GroupedExperts, activation_function
from moe_core._moe_config import MoEConfig
from moe_core._numerics import Linear
from moe_core._router import Routing, TopKRouter


class SharedExpert(nn.Module):
    """The expert that every token passes: down(activation(up(x))), or down(activation(gate(x)) * up(x)).

    Attributes: `up_proj` Linear D -> F, `down_proj` Linear F -> D, if gated `gate_proj` Linear D -> F; no biases.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: str | Activation = "relu2",
        gated: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation_function(activation)
        if gated:
            self.gate_proj = Linear(dim, hidden_dim, device=device, dtype=dtype)
        self.up_proj = Linear(dim, hidden_dim, device=device, dtype=dtype)
        self.down_proj = Linear(hidden_dim, dim, device=device, dtype=dtype)
        self.gated = gated

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        inner = self.up_proj(hidden)
        inner = self.activation(self.gate_proj(hidden)) * inner if self.gated else self.activation(inner)
        return self.down_proj(inner)

    def init_weights(self, std: float, down_std: float | None = None, generator: torch.Generator | None = None) -> None:
        """N(0, std), the down projection N(0, down_std). The weights must not be sharded."""
        for name, linear in self.named_children():
            deviation = down_std or std if name == "down_proj" else std
            nn.init.normal_(linear.weight, 0.0, deviation, generator=generator)  # type: ignore[arg-type]  # children are Linear


class MoE(nn.Module):
    """y = sum over a token's K experts of weight * expert(x), plus the shared expert's output, unscaled.

    The shared expert is computed while the tokens travel to their experts.

    Attributes: `router` (`TopKRouter`), `experts` (`GroupedExperts`), `shared_experts` (`SharedExpert`, or
    None where `shared_hidden_dim` is 0).
    """

    def __init__(
        self,
        config: MoEConfig | None = None,
        *,
        dispatcher: Any = None,
        activation: str | Activation | None = None,
        grouped_gemm: str | Callable[..., Tensor] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        """
        Args:
            config: the layer; or its fields as keyword arguments, or both, the arguments then replacing fields.
            activation, grouped_gemm: as in the config, or callables.
            dtype: of the experts; the router is fp32.

        Raises:
            ValueError: the numbers do not fit together.
        """
        super().__init__()
        config = MoEConfig(**fields) if config is None else attrs.evolve(config, **fields)
        self.config = config
        activation = activation or config.activation
        self.router = TopKRouter(
            config.dim,
            config.num_experts,
            config.top_k,
            score=config.score,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            normalize=config.normalize,
            scale=config.scale,
            selection_bias=config.selection_bias,
            forced_balance=config.forced_balance,
            device=device,
        )
        self.experts = GroupedExperts(
            config.num_experts,
            config.dim,
            config.hidden_dim,
            activation=activation,
            gated=config.gated,
            grouped_gemm=grouped_gemm or config.grouped_gemm,
            dispatcher=dispatcher,
            device=device,
            dtype=dtype,
        )
        self.shared_experts: SharedExpert | None = None
        if config.shared_hidden_dim:
            self.shared_experts = SharedExpert(
                config.dim,
                config.shared_hidden_dim,
                activation=activation,
                gated=config.gated,
                device=device,
                dtype=dtype,
            )

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """hidden [..., D], padding_mask [...] bool (True: padding, its output is 0) -> [..., D] in hidden's dtype."""
        return self.forward_with_routing(hidden, padding_mask)[0]

    def forward_with_routing(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Routing]:
        """As `forward`; also what the router decided, for auxiliary losses."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        routing: Routing = self.router(tokens, None if padding_mask is None else padding_mask.reshape(-1))
        shared: list[Tensor] = []

        def run_shared() -> None:
            if self.shared_experts is not None:
                shared.append(self.shared_experts(tokens))

        out = self.experts(tokens, routing.expert_ids, routing.expert_weights, meanwhile=run_shared)
        for extra in shared:
            if padding_mask is not None:
                extra = torch.where(padding_mask.reshape(-1, 1), 0, extra)
            out = out + extra
        return out.view_as(hidden), routing

    def init_weights(self, std: float, down_std: float | None = None, generator: torch.Generator | None = None) -> None:
        """N(0, std), the down projections N(0, down_std), router bias and counts 0; see the parts' own methods."""
        self.router.init_weights(std, generator)
        self.experts.init_weights(std, down_std, generator)
        if self.shared_experts is not None:
            self.shared_experts.init_weights(std, down_std, generator)

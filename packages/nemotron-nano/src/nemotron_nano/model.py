"""Nemotron-3 Nano: a decoder of Mamba-2, attention and mixture-of-experts layers.

What is notable:
- every layer is one mixer, x <- x + mixer(rmsnorm(x)), and a string says which: M Mamba-2, E mixture of
  experts, * attention, - dense MLP;
- no positional encoding (Mamba knows the order), no biases but the convolution's, untied embedding and head;
- experts and MLPs are not gated: down(relu(up(x))^2);
- the router scores with a sigmoid, chooses with a bias that carries no gradient, weights without it;
- Mamba's A, D and dt_bias stay in fp32, whatever the rest of the model is cast to.

Letters: B sequences, S tokens, D model dim, V vocabulary; H Mamba heads of P channels, G groups that share B and
C, N state size. Parameters are named as in the released checkpoints, but for `mixer.ssm` (on disk directly
under `mixer`), `router` (`gate`) and the experts, which are one stack.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core import MoE, MoEConfig, Routing, router_z_loss, sequence_balance_loss
from nemotron_nano.costs import flops_per_token
from nemotron_nano.initialization import init_weights
from nemotron_nano.mamba.conv import causal_conv_silu
from nemotron_nano.mamba.kernels import MambaKernels, kernel_faults, require_packages
from nemotron_nano.mamba.ssd import number_runs, ssd_scan, ssd_step
from nemotron_nano.model_config import Fault, NemotronNanoConfig, NemotronNanoConfigError


class LayerState:
    """What one layer remembers of the tokens so far, so that the next one costs a single step."""

    conv: Tensor | None = None
    """Mamba: [B, conv_kernel - 1, channels] fp32, the last inputs of the convolution."""
    ssm: Tensor | None = None
    """Mamba: [B, H, P, N] fp32, the state of the recurrence."""
    keys: Tensor | None = None
    """Attention: [B, key heads, tokens, head_dim], as `values`."""
    values: Tensor | None = None


class NemotronNano(nn.Module):
    """The language model.

    On the meta device its weights come later, through `to_empty` and `init_weights(seed)`; on any other they
    are drawn at once, from torch's current seed.

    Args:
        grouped_gemm: the experts' matrix product, as `moe_core.GroupedExperts` takes it.
        mamba_kernels: "cuda" runs Mamba's convolution and scan by causal-conv1d and mamba-ssm instead of plain torch.
        dtype: of all parameters except those that stay in fp32 (the router's, and Mamba's A, D and dt_bias).

    Raises:
        NemotronNanoConfigError: kernels that cannot run this model, or not here.
    """

    def __init__(
        self,
        config: NemotronNanoConfig,
        *,
        grouped_gemm: Any = "auto",
        mamba_kernels: MambaKernels = "torch",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        _check_kernels(config, mamba_kernels, **factory)
        self.backbone = Backbone(config, grouped_gemm, mamba_kernels, **factory)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **factory)
        self._auxiliary: list[Tensor] = []
        if not self.lm_head.weight.is_meta:
            self.init_weights(torch.initial_seed())

    def forward(
        self,
        tokens: Tensor,
        *,
        document_ids: Tensor | None = None,
        return_hidden: bool = False,
        cache: Sequence[LayerState] | None = None,
    ) -> Tensor:
        """tokens [B, S] int64 -> logits [B, S, V] fp32, or with `return_hidden` the head's input [B, S, D].

        Args:
            document_ids: [B, S] integers; a document is a run of equal ones, and convolution, state and
                attention never cross its borders. None: one document a row.
            cache: from `new_cache()`: `tokens` continue those that it has seen, and are added to it. Not
                together with `document_ids`.
        """
        if document_ids is not None and cache is not None:
            raise ValueError("document_ids with a cache: packed documents cannot be continued; pass one of the two")
        segments = None if document_ids is None else number_runs(document_ids)
        hidden, self._auxiliary = self.backbone(tokens, segments, cache)
        return hidden if return_hidden else _fp32(self.lm_head(hidden))

    def auxiliary_losses(self) -> dict[str, Tensor]:
        """What the last forward pass in training mode adds to the loss, weighted, by name; taken once.

        Each is a sum over this rank's tokens, [] fp32 with a graph, to be divided by the denominator that the
        cross entropy is divided by. Empty where the config's coefficients are 0.
        """
        weights = {"balance": self.config.aux_loss_coefficient, "router_z": self.config.z_loss_coefficient}
        layers, self._auxiliary = self._auxiliary, []
        if not layers:
            return {}
        sums = torch.stack(layers).sum(0)
        return {name: weight * sums[i] for i, (name, weight) in enumerate(weights.items()) if weight}

    def flops_per_token(self, sequence_length: int) -> int:
        """As `nemotron_nano.flops_per_token`: what a trainer computes MFU from."""
        return flops_per_token(self.config, sequence_length)

    def new_cache(self) -> list[LayerState]:
        """An empty memory for `forward(..., cache=)`: one state per layer, filled in place."""
        return [LayerState() for _ in self.backbone.layers]

    def init_weights(self, seed: int) -> None:
        """Draw all weights in place from `seed` alone: the same global values under every layout."""
        init_weights(self, self.config, seed)


def _check_kernels(
    config: NemotronNanoConfig, kernels: MambaKernels, device: torch.device | str | None, dtype: torch.dtype | None
) -> None:
    faults = [*kernel_faults(config, kernels, torch.empty(0, device=device).device.type)]
    uses_cuda = kernels == "cuda" and "M" in config.pattern
    if uses_cuda and dtype == torch.float64:
        faults.append(Fault("mamba_kernels", kernels, "causal-conv1d and mamba-ssm take no float64; use 'torch'"))
    if faults:
        raise NemotronNanoConfigError(faults)
    if uses_cuda:
        require_packages()


class Backbone(nn.Module):
    """Embedding, layers, final norm: tokens [B, S] -> hidden [B, S, D], and the layers' auxiliary losses."""

    def __init__(
        self, config: NemotronNanoConfig, grouped_gemm: Any, mamba_kernels: MambaKernels, **factory: Any
    ) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, **factory)
        self.layers = nn.ModuleList(
            Layer(config, letter, grouped_gemm, mamba_kernels, **factory) for letter in config.pattern
        )
        self.norm_f = RMSNorm(config.hidden_size, config.norm_eps, **factory)

    def forward(
        self, tokens: Tensor, segments: Tensor | None, cache: Sequence[LayerState] | None
    ) -> tuple[Tensor, list[Tensor]]:
        x, auxiliary = self.embeddings(tokens), []
        for i, layer in enumerate(self.layers):
            x = layer(x, segments, None if cache is None else cache[i])
            if isinstance(x, tuple):
                x, losses = x
                auxiliary.append(losses)
        return self.norm_f(x), auxiliary


class Layer(nn.Module):
    """x <- x + mixer(rmsnorm(x)), with the mixer that the letter names.

    A MoE layer that has auxiliary losses returns them beside x in training mode: sums over tokens, [2] fp32.
    They are an output, so that activation checkpointing and FSDP treat them as one.
    """

    def __init__(
        self,
        config: NemotronNanoConfig,
        letter: str,
        grouped_gemm: Any,
        mamba_kernels: MambaKernels = "torch",
        **factory: Any,
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, **factory)
        self.mixes_tokens = letter in "M*"
        self.has_losses = letter == "E" and config.aux_loss_coefficient + config.z_loss_coefficient > 0
        self.mixer: Any
        if letter == "M":
            self.mixer = Mamba2(config, mamba_kernels, **factory)
        elif letter == "*":
            self.mixer = Attention(config, **factory)
        elif letter == "E":
            self.mixer = MoE(_moe_config(config), grouped_gemm=grouped_gemm, **factory)
        else:
            self.mixer = MLP(config.hidden_size, config.mlp_hidden_size, **factory)

    def forward(
        self, x: Tensor, segments: Tensor | None = None, state: LayerState | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if self.mixes_tokens:
            return x + self.mixer(self.norm(x), segments, state)
        if self.has_losses and self.training:
            out, routing = self.mixer.forward_with_routing(self.norm(x))
            return x + out, _router_losses(routing, x.shape)
        return x + self.mixer(self.norm(x))


def _moe_config(config: NemotronNanoConfig) -> MoEConfig:
    return MoEConfig(
        dim=config.hidden_size,
        num_experts=config.num_experts,
        top_k=config.top_k,
        hidden_dim=config.expert_hidden_size,
        shared_hidden_dim=config.shared_expert_hidden_size,
        activation="relu2",
        score="sigmoid",
        num_groups=config.router_num_groups,
        top_groups=config.router_top_groups,
        normalize=config.normalize_top_k,
        scale=config.routed_scaling_factor,
    )


def _router_losses(routing: Routing, shape: torch.Size) -> Tensor:
    """Sequence balance loss and z-loss of one layer, summed over the tokens of x [B, S, D]: [2] fp32."""
    logits, expert_ids = (t.unflatten(0, shape[:2]) for t in (routing.logits, routing.expert_ids))
    balance = sequence_balance_loss(logits, expert_ids, score="sigmoid", reduction="sum")
    return torch.stack([balance, router_z_loss(logits, reduction="sum")])


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dimension, computed in fp32."""

    def __init__(self, dim: int, eps: float, **factory: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, **factory))

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(_fp32(x), self.weight.shape, _fp32(self.weight), self.eps)
        return normed.to(x.dtype)


class Mamba2(nn.Module):
    """A selective state space: each head keeps a state [P, N] that decays, and that tokens write to and read.

    1. in_proj gives z (the gate), u, B, C and dt for each token;
    2. a short causal convolution and SiLU mix u, B, C with the three tokens before;
    3. the recurrence S_t = exp(dt A) S_{t-1} + dt u (x) B, y = S_t C + D u, in fp32 (see `StateSpace`);
    4. y is gated with silu(z), *then* normed, in G groups of channels;
    5. out_proj.

    Source: Dao and Gu, "Transformers are SSMs" (2024).
    """

    def __init__(self, config: NemotronNanoConfig, kernels: MambaKernels, **factory: Any) -> None:
        super().__init__()
        inner, conv, heads = config.mamba_hidden_size, config.conv_channels, config.mamba_num_heads
        groups, states = config.mamba_num_groups, config.ssm_state_size
        self.heads, self.groups = heads, groups
        self.of_token = [inner, conv, heads]  # z | u, B, C | dt
        self.of_conv = [inner, groups * states, groups * states]  # u | B | C
        self.in_proj = nn.Linear(config.hidden_size, sum(self.of_token), bias=False, **factory)
        self.conv1d = CausalConv1d(self.of_conv, config.conv_kernel, kernels, **factory)
        self.ssm = StateSpace(heads, config.chunk_size, kernels, device=factory.get("device"))
        self.norm = GatedRMSNorm(inner, groups, config.norm_eps, **factory)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False, **factory)

    def forward(self, x: Tensor, segments: Tensor | None = None, state: LayerState | None = None) -> Tensor:
        z, mixed, dt = self.in_proj(x).split(self.of_token, dim=-1)
        u, B, C = self.conv1d(mixed, segments, state)
        u = u.unflatten(-1, (self.heads, -1))
        B, C = (t.unflatten(-1, (self.groups, -1)) for t in (B, C))
        y = self.ssm(u, dt, B, C, segments, state)
        return self.out_proj(self.norm(y.flatten(-2), z).to(x.dtype))


class CausalConv1d(nn.Module):
    """Depthwise convolution over the last `kernel` tokens, then SiLU: [B, S, channels] -> u, B and C, fp32."""

    def __init__(self, widths: list[int], kernel: int, kernels: MambaKernels, **factory: Any) -> None:
        super().__init__()
        self.widths, self.kernels = widths, kernels
        self.weight = nn.Parameter(torch.empty(sum(widths), 1, kernel, **factory))
        self.bias = nn.Parameter(torch.empty(sum(widths), **factory))

    def forward(self, x: Tensor, segments: Tensor | None = None, state: LayerState | None = None) -> tuple[Tensor, ...]:
        weight, bias = _fp32(self.weight.squeeze(1)), _fp32(self.bias)
        before = None if state is None else state.conv
        kernels = self.kernels
        if state is not None:
            state.conv = _last_inputs(before, _fp32(x), weight.shape[1] - 1)
            if x.shape[1] == 1:
                kernels = "torch"  # as the scan: one step is a few small operations
        return causal_conv_silu(x, weight, bias, self.widths, before=before, segments=segments, kernels=kernels)


def _last_inputs(before: Tensor | None, x: Tensor, count: int) -> Tensor:
    """The last `count` tokens of what came before and x [B, S, channels]; zeros where there are fewer."""
    joined = F.pad(x, (0, 0, count, 0)) if before is None else torch.cat([before, x], dim=1)
    return joined[:, joined.shape[1] - count :]


class StateSpace(nn.Module):
    """The recurrence of Mamba-2, with the three parameters that no precision policy may round.

    delta = softplus(dt + dt_bias), A = -exp(A_log), y_t = S_t C_t + D u_t; delta is never clamped.
    Parameters and computation stay in fp32: `.to(torch.bfloat16)` passes them by, and `keep_in_fp32`
    asks whoever shards the model to do the same.
    """

    keep_in_fp32 = True

    def __init__(
        self, heads: int, chunk_size: int, kernels: MambaKernels, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.chunk_size, self.kernels = chunk_size, kernels
        for name in ("A_log", "D", "dt_bias"):
            setattr(self, name, nn.Parameter(torch.empty(heads, device=device, dtype=torch.float32)))

    A_log: Tensor
    D: Tensor
    dt_bias: Tensor

    def forward(
        self,
        u: Tensor,
        dt: Tensor,
        B: Tensor,
        C: Tensor,
        segments: Tensor | None = None,
        state: LayerState | None = None,
    ) -> Tensor:
        """u [B, S, H, P], dt [B, S, H], B and C [B, S, G, N] -> y [B, S, H, P], fp32."""
        u, B, C = _fp32(u), _fp32(B), _fp32(C)
        delta = F.softplus(_fp32(dt) + self.dt_bias)
        A = -self.A_log.exp()
        before = None if state is None else state.ssm
        if before is not None and u.shape[1] == 1:
            y, after = ssd_step(before, u[:, 0], delta[:, 0], A, B[:, 0], C[:, 0])
            y = y.unsqueeze(1)
        else:
            options: dict[str, Any] = {"chunk_size": self.chunk_size, "kernels": self.kernels}
            y, after = ssd_scan(u, delta, A, B, C, segments=segments, initial_state=before, **options)
        if state is not None:
            state.ssm = after
        return torch.addcmul(y, u, self.D.unsqueeze(-1))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        def at_least_fp32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype in (torch.bfloat16, torch.float16):
                return tensor.to(device=moved.device, dtype=torch.float32)
            return moved

        return super()._apply(at_least_fp32, recurse)


class GatedRMSNorm(nn.Module):
    """y * silu(z), then RMS norm over each group of channels, times weight; in fp32."""

    def __init__(self, dim: int, groups: int, eps: float, **factory: Any) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(dim, **factory))

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        gated = (_fp32(y) * F.silu(_fp32(z))).unflatten(-1, (self.groups, -1))
        normed = F.rms_norm(gated, gated.shape[-1:], eps=self.eps)
        return normed.flatten(-2) * _fp32(self.weight)


class Attention(nn.Module):
    """Causal attention with grouped key and value heads, and no positional encoding."""

    def __init__(self, config: NemotronNanoConfig, **factory: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False, **factory)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False, **factory)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False, **factory)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False, **factory)

    def forward(self, x: Tensor, segments: Tensor | None = None, state: LayerState | None = None) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, S, head_dim]
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if state is not None:
            if state.keys is not None and state.values is not None:
                k, v = torch.cat([state.keys, k], dim=2), torch.cat([state.values, v], dim=2)
            state.keys, state.values = k, v
        mask = _attention_mask(q.shape[2], k.shape[2], segments, x.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


def _attention_mask(queries: int, keys: int, segments: Tensor | None, device: torch.device) -> Tensor | None:
    """True where a query may look; None for plain causal attention among as many queries as keys."""
    if segments is None and queries == keys:
        return None
    causal = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    if segments is None:
        return causal
    return (causal & (segments.unsqueeze(-1) == segments.unsqueeze(-2))).unsqueeze(1)  # [B, 1, S, S]


class MLP(nn.Module):
    """down(relu(up(x))^2)."""

    def __init__(self, dim: int, hidden_dim: int, **factory: Any) -> None:
        super().__init__()
        self.up_proj = nn.Linear(dim, hidden_dim, bias=False, **factory)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


def _fp32(x: Tensor) -> Tensor:
    """In fp32, or in fp64 if it is that already."""
    return x if x.dtype == torch.float64 else x.float()

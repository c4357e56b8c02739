"""The sizes and choices of one MoE layer; needs no torch."""

from typing import Literal

import attrs

Score = Literal["sigmoid", "softmax", "softmax_topk"]


@attrs.frozen
class MoEConfig:
    """What `MoE` is built from."""

    dim: int = attrs.field(validator=attrs.validators.ge(1))
    """D, width of the hidden states."""
    num_experts: int = attrs.field(validator=attrs.validators.ge(1))
    """E, routed experts."""
    top_k: int = attrs.field(validator=attrs.validators.ge(1))
    """K, experts per token."""
    hidden_dim: int = attrs.field(validator=attrs.validators.ge(1))
    """F, inner width of a routed expert."""
    shared_hidden_dim: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Inner width of the shared expert that every token passes; 0: there is none."""
    activation: str = "relu2"
    """The experts' activation by name: relu2, relu, silu, gelu, gelu_tanh, sigmoid, tanh."""
    gated: bool = False
    """Gated experts, routed and shared: activation(gate(x)) * up(x)."""
    score: Score = "sigmoid"
    """Router scores: sigmoid, softmax over all experts, or softmax over the chosen ones."""
    num_groups: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Groups of consecutive experts that a choice is limited by."""
    top_groups: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """How many groups a token may choose from."""
    normalize: bool = True
    """Divide a token's weights by their sum. Of one weight (top_k = 1) that leaves 1, and the router untrained."""
    scale: float = 1.0
    """Factor on the weights, after normalisation."""
    selection_bias: bool = True
    """Have the router's bias for balancing without an auxiliary loss."""
    forced_balance: bool = False
    """Give experts out in turn, for benchmarks."""
    grouped_gemm: str = "auto"
    """Back end of the experts' products: auto, grouped_mm, loop."""

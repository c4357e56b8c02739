"""What a model costs, from its config alone and without torch: its parameters, and the arithmetic of a token."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from nemotron_nano.model_config import NemotronNanoConfig

BACKWARD = 2
"""A backward pass takes two products, by the input and by the weight, for each of the forward pass."""


class ParameterCount(NamedTuple):
    """Parameters of a model; buffers, such as the router's bias, are none."""

    total: int
    active: int
    """Those that one token meets: all but the experts that it is not sent to. Embedding and head count whole."""


def count_parameters(config: NemotronNanoConfig) -> ParameterCount:
    """Exactly what `NemotronNano(config)` holds, in microseconds."""
    outside = 2 * config.vocab_size * config.hidden_size + config.hidden_size  # embedding, head, final norm
    layers = sum(config.hidden_size + _PARAMETERS[letter](config) for letter in config.pattern)
    expert = 2 * config.hidden_size * config.expert_hidden_size
    idle = config.pattern.count("E") * (config.num_experts - config.top_k) * expert
    return ParameterCount(outside + layers, outside + layers - idle)


def flops_per_token(config: NemotronNanoConfig, sequence_length: int) -> int:
    """Floating-point operations of forward and backward for one token: what MFU is computed from.

    Matrix products alone, a multiply-add as two operations: projections, the K experts that the token goes to, the
    shared expert, router, attention, Mamba's scan, head. The embedding is a look-up and counts nothing, neither does
    what activation checkpointing computes again. A token attends to half of its sequence on average.

    Args:
        sequence_length: S, tokens of a row, none of them padding.
    """
    head = 2 * config.hidden_size * config.vocab_size
    layers = sum(layer_forward_flops(config, letter, sequence_length) for letter in config.pattern)
    return (1 + BACKWARD) * (head + layers)


def layer_forward_flops(config: NemotronNanoConfig, letter: str, sequence_length: int) -> int:
    """Of one token's forward pass through one layer, by the letter of its mixer."""
    return 2 * _MULTIPLY_ADDS[letter](config, sequence_length)


def _mamba_projections(config: NemotronNanoConfig) -> int:
    inner, conv, heads = config.mamba_hidden_size, config.conv_channels, config.mamba_num_heads
    return config.hidden_size * (inner + conv + heads) + inner * config.hidden_size


def _mamba_parameters(config: NemotronNanoConfig) -> int:
    convolution = config.conv_channels * (config.conv_kernel + 1)
    return _mamba_projections(config) + convolution + 3 * config.mamba_num_heads + config.mamba_hidden_size


def _mamba_products(config: NemotronNanoConfig, sequence_length: int) -> int:
    inner, chunk = config.mamba_hidden_size, min(config.chunk_size, sequence_length)
    # in a chunk: C B^T for each group, then its product with u for each head; from chunk to chunk: the state is
    # written once and read once
    scan = chunk * (config.mamba_num_groups * config.ssm_state_size + inner) + 2 * inner * config.ssm_state_size
    return _mamba_projections(config) + scan


def _attention_parameters(config: NemotronNanoConfig) -> int:
    return 2 * config.hidden_size * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)


def _attention_products(config: NemotronNanoConfig, sequence_length: int) -> int:
    scores_and_values = config.num_attention_heads * config.head_dim * sequence_length  # S / 2 keys each
    return _attention_parameters(config) + scores_and_values


def _moe_parameters(config: NemotronNanoConfig, experts: int | None = None) -> int:
    """With all experts, or with so many of them; the router always scores all."""
    hidden = (experts or config.num_experts) * config.expert_hidden_size + config.shared_expert_hidden_size
    return config.hidden_size * (2 * hidden + config.num_experts)


def _mlp_parameters(config: NemotronNanoConfig) -> int:
    return 2 * config.hidden_size * config.mlp_hidden_size


_PARAMETERS: Mapping[str, Callable[[NemotronNanoConfig], int]] = {
    "M": _mamba_parameters,
    "E": _moe_parameters,
    "*": _attention_parameters,
    "-": _mlp_parameters,
}
_MULTIPLY_ADDS: Mapping[str, Callable[[NemotronNanoConfig, int], int]] = {
    "M": _mamba_products,
    "E": lambda config, _: _moe_parameters(config, experts=config.top_k),
    "*": _attention_products,
    "-": lambda config, _: _mlp_parameters(config),
}

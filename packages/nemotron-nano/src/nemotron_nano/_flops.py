"""`flops_per_token`: the arithmetic that one token costs a model, from its config alone."""

from collections.abc import Callable, Mapping

from nemotron_nano.model_config import NemotronNanoConfig

BACKWARD = 2
"""A backward pass takes two products, by the input and by the weight, for each of the forward pass."""


def flops_per_token(config: NemotronNanoConfig, sequence_length: int) -> int:
    """Floating-point operations of forward and backward for one token: what MFU is computed from.

    Matrix products alone, a multiply-add as two operations: projections, the K experts that the token goes to, the
    shared expert, router, attention, Mamba's scan, head. The embedding is a look-up and counts nothing, neither does
    what activation checkpointing computes again. A token attends to half of its sequence on average.

    Args:
        sequence_length: S, tokens of a row, none of them padding.
    """
    return (1 + BACKWARD) * forward_flops_per_token(config, sequence_length)


def forward_flops_per_token(config: NemotronNanoConfig, sequence_length: int) -> int:
    head = 2 * config.hidden_size * config.vocab_size
    return head + sum(layer_forward_flops(config, letter, sequence_length) for letter in config.pattern)


def layer_forward_flops(config: NemotronNanoConfig, letter: str, sequence_length: int) -> int:
    """Of one layer, by the letter of its mixer."""
    return _FORWARD[letter](config, sequence_length)


def _mamba(config: NemotronNanoConfig, sequence_length: int) -> int:
    inner, conv, heads = config.mamba_hidden_size, config.conv_channels, config.mamba_num_heads
    projections = config.hidden_size * (inner + conv + heads) + inner * config.hidden_size
    chunk = min(config.chunk_size, sequence_length)
    # in a chunk: C B^T for each group, then its product with u for each head; from chunk to chunk: the state is
    # written once and read once
    scan = chunk * (config.mamba_num_groups * config.ssm_state_size + inner) + 2 * inner * config.ssm_state_size
    return 2 * (projections + scan)


def _attention(config: NemotronNanoConfig, sequence_length: int) -> int:
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    projections = config.hidden_size * (2 * queries + 2 * keys)
    return 2 * (projections + queries * sequence_length)  # scores and values, S / 2 keys each


def _moe(config: NemotronNanoConfig, sequence_length: int) -> int:
    hidden = config.top_k * config.expert_hidden_size + config.shared_expert_hidden_size
    return 2 * config.hidden_size * (2 * hidden + config.num_experts)


def _mlp(config: NemotronNanoConfig, sequence_length: int) -> int:
    return 4 * config.hidden_size * config.mlp_hidden_size


_FORWARD: Mapping[str, Callable[[NemotronNanoConfig, int], int]] = {
    "M": _mamba,
    "E": _moe,
    "*": _attention,
    "-": _mlp,
}

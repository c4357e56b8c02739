"""`count_parameters`: how many parameters a config has, from its numbers alone."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from nemotron_nano.model_config import NemotronNanoConfig


class ParameterCount(NamedTuple):
    """Parameters of a model; buffers, such as the router's bias, are none."""

    total: int
    active: int
    """Those that one token meets: all but the experts that it is not sent to. Embedding and head count whole."""


def count_parameters(config: NemotronNanoConfig) -> ParameterCount:
    """Exactly what `NemotronNano(config)` holds, in microseconds and without torch."""
    outside = 2 * config.vocab_size * config.hidden_size + config.hidden_size  # embedding, head, final norm
    layers = sum(config.hidden_size + _COUNTS[letter](config) for letter in config.pattern)
    idle = config.pattern.count("E") * (config.num_experts - config.top_k) * _expert(config)
    return ParameterCount(outside + layers, outside + layers - idle)


def _mamba(config: NemotronNanoConfig) -> int:
    inner, conv, heads = config.mamba_hidden_size, config.conv_channels, config.mamba_num_heads
    projections = config.hidden_size * (inner + conv + heads) + inner * config.hidden_size
    return projections + conv * (config.conv_kernel + 1) + 3 * heads + inner


def _attention(config: NemotronNanoConfig) -> int:
    return 2 * config.hidden_size * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)


def _moe(config: NemotronNanoConfig) -> int:
    shared = 2 * config.hidden_size * config.shared_expert_hidden_size
    return config.num_experts * (config.hidden_size + _expert(config)) + shared


def _expert(config: NemotronNanoConfig) -> int:
    return 2 * config.hidden_size * config.expert_hidden_size


def _mlp(config: NemotronNanoConfig) -> int:
    return 2 * config.hidden_size * config.mlp_hidden_size


_COUNTS: Mapping[str, Callable[[NemotronNanoConfig], int]] = {"M": _mamba, "E": _moe, "*": _attention, "-": _mlp}

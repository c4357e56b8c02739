"""Model configs by name, from one that trains on a laptop in a minute to the released one."""

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from nemotron_nano.model_config import NemotronNanoConfig

_NANO = NemotronNanoConfig(
    pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    vocab_size=131072,
    hidden_size=2688,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)

_TINY = NemotronNanoConfig(
    pattern="MEM*E",
    vocab_size=256,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    mamba_num_heads=8,
    mamba_head_dim=32,
    mamba_num_groups=2,
    ssm_state_size=32,
    chunk_size=32,
    num_experts=16,
    top_k=2,
    expert_hidden_size=128,
    shared_expert_hidden_size=256,
    mlp_hidden_size=256,
    initializer_range=0.08,
)

_SMALL = attrs.evolve(
    _TINY,
    pattern="MEM*EMEM*E",
    hidden_size=256,
    num_attention_heads=8,
    mamba_num_heads=16,
    mamba_num_groups=4,
    num_experts=32,
    top_k=4,
    expert_hidden_size=160,
    shared_expert_hidden_size=320,
    mlp_hidden_size=512,
    initializer_range=0.056,
)

presets: Mapping[str, NemotronNanoConfig] = MappingProxyType(
    {
        "tiny": _TINY,
        "small": _SMALL,
        "nano-16l": attrs.evolve(_NANO, pattern=_NANO.pattern[:16]),
        "nano-30b-a3b": _NANO,
    }
)
"""`tiny` (1.5M parameters) and `small` (13.5M) read bytes; `nano-16l` is the first 16 layers of `nano-30b-a3b`."""

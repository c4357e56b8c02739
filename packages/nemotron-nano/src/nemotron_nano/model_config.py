"""The shape of a model, checked; by name (`presets`), and from and to Hugging Face's `config.json`. No torch."""

import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import attrs

BLOCK_KINDS: Mapping[str, str] = {
    "M": "linear_attention",
    "E": "moe",
    "*": "full_attention",
    "-": "mlp",
}
"""A letter of the pattern, and what Hugging Face's `layers_block_type` calls it: Mamba-2, MoE, attention, MLP."""

_OLDER_KIND_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


class Fault(NamedTuple):
    """One thing wrong with a model config."""

    key: str
    value: object
    rule: str


class NemotronNanoConfigError(ValueError):
    """A model config that no model can be built from; `faults` has every rule that it breaks."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("; ".join(f"{fault.key} = {fault.value!r}: {fault.rule}" for fault in faults))
        self.faults = faults


@attrs.frozen(kw_only=True)
class NemotronNanoConfig:
    """The shape of a Nemotron-Nano model: every layer is one mixer, and `pattern` says which.

    Raises:
        NemotronNanoConfigError: on values that do not go together; names all of them.
    """

    pattern: str
    """One letter a layer: M Mamba-2, E mixture of experts, * attention, - dense MLP."""
    vocab_size: int
    hidden_size: int
    """D, the width of the residual stream."""
    norm_eps: float = 1e-5

    num_attention_heads: int = 32
    num_key_value_heads: int = 2
    """Each serves num_attention_heads / num_key_value_heads query heads."""
    head_dim: int = 128

    mamba_num_heads: int = 64
    mamba_head_dim: int = 64
    """The inner width is mamba_num_heads * mamba_head_dim; Hugging Face's `expand` plays no part."""
    mamba_num_groups: int = 8
    """Groups of Mamba heads that share B and C, and groups of channels of its gated norm."""
    ssm_state_size: int = 128
    conv_kernel: int = 4
    chunk_size: int = 128
    """Tokens in a chunk of the scan: speed and memory only, never the result."""
    time_step_min: float = 1e-3
    """With the next two, the range that `dt_bias` is drawn from. The forward pass never clamps dt."""
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4

    num_experts: int = 128
    """E, in each MoE layer."""
    top_k: int = 6
    """K, experts per token."""
    expert_hidden_size: int = 1856
    """F, the width inside one expert."""
    shared_expert_hidden_size: int = 3712
    """The width inside the expert that every token passes through."""
    routed_scaling_factor: float = 2.5
    """What the sum of a token's expert weights comes to."""
    normalize_top_k: bool = True
    """Divide the chosen scores by their sum before scaling. With top_k = 1 that leaves the router untrained, which
    is warned of."""
    router_num_groups: int = 1
    """Groups of experts, of which a token uses `router_top_groups`."""
    router_top_groups: int = 1
    aux_loss_coefficient: float = 0.0
    """Weight of the sequence balance loss; 0 leaves balancing to the router bias alone."""
    z_loss_coefficient: float = 0.0
    """Weight of the router's z-loss."""

    mlp_hidden_size: int = 1856
    """The width of a dense MLP layer (-)."""
    initializer_range: float = 0.0173
    """Standard deviation of the weights at the start."""
    initializer: Literal["megatron", "hf"] = "megatron"
    """Whose scheme draws the weights: see `nemotron_nano.initialization`."""

    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    """What ends a text; several where any of them does."""
    pad_token_id: int | None = None

    def __attrs_post_init__(self) -> None:
        if faults := list(_faults(self)):
            raise NemotronNanoConfigError(faults)
        if "E" in self.pattern and self.top_k == 1 and self.normalize_top_k:
            warnings.warn(
                "top_k = 1 with normalize_top_k = true: a token's only expert weight is always routed_scaling_factor = "
                f"{self.routed_scaling_factor}, so the router learns nothing from the loss; set normalize_top_k = "
                "false, or top_k to 2 or more",
                stacklevel=3,
            )

    @property
    def num_layers(self) -> int:
        return len(self.pattern)

    @property
    def mamba_hidden_size(self) -> int:
        """The inner width of a Mamba mixer."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_channels(self) -> int:
        """What Mamba's convolution runs over: u, B and C side by side."""
        return self.mamba_hidden_size + 2 * self.mamba_num_groups * self.ssm_state_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "NemotronNanoConfig":
        """The config that a `config.json` of Hugging Face's `nemotron_h` describes, in either spelling.

        The layers are named by `hybrid_override_pattern` ("MEM*E", as on the hub) or by
        `layers_block_type` (a list of names, as transformers 5 saves them). Only the kinds of layers that occur
        ask for their keys: a model without experts needs none of theirs.

        Raises:
            NemotronNanoConfigError: a key is missing, contradicts another, or asks for what this model does
                not have (biases, latent experts, tied embeddings, ...).
        """
        if config.get("model_type", "nemotron_h") != "nemotron_h":
            raise NemotronNanoConfigError([*_unsupported(config, "")])
        pattern = _pattern_of(config)
        if faults := [*_missing(config, pattern), *_unsupported(config, pattern)]:
            raise NemotronNanoConfigError(faults)
        given = [key for key in _HF_KEYS if config.get(key.theirs) is not None]
        values: dict[str, Any] = {key.ours: config[key.theirs] for key in given}
        if isinstance(values.get("eos_token_id"), list):
            values["eos_token_id"] = tuple(values["eos_token_id"])
        return cls(pattern=pattern, **values)

    def to_hf(self) -> dict[str, Any]:
        """A `config.json` for this model, which Hugging Face's `NemotronHConfig` reads in every version."""
        return {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "hybrid_override_pattern": self.pattern,
            "num_hidden_layers": self.num_layers,
            **{key.theirs: list(x) if isinstance(x := getattr(self, key.ours), tuple) else x for key in _HF_KEYS},
            **{name: fixed.value for name, fixed in _FIXED_IN_HF.items()},
            "expand": max(1, round(self.mamba_hidden_size / self.hidden_size)),
            "max_position_embeddings": 262144,
            "use_cache": True,
        }


class _HFKey(NamedTuple):
    """One value that both configs have."""

    ours: str
    theirs: str
    kinds: str = ""
    """Letters of the layers that read it; empty: every model does."""
    needed: bool = False
    """A size that differs from model to model, so that no default would be right."""


_HF_KEYS = (
    _HFKey("vocab_size", "vocab_size", needed=True),
    _HFKey("hidden_size", "hidden_size", needed=True),
    _HFKey("norm_eps", "layer_norm_epsilon"),
    _HFKey("num_attention_heads", "num_attention_heads", "*", needed=True),
    _HFKey("num_key_value_heads", "num_key_value_heads", "*", needed=True),
    _HFKey("head_dim", "head_dim", "*", needed=True),
    _HFKey("mamba_num_heads", "mamba_num_heads", "M", needed=True),
    _HFKey("mamba_head_dim", "mamba_head_dim", "M", needed=True),
    _HFKey("mamba_num_groups", "n_groups", "M", needed=True),  # `n_group` is the router's
    _HFKey("ssm_state_size", "ssm_state_size", "M", needed=True),
    _HFKey("conv_kernel", "conv_kernel", "M"),
    _HFKey("chunk_size", "chunk_size", "M"),
    _HFKey("time_step_min", "time_step_min", "M"),
    _HFKey("time_step_max", "time_step_max", "M"),
    _HFKey("time_step_floor", "time_step_floor", "M"),
    _HFKey("num_experts", "n_routed_experts", "E", needed=True),
    _HFKey("top_k", "num_experts_per_tok", "E", needed=True),
    _HFKey("expert_hidden_size", "moe_intermediate_size", "E", needed=True),
    _HFKey("shared_expert_hidden_size", "moe_shared_expert_intermediate_size", "E", needed=True),
    _HFKey("routed_scaling_factor", "routed_scaling_factor", "E"),
    _HFKey("normalize_top_k", "norm_topk_prob", "E"),
    _HFKey("router_num_groups", "n_group", "E"),
    _HFKey("router_top_groups", "topk_group", "E"),
    _HFKey("mlp_hidden_size", "intermediate_size", "-", needed=True),
    _HFKey("initializer_range", "initializer_range"),
    _HFKey("bos_token_id", "bos_token_id"),
    _HFKey("eos_token_id", "eos_token_id"),
    _HFKey("pad_token_id", "pad_token_id"),
)


class _Fixed(NamedTuple):
    """What Hugging Face's architecture could vary and this one does not."""

    value: Any
    kinds: str = ""
    """Letters of the layers that it speaks of; empty: of every model."""
    same: tuple[Any, ...] = ()
    """Other values that mean the same."""


_FIXED_IN_HF: Mapping[str, _Fixed] = {
    "mamba_hidden_act": _Fixed("silu", "M"),
    "mlp_hidden_act": _Fixed("relu2", "E-"),
    "use_bias": _Fixed(False, "M"),
    "mlp_bias": _Fixed(False, "E-"),
    "attention_bias": _Fixed(False, "*"),
    "mamba_proj_bias": _Fixed(False, "M"),
    "use_conv_bias": _Fixed(True, "M"),
    "tie_word_embeddings": _Fixed(False),
    "n_shared_experts": _Fixed(1, "E"),
    "moe_latent_size": _Fixed(None, "E"),
    "sliding_window": _Fixed(None, "*"),
    "attention_dropout": _Fixed(0.0, "*"),
    "hidden_dropout": _Fixed(0.0),
    "residual_in_fp32": _Fixed(False),
    "num_nextn_predict_layers": _Fixed(0, same=(None,)),
}


def _occurs(kinds: str, pattern: str) -> bool:
    """Whether a model of this pattern has a layer of one of these kinds; "" stands for the model itself."""
    return not kinds or not set(kinds).isdisjoint(pattern)


def _missing(config: Mapping[str, Any], pattern: str) -> Iterator[Fault]:
    for key in _HF_KEYS:
        if key.needed and config.get(key.theirs) is None and _occurs(key.kinds, pattern):
            yield Fault(key.theirs, None, "is missing from the Hugging Face config")


def _unsupported(config: Mapping[str, Any], pattern: str) -> Iterator[Fault]:
    if config.get("model_type", "nemotron_h") != "nemotron_h":
        yield Fault("model_type", config["model_type"], "must be 'nemotron_h'")
    for key, fixed in _FIXED_IN_HF.items():
        if key in config and config[key] not in (fixed.value, *fixed.same) and _occurs(fixed.kinds, pattern):
            yield Fault(key, config[key], f"this model only has {fixed.value!r}")
    low, high = config.get("time_step_limit") or (0.0, None)
    if "M" in pattern and (low != 0.0 or high not in (None, float("inf"), {"__float__": "Infinity"}, "Infinity")):
        yield Fault("time_step_limit", config["time_step_limit"], "this model never clamps dt: must be [0, infinity]")


def _pattern_of(config: Mapping[str, Any]) -> str:
    letters = {name: letter for letter, name in BLOCK_KINDS.items()}
    pattern = config.get("hybrid_override_pattern")
    if kinds := config.get("layers_block_type") or config.get("layer_types"):
        modern = [_OLDER_KIND_NAMES.get(kind, kind) for kind in kinds]
        if unknown := sorted({kind for kind in modern if kind not in letters}):
            rule = f"unknown kind of layer {unknown[0]!r}; known: {', '.join(letters)}"
            raise NemotronNanoConfigError([Fault("layers_block_type", list(kinds), rule)])
        spelled = "".join(letters[kind] for kind in modern)
        if pattern not in (None, spelled):
            rule = f"contradicts layers_block_type, which spells {spelled!r}"
            raise NemotronNanoConfigError([Fault("hybrid_override_pattern", pattern, rule)])
        pattern = spelled
    if not pattern:
        rule = "must name the layers, or layers_block_type must"
        raise NemotronNanoConfigError([Fault("hybrid_override_pattern", pattern, rule)])
    layers = config.get("num_hidden_layers", len(pattern))
    if layers != len(pattern):
        rule = f"the pattern {pattern!r} has {len(pattern)} layers"
        raise NemotronNanoConfigError([Fault("num_hidden_layers", layers, rule)])
    return pattern


def _faults(config: NemotronNanoConfig) -> Iterator[Fault]:
    """Every rule that the config breaks, most basic first; relations only between sizes that make sense."""
    unknown = sorted(set(config.pattern) - set(BLOCK_KINDS))
    if unknown or not config.pattern:
        letters = ", ".join(f"{letter!r} {name}" for letter, name in BLOCK_KINDS.items())
        what = f"unknown letter {unknown[0]!r}" if unknown else "must name at least one layer"
        yield Fault("pattern", config.pattern, f"{what}; letters: {letters}")
    basic = [*_not_positive(config), *_out_of_range(config)]
    yield from basic
    if not basic:
        yield from _broken_relations(config)


_NOT_SIZES = ("normalize_top_k", "bos_token_id", "eos_token_id", "pad_token_id")


def _not_positive(config: NemotronNanoConfig) -> Iterator[Fault]:
    for key in _HF_KEYS:
        if key.ours in _NOT_SIZES or not _occurs(key.kinds, config.pattern):
            continue
        if not (value := getattr(config, key.ours)) > 0:
            yield Fault(key.ours, value, "must be above 0")


def _out_of_range(config: NemotronNanoConfig) -> Iterator[Fault]:
    for key in ("aux_loss_coefficient", "z_loss_coefficient"):
        value = getattr(config, key)
        if not value >= 0:
            yield Fault(key, value, "must not be negative")
    if config.initializer not in ("megatron", "hf"):
        yield Fault("initializer", config.initializer, "must be 'megatron' or 'hf'")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, key)
        ids = value if isinstance(value, tuple) else () if value is None else (value,)
        if not all(0 <= token < config.vocab_size for token in ids):
            yield Fault(key, value, f"must be in the vocabulary of {config.vocab_size}")


def _broken_relations(config: NemotronNanoConfig) -> Iterator[Fault]:
    def divides(part: str, whole: str) -> Iterator[Fault]:
        return _divides(config, part, whole)

    if "*" in config.pattern:
        yield from divides("num_key_value_heads", "num_attention_heads")
    if "M" in config.pattern:
        yield from divides("mamba_num_groups", "mamba_num_heads")
        if config.time_step_min > config.time_step_max:
            rule = f"must not be above time_step_max = {config.time_step_max}"
            yield Fault("time_step_min", config.time_step_min, rule)
    if "E" in config.pattern:
        yield from _broken_expert_relations(config)


def _broken_expert_relations(config: NemotronNanoConfig) -> Iterator[Fault]:
    yield from _divides(config, "router_num_groups", "num_experts")
    if config.router_top_groups > config.router_num_groups:
        rule = f"must not be above router_num_groups = {config.router_num_groups}"
        yield Fault("router_top_groups", config.router_top_groups, rule)
    elif config.top_k * config.router_num_groups > config.num_experts * config.router_top_groups:
        reachable = config.num_experts * config.router_top_groups // config.router_num_groups
        yield Fault("top_k", config.top_k, f"a token can choose among {reachable} experts only")


def _divides(config: NemotronNanoConfig, part: str, whole: str) -> Iterator[Fault]:
    divisor, total = getattr(config, part), getattr(config, whole)
    if total % divisor:
        yield Fault(part, divisor, f"must divide {whole} = {total} (remainder {total % divisor})")


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

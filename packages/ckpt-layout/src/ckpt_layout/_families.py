"""The families of models that a Hugging Face folder may hold, as data: one row says how names and stacks differ.

A row's native names are those of transformers' own modules (version 5); nemotron_h has nemotron_nano's as well.
The rows called `..._grouped`, chosen by name only, are for modules whose experts are stacked as moe_core's
GroupedExperts are, [E, 2F, D] with the gate's rows first, and not as their families store them. To add a family,
add a row, or offer a component of kind `family`, or pass `Family(...)`.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from ckpt_layout._errors import LayoutError


def _names(given: str | tuple[str, ...]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


@attrs.frozen
class Rule:
    """How one native tensor lies on disk. Names are matched from the end, at a dot; what is before is kept.

    With `{e}` in a disk name there is one file tensor per index of the native dimension 0. Several disk
    names are equal parts of the native tensor along `join_dim`, in this order (gate, then up).
    """

    native: str
    disk: tuple[str, ...] = attrs.field(converter=_names)
    join_dim: int = 1
    transpose: bool = False
    """The last two dimensions are swapped on disk."""
    interleave: int = 1
    """Of n > 1 equal parts along `join_dim`, the disk has the first index of each, then the second of each, ..."""
    groups: int | str = 1
    """`join_dim` is first cut into this many equal groups (attention heads), and each is interleaved by itself. A
    string is the place in config.json where the number stands, as "vision_config.num_attention_heads"."""
    part: tuple[int, int] = (0, 1)
    """(index, count): the disk tensor is `count` native tensors of equal size along `join_dim`, this one the
    `index`-th of them; each of the others has a rule of its own."""

    def __attrs_post_init__(self) -> None:
        several = len(self.disk) > 1 or "{e}" in self.disk[0]
        if not 0 <= self.part[0] < self.part[1] or (self.part[1] > 1 and several):
            raise ValueError(
                f"Rule({self.native!r}): part = {self.part}: must be (index, count) with 0 <= index < count, of one "
                "tensor on disk; with several disk names, or one for each expert, leave it out"
            )
        if self.interleave < 1 or (self.interleave > 1 and several):
            raise ValueError(
                f"Rule({self.native!r}): interleave = {self.interleave}: must be 1, or the number of parts that one "
                "stacked tensor on disk has; with several disk names, or one for each expert, leave it out"
            )


Renames = tuple[tuple[str, str], ...]


@attrs.frozen
class Family:
    """How the models of one family lie on disk. Every name that no rule or rename matches is the same in both."""

    name: str
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json that mean this family."""
    rules: tuple[Rule, ...] = ()
    """Tried in order. For reading, each rule that matches is an alternative, and so is the native name itself
    (stacked files); for writing, the first is taken."""
    renames: Renames = ()
    """(native, disk): whole dotted parts of a name that are called differently, replaced one pair after the
    other wherever they stand; "^" at the start of the first binds it to the start of the name. What is before a
    rule's match is renamed too."""
    aliases: Renames = ()
    """Renames like these, for models that call their own tensors differently; never undone."""
    also: Renames = ()
    """Further renames of the names on disk, that other writers of this family made; tried for reading only, all of
    them one after the other, and each by itself."""
    keep_fp32: tuple[str, ...] = ()
    """Ends of native names that `save_hf(dtype=...)` leaves in fp32, as rounding them changes the model."""
    ignore: tuple[str, ...] = ()
    """Ends of disk names that no model has, and that carry nothing: tables that are computed."""

    def with_config(self, config: Mapping[str, Any]) -> "Family":
        """The row with the numbers filled in that its rules take from config.json, as far as `config` has them."""
        rules = (attrs.evolve(rule, groups=_number_at(config, rule.groups)) for rule in self.rules)
        return attrs.evolve(self, rules=tuple(rules))


def _number_at(config: Any, place: int | str) -> int | str:
    if isinstance(place, int):
        return place
    for name in place.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config if isinstance(config, int) else place


def _experts(native: str, disk: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Gated experts: a file tensor for each expert's gate, up and down projection."""
    each = f"{disk}.experts.{{e}}."
    return (
        Rule(f"{native}.experts.gate_up_proj", (f"{each}{gate}.weight", f"{each}{up}.weight")),
        Rule(f"{native}.experts.down_proj", f"{each}{down}.weight"),
    )


_GATE_UP_DOWN = _experts("mlp", "mlp", "gate_proj", "up_proj", "down_proj")
_BLOCK_SPARSE = _experts("mlp", "block_sparse_moe", "w1", "w3", "w2")
_ROUTER = ("mlp.gate.weight",)
_ROUTER_AND_BIAS = (*_ROUTER, "mlp.gate.e_score_correction_bias")
_ROTARY_TABLE = ("rotary_emb.inv_freq",)
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight")
_HC = ("fn", "base", "scale")

_KIMI_ATTENTION = (
    Rule("self_attn.conv1d.weight", tuple(f"self_attn.{part}_conv1d.weight" for part in "qkv"), join_dim=0),
)
_FORGET_GATE = tuple(
    (f"self_attn.forget_gate.{name}", f"self_attn.{name}") for name in ("A_log", "dt_bias", "f_a_proj", "f_b_proj")
)
_FORGET_GATE_FP32 = ("self_attn.forget_gate.A_log", "self_attn.forget_gate.dt_bias")

# q, k and v in one matrix; rows of a head of q and k in pairs, which transformers splits into halves
_KIMI_VISION_ATTENTION = tuple(
    Rule(
        f"attn.{name}_proj.{kind}",
        f"wqkv.{kind}",
        join_dim=0,
        part=(index, 3),
        interleave=1 if name == "v" else 2,
        groups=1 if name == "v" else "vision_config.num_attention_heads",
    )
    for kind in ("weight", "bias")
    for index, name in enumerate("qkv")
)
_KIMI_K25_OF_TRANSFORMERS = (  # what its save_pretrained calls otherwise than the hub
    ("^language_model.model.layers", "language_model.model.blocks"),
    ("^vision_tower.patch_embed.proj", "vision_tower.encoder.patch_embed.proj"),
    ("^mm_projector.pre_norm", "model.mm_projector.pre_norm"),
)

_ROWS = (
    Family(
        name="nemotron_h",  # names of nemotron_nano, and of transformers: their experts have the same
        model_types=("nemotron_h",),
        rules=(
            Rule("mixer.experts.up_proj", "mixer.experts.{e}.up_proj.weight"),
            Rule("mixer.experts.down_proj", "mixer.experts.{e}.down_proj.weight"),
        ),
        renames=(
            *((f"mixer.ssm.{name}", f"mixer.{name}") for name in ("A_log", "D", "dt_bias")),
            ("mixer.router.bias", "mixer.gate.e_score_correction_bias"),
            ("mixer.router.weight", "mixer.gate.weight"),
        ),
        aliases=(("^model", "backbone"),),
        keep_fp32=(
            "ssm.A_log", "ssm.D", "ssm.dt_bias", "router.weight", "router.bias",
            "mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.gate.weight", "mixer.gate.e_score_correction_bias",
        ),
    ),
    Family(
        name="mixtral",
        model_types=("mixtral",),
        rules=(*_BLOCK_SPARSE, Rule("mlp.gate.weight", "block_sparse_moe.gate.weight")),
        keep_fp32=_ROUTER,
        ignore=_ROTARY_TABLE,
    ),
    Family(
        name="qwen2_moe",
        model_types=("qwen2_moe",),
        rules=_GATE_UP_DOWN,
        keep_fp32=(*_ROUTER, "mlp.shared_expert_gate.weight"),
    ),
    Family(name="qwen3_moe", model_types=("qwen3_moe",), rules=_GATE_UP_DOWN, keep_fp32=_ROUTER),
    Family(
        name="deepseek_v3",
        model_types=("deepseek_v2", "deepseek_v3"),
        rules=_GATE_UP_DOWN,
        keep_fp32=_ROUTER_AND_BIAS,
        ignore=_ROTARY_TABLE,
    ),
    Family(
        name="deepseek_v32",
        model_types=("deepseek_v32",),
        rules=_GATE_UP_DOWN,
        keep_fp32=(*_ROUTER_AND_BIAS, "indexer.weights_proj.weight"),
        ignore=_ROTARY_TABLE,
    ),
    Family(
        name="kimi_k25",
        model_types=("kimi_k25",),
        rules=(*_GATE_UP_DOWN, *_KIMI_VISION_ATTENTION),
        renames=(
            ("^model.language_model", "language_model.model"), ("^lm_head", "language_model.lm_head"),
            ("^model.vision_tower", "vision_tower"), ("^vision_tower.layers", "vision_tower.encoder.blocks"),
            ("^vision_tower.final_layernorm", "vision_tower.encoder.final_layernorm"),
            ("norm1", "norm0"), ("norm2", "norm1"), ("mlp.fc1", "mlp.fc0"), ("mlp.fc2", "mlp.fc1"),
            ("attn.proj", "wo"), ("pos_emb.position_embeddings", "pos_emb.weight"),
            ("^model.mm_projector", "mm_projector"),
            ("mm_projector.in_proj", "mm_projector.proj.0"), ("mm_projector.out_proj", "mm_projector.proj.2"),
        ),
        also=(
            ("^language_model.model", "model"), ("^language_model.lm_head", "lm_head"),
            *_KIMI_K25_OF_TRANSFORMERS,
        ),
        keep_fp32=_ROUTER_AND_BIAS,
        ignore=_ROTARY_TABLE,
    ),
    Family(
        name="deepseek_v4",
        model_types=("deepseek_v4", "deepseek_v41"),
        rules=(
            *_experts("mlp", "ffn", "w1", "w3", "w2"),
            *(
                Rule(f"mlp.shared_experts.{native}.weight", f"ffn.shared_experts.{disk}.weight")
                for native, disk in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
            ),
        ),
        renames=(
            ("^lm_head", "head"),
            *((f"{block}_hc.{part}", f"hc_{block}_{part}") for block in ("attn", "ffn") for part in _HC),
            ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
            ("compressor.indexer.scorer.weights_proj", "indexer.weights_proj"),
            ("compressor.indexer.q_b_proj", "indexer.wq_b"), ("compressor.indexer", "indexer.compressor"),
            ("sinks", "attn_sink"), ("self_attn.kv_norm", "self_attn.norm"), ("compressor.kv_norm", "compressor.norm"),
            ("position_bias", "ape"), ("q_a_proj", "wq_a"),
            ("self_attn.q_b_proj", "self_attn.wq_b"), ("kv_proj", "wkv"), ("gate_proj", "wgate"), ("o_a_proj", "wo_a"),
            ("o_b_proj", "wo_b"), ("q_a_norm", "q_norm"), ("gate.e_score_correction_bias", "gate.bias"),
            ("self_attn", "attn"), ("mlp", "ffn"),
        ),
        also=(
            ("^model.embed_tokens", "embed"),
            *((f"hc_head.hc_{part}", f"hc_head_{part}") for part in _HC),
            ("^model", ""),
        ),
        keep_fp32=(
            *_ROUTER_AND_BIAS, *_NORMS, "kv_norm.weight", "q_a_norm.weight", "sinks", "position_bias",
            *(f"{block}_hc.{part}" for block in ("attn", "ffn") for part in _HC),
            *(f"hc_head.hc_{part}" for part in _HC),
            *(f"{of}.{name}_proj.weight" for of in ("compressor", "indexer") for name in ("kv", "gate")),
            "scorer.weights_proj.weight",
        ),
    ),
    Family(
        name="kimi_linear",
        model_types=("kimi_linear",),
        rules=(*_BLOCK_SPARSE, *_KIMI_ATTENTION),
        renames=(*_FORGET_GATE, ("mlp", "block_sparse_moe")),
        also=(("block_sparse_moe", "mlp"),),  # dense layers, as the hub has them
        keep_fp32=(*_ROUTER_AND_BIAS, *_FORGET_GATE_FP32),
    ),
    Family(
        name="kimi_k3",
        model_types=("kimi_k3",),
        rules=(*_BLOCK_SPARSE, *_KIMI_ATTENTION),
        renames=(*_FORGET_GATE, ("mlp", "block_sparse_moe")),
        also=(("block_sparse_moe", "mlp"),),
        keep_fp32=(*_ROUTER_AND_BIAS, *_FORGET_GATE_FP32),
    ),
    Family(
        name="glm4_moe",
        model_types=("glm4_moe",),
        rules=_GATE_UP_DOWN,
        keep_fp32=_ROUTER_AND_BIAS,
        ignore=_ROTARY_TABLE,
    ),
    Family(
        name="glm5_next",
        model_types=("glm5_next", "glm5_next_text"),
        rules=(*_GATE_UP_DOWN, *_KIMI_ATTENTION),
        renames=(
            *_FORGET_GATE,
            *((f"{block}_hc.{part}", f"hc_{block}_{part}") for block in ("attn", "ffn") for part in _HC),
        ),
        keep_fp32=(
            *_ROUTER_AND_BIAS, *_FORGET_GATE_FP32, "self_attn.conv1d.weight",
            *(f"{block}_hc.{part}" for block in ("attn", "ffn") for part in ("base", "scale")),
        ),
    ),
    Family(
        name="minimax_m2",
        model_types=("minimax_m2",),
        rules=_BLOCK_SPARSE,
        renames=(("mlp", "block_sparse_moe"),),
        keep_fp32=(*_ROUTER, "mlp.e_score_correction_bias"),
    ),
    Family(
        name="ernie4_5_moe",
        model_types=("ernie4_5_moe",),
        rules=_GATE_UP_DOWN,
        renames=(("mlp.gate.moe_statics", "mlp.moe_statics"),),
        keep_fp32=(*_ROUTER, "moe_statics.e_score_correction_bias"),
    ),
    Family(
        name="granitemoe",
        model_types=("granitemoe",),
        renames=(
            ("block_sparse_moe.router", "block_sparse_moe.router.layer"),
            ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
            ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight"),
        ),
        keep_fp32=("block_sparse_moe.router.weight",),
    ),
    Family(name="gpt_oss", model_types=("gpt_oss",), keep_fp32=("mlp.router.weight", "mlp.router.bias", *_NORMS)),
    Family(
        name="gpt_oss_grouped",
        model_types=(),
        rules=(
            Rule("experts.gate_up_proj", "experts.gate_up_proj", transpose=True, interleave=2),
            Rule("experts.gate_up_proj_bias", "experts.gate_up_proj_bias", interleave=2),
            Rule("experts.down_proj", "experts.down_proj", transpose=True),
        ),
        keep_fp32=("mlp.router.weight", "mlp.router.bias", *_NORMS),
    ),
    Family(
        name="llama4",
        model_types=("llama4", "llama4_text"),
        keep_fp32=("feed_forward.router.weight",),
        ignore=_ROTARY_TABLE,
    ),
    Family(
        name="llama4_grouped",
        model_types=(),
        rules=(
            Rule("experts.gate_up_proj", "experts.gate_up_proj", transpose=True),
            Rule("experts.down_proj", "experts.down_proj", transpose=True),
        ),
        keep_fp32=("feed_forward.router.weight",),
        ignore=_ROTARY_TABLE,
    ),
)  # fmt: skip


def families(registry: Any = None) -> Mapping[str, Family]:
    """The known families by name.

    Args:
        registry: a plugin host's (`moe_core.plugins.load_registry()`), to have the rows of plugins as well.
    """
    rows = {row.name: row for row in _ROWS}
    for entry in registry.entries if registry is not None else ():
        component = entry.component
        if component.kind == "family":
            row = component.load_factory()(component.load_config_class()(), None)
            rows[row.name] = row
    return rows


def resolve_family(family: Family | str | None, config: Mapping[str, Any], where: object) -> Family:
    """The family given, or that of the config's model type, with what it takes from the config; `where` is named
    in the error."""
    if isinstance(family, Family):
        return family.with_config(config)
    known = families()
    if family is not None:
        if family not in known:
            raise LayoutError(f"family = {family!r}: must be one of {', '.join(sorted(known))}, or a Family")
        return known[family].with_config(config)
    model_type = config.get("model_type")
    for row in known.values():
        if model_type in row.model_types:
            return row.with_config(config)
    raise LayoutError(
        f"{where}: model_type = {model_type!r} is of no known family ({', '.join(sorted(known))}): pass family="
    )

"""The families of models that a Hugging Face folder may hold, as data: one row says how names and stacks differ.

A row's native names are those of transformers' own modules (version 5), except for nemotron_h, whose are
nemotron_nano's. To add a family, add a row, or offer a component of kind `family`, or pass `Family(...)`.
"""

from collections.abc import Mapping
from typing import Any

import attrs


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


@attrs.frozen
class Family:
    """How the models of one family lie on disk. Every name that no rule matches is the same in both."""

    name: str
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json that mean this family."""
    rules: tuple[Rule, ...]
    """Tried in order. For reading, each rule that matches is an alternative, and so is the native name itself
    (stacked files); for writing, the first is taken."""
    keep_fp32: tuple[str, ...] = ()
    """Ends of native names that `save_hf(dtype=...)` leaves in fp32, as rounding them changes the model."""
    ignore: tuple[str, ...] = ()
    """Ends of disk names that no model has, and that carry nothing: tables that are computed."""


_GATE_UP_DOWN = (
    Rule("mlp.experts.gate_up_proj", ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight")),
    Rule("mlp.experts.down_proj", "mlp.experts.{e}.down_proj.weight"),
)

_ROWS = (
    Family(
        name="nemotron_h",
        model_types=("nemotron_h",),
        rules=(
            Rule("mixer.ssm.A_log", "mixer.A_log"),
            Rule("mixer.ssm.D", "mixer.D"),
            Rule("mixer.ssm.dt_bias", "mixer.dt_bias"),
            Rule("mixer.router.weight", "mixer.gate.weight"),
            Rule("mixer.router.bias", "mixer.gate.e_score_correction_bias"),
            Rule("mixer.experts.up_proj", "mixer.experts.{e}.up_proj.weight"),
            Rule("mixer.experts.down_proj", "mixer.experts.{e}.down_proj.weight"),
        ),
        keep_fp32=("ssm.A_log", "ssm.D", "ssm.dt_bias", "router.weight", "router.bias"),
    ),
    Family(
        name="mixtral",
        model_types=("mixtral",),
        rules=(
            Rule(
                "mlp.experts.gate_up_proj",
                ("block_sparse_moe.experts.{e}.w1.weight", "block_sparse_moe.experts.{e}.w3.weight"),
            ),
            Rule("mlp.experts.down_proj", "block_sparse_moe.experts.{e}.w2.weight"),
            Rule("mlp.gate.weight", "block_sparse_moe.gate.weight"),
        ),
        keep_fp32=("mlp.gate.weight",),
        ignore=("rotary_emb.inv_freq",),
    ),
    Family(
        name="qwen3_moe",
        model_types=("qwen3_moe",),
        rules=_GATE_UP_DOWN,
        keep_fp32=("mlp.gate.weight",),
    ),
    Family(
        name="deepseek_v3",
        model_types=("deepseek_v3",),
        rules=_GATE_UP_DOWN,
        keep_fp32=("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
        ignore=("rotary_emb.inv_freq",),
    ),
)


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

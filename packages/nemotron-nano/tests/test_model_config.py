"""Model configs: what is refused, Hugging Face's spellings, presets, and the component's config."""

import json
import subprocess
import sys

import attrs
import pytest

from nemotron_nano import NemotronNanoConfig, NemotronNanoConfigError, count_parameters, presets
from nemotron_nano.components import NemotronNanoModelConfig, problems

NANO = presets["nano-30b-a3b"]

HUB = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "initializer_range": 0.02,
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "residual_in_fp32": False,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}
KINDS = {"M": "mamba", "E": "moe", "*": "attention"}


def test_the_released_config_is_the_preset():
    assert NemotronNanoConfig.from_hf(HUB) == attrs.evolve(NANO, initializer_range=0.02)
    assert [NANO.pattern.count(letter) for letter in "ME*"] == [23, 23, 6]


def test_mambas_width_is_heads_times_head_dim_and_not_expand_times_hidden_size():
    config = NemotronNanoConfig.from_hf(HUB)
    assert HUB["expand"] * HUB["hidden_size"] == 5376
    assert (config.mamba_hidden_size, config.conv_channels) == (4096, 6144)


@pytest.mark.parametrize("kinds", [KINDS, {"M": "linear_attention", "E": "moe", "*": "full_attention"}])
def test_both_spellings_of_the_layers(kinds):
    as_list = {key: value for key, value in HUB.items() if key != "hybrid_override_pattern"}
    as_list["layers_block_type"] = [kinds[letter] for letter in NANO.pattern]
    assert NemotronNanoConfig.from_hf(as_list) == NemotronNanoConfig.from_hf(HUB)


@pytest.mark.parametrize("name", presets)
def test_to_hf_and_back(name):
    config = attrs.evolve(presets[name], eos_token_id=(2, 11))
    assert NemotronNanoConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pattern": "MEX*"}, ["pattern", "'X'"]),
        ({"pattern": ""}, ["pattern", "at least one"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads = 3", "num_attention_heads = 4", "remainder 1"]),
        ({"mamba_num_groups": 3}, ["mamba_num_groups = 3", "mamba_num_heads = 8", "remainder 2"]),
        ({"top_k": 17}, ["top_k = 17", "16 experts"]),
        ({"router_num_groups": 4, "router_top_groups": 1, "top_k": 5}, ["top_k = 5", "4 experts"]),
        ({"router_num_groups": 5}, ["router_num_groups = 5", "num_experts = 16"]),
        ({"router_top_groups": 2}, ["router_top_groups = 2", "router_num_groups = 1"]),
        ({"vocab_size": 0}, ["vocab_size = 0", "above 0"]),
        ({"norm_eps": float("nan")}, ["norm_eps = nan"]),
        ({"time_step_min": 0.2}, ["time_step_min = 0.2", "time_step_max = 0.1"]),
        ({"pad_token_id": 256}, ["pad_token_id = 256", "vocabulary of 256"]),
        ({"aux_loss_coefficient": -1.0}, ["aux_loss_coefficient = -1.0"]),
    ],
)
def test_a_wrong_value_is_refused_with_the_numbers(change, words):
    with pytest.raises(NemotronNanoConfigError) as raised:
        attrs.evolve(presets["tiny"], **change)
    for word in words:
        assert word in str(raised.value)


def test_all_faults_are_named_at_once():
    with pytest.raises(NemotronNanoConfigError) as raised:
        attrs.evolve(presets["tiny"], num_key_value_heads=3, mamba_num_groups=3, top_k=17)
    assert [fault.key for fault in raised.value.faults] == ["num_key_value_heads", "mamba_num_groups", "top_k"]


def test_rules_of_blocks_that_are_not_there_do_not_apply():
    attrs.evolve(presets["tiny"], pattern="*", mamba_num_groups=3, top_k=17)
    attrs.evolve(presets["tiny"], pattern="*", top_k=1)


def test_a_router_that_would_not_be_trained_is_warned_of():
    with pytest.warns(UserWarning, match=r"top_k = 1 with normalize_top_k = true.* = 2\.5, .*normalize_top_k = false"):
        config = attrs.evolve(presets["tiny"], top_k=1)
    with pytest.warns(UserWarning, match="top_k = 1"):
        NemotronNanoConfig.from_hf(config.to_hf())
    attrs.evolve(presets["tiny"], top_k=1, normalize_top_k=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 50}, ["num_hidden_layers = 50", "52 layers"]),
        ({"layers_block_type": ["mamba"]}, ["hybrid_override_pattern", "contradicts"]),
        ({"hybrid_override_pattern": None, "layers_block_type": ["mamba", "mamba3"]}, ["'mamba3'"]),
        ({"hybrid_override_pattern": None}, ["hybrid_override_pattern"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings = True"]),
        ({"moe_latent_size": 1024}, ["moe_latent_size = 1024"]),
        ({"mlp_hidden_act": "silu"}, ["mlp_hidden_act = 'silu'", "'relu2'"]),
        ({"time_step_limit": [0.001, 0.1]}, ["time_step_limit"]),
        ({"model_type": "bamba"}, ["model_type = 'bamba'"]),
    ],
)
def test_a_hugging_face_config_of_another_architecture_is_refused(change, words):
    with pytest.raises(NemotronNanoConfigError) as raised:
        NemotronNanoConfig.from_hf({**HUB, **change})
    for word in words:
        assert word in str(raised.value)


def test_a_size_that_is_missing_is_an_error():
    with pytest.raises(NemotronNanoConfigError, match=r"n_groups.*missing"):
        NemotronNanoConfig.from_hf({key: value for key, value in HUB.items() if key != "n_groups"})


def test_counts_of_the_released_model():
    assert count_parameters(NANO) == (31_577_937_344, 3_580_073_408)
    assert count_parameters(attrs.evolve(NANO, vocab_size=128_256)) == (31_562_798_528, 3_564_934_592)


def test_the_preset_of_16_layers_is_the_beginning():
    assert attrs.evolve(presets["nano-16l"], pattern=NANO.pattern) == NANO
    assert NANO.pattern.startswith(presets["nano-16l"].pattern)


def test_tiny_has_every_block_kind_and_sizes_that_are_fast():
    tiny = presets["tiny"]
    assert set(tiny.pattern) == set("ME*")
    assert 1.4e6 < count_parameters(tiny).total < 1.6e6
    sizes = (tiny.hidden_size, tiny.expert_hidden_size, tiny.shared_expert_hidden_size, tiny.conv_channels)
    assert all(size % 8 == 0 for size in sizes)


def test_the_component_overrides_every_field_of_the_model():
    model = {field.name for field in attrs.fields(NemotronNanoConfig) if not field.name.endswith("_token_id")}
    component = {field.name for field in attrs.fields(NemotronNanoModelConfig)}
    assert component - model == {"preset", "from_hf", "grouped_gemm", "mamba_kernels"}
    assert model <= component


def test_the_component_resolves_to_a_model():
    config = NemotronNanoModelConfig(preset="small", top_k=3, pattern="ME")
    assert config.resolve() == attrs.evolve(presets["small"], top_k=3, pattern="ME")
    assert config.num_experts == 32
    assert NemotronNanoModelConfig(num_experts=24).num_experts == 24
    assert NemotronNanoModelConfig(pattern="M*").num_experts is None  # nothing for the mesh to check


def test_the_component_reads_a_hugging_face_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    for path in (tmp_path, tmp_path / "config.json"):
        assert NemotronNanoModelConfig(from_hf=str(path), vocab_size=512).resolve().vocab_size == 512
        assert NemotronNanoModelConfig(from_hf=str(path)).num_experts == 128


def test_the_components_problems_name_the_key(tmp_path):
    assert problems(NemotronNanoModelConfig()) == []
    found = problems(NemotronNanoModelConfig(num_key_value_heads=3, top_k=99))
    assert [(problem.key, problem.value) for problem in found] == [
        ("model.num_key_value_heads", 3),
        ("model.top_k", 99),
    ]
    (missing,) = problems(NemotronNanoModelConfig(from_hf=str(tmp_path / "nothing")))
    assert missing.key == "model.from_hf"


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="preset"):
        NemotronNanoModelConfig(preset="huge")


def test_configs_and_counts_need_no_torch():
    code = (
        "import sys, nemotron_nano.components; from nemotron_nano import presets, count_parameters;"
        "count_parameters(presets['tiny']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

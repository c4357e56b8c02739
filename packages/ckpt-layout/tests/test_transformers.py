"""The rows of the family table against transformers: its files load here, ours load there and compute the same."""

from functools import cache

import pytest
import torch
import transformers
from torch import nn

from ckpt_layout import families, load_hf, save_hf

SIZES = {
    "vocab_size": 23, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 12, "moe_intermediate_size": 20, "max_position_embeddings": 32, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip

_MLA = {
    "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "q_lora_rank": 5, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "num_key_value_heads": 2,
}  # fmt: skip

_GLM5_NEXT = {
    "n_routed_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 5,
    "qk_nope_head_dim": 4, "v_head_dim": 4, "linear_head_dim": 4, "linear_num_heads": 2, "hc_mult": 2,
    "index_topk": 4, "index_kpool": 2, "index_head_dim": 8, "index_n_heads": 2,
    "mlp_layer_types": ["dense", "sparse"], "layer_types": ["linear_attention", "indexed_attention"],
}  # fmt: skip

# by the `model_type` that transformers has
MORE = {
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 4,
        "ssm_state_size": 4, "n_groups": 2, "n_routed_experts": 5, "num_experts_per_tok": 2, "head_dim": 4,
        "moe_shared_expert_intermediate_size": 10, "n_group": 1, "topk_group": 1, "chunk_size": 4,
    },
    "mixtral": {"num_local_experts": 5, "head_dim": 4},
    "qwen2_moe": {"num_experts": 5, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 7},
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "head_dim": 4},
    "deepseek_v2": {**_MLA, "kv_lora_rank": 6},
    "deepseek_v3": _MLA,
    "deepseek_v32": {**_MLA, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
    "deepseek_v4": {
        "n_routed_experts": 5, "num_experts_per_tok": 2, "q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 4,
        "qk_rope_head_dim": 4, "head_dim": 8, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4,
        "num_hidden_layers": 4,
    },
    "kimi_linear": {
        "num_experts": 5, "num_experts_per_token": 2, "linear_head_dim": 4, "linear_num_heads": 2, "kv_lora_rank": 5,
        "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "num_key_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "glm4_moe": {"n_routed_experts": 5, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "head_dim": 4},
    "minimax_m2": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20, "head_dim": 4},
    "ernie4_5_moe": {"moe_num_experts": 5, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    "granitemoe": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20, "head_dim": 4},
    "llama4_text": {"num_local_experts": 5, "intermediate_size": 20, "intermediate_size_mlp": 12, "head_dim": 4},
    "glm5_next_text": _GLM5_NEXT,
}  # fmt: skip

# of text and images: what their config has, inside it a text model of SIZES and more
MULTIMODAL = {
    "kimi_k25": {
        "text_config": {"model_type": "deepseek_v3", **_MLA},
        "vision_config": {
            "num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 24, "intermediate_size": 10,
            "patch_size": 2, "pos_emb_height": 3, "pos_emb_width": 4, "pos_emb_time": 2,
        },
        "projection_hidden_size": 24,
        "image_token_id": 20, "video_token_id": 21, "vision_start_token_id": 19, "vision_end_token_id": 18,
    },
    "glm5_next": {
        "text_config": _GLM5_NEXT,
        "vision_config": {
            "depth": 2, "num_heads": 2, "hidden_size": 16, "intermediate_size": 10, "image_size": 8, "patch_size": 2,
            "out_hidden_size": 8, "projection_intermediate_size": 14,
        },
        "image_token_id": 20, "image_start_token_id": 19, "image_end_token_id": 18,
        "video_token_id": 17, "video_start_token_id": 16, "video_end_token_id": 15,
    },
    "llama4": {
        "text_config": MORE["llama4_text"],
        "vision_config": {
            "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 32,
            "image_size": 8, "patch_size": 2, "vision_output_dim": 8, "projector_input_dim": 8,
            "projector_output_dim": 8, "pixel_shuffle_ratio": 0.5,
        },
        "image_token_index": 20, "boi_token_index": 19, "eoi_token_index": 18,
    },
}  # fmt: skip

# save_pretrained turns its own renames of kimi_k25 around one by one, and so calls these otherwise than it found them
OTHERWISE = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "vision_tower.encoder.patch_embed.proj.": "vision_tower.patch_embed.proj.",
    "model.mm_projector.pre_norm.": "mm_projector.pre_norm.",
}


@cache
def config_of(family):
    if family in MULTIMODAL:
        more = dict(MULTIMODAL[family])
        more["text_config"] = {**SIZES, **more["text_config"]}
        return transformers.AutoConfig.for_model(family, tie_word_embeddings=False, **more)
    return transformers.AutoConfig.for_model(family, **{**SIZES, **MORE[family]})


def auto_class(family):
    if family == "glm5_next_text":
        return transformers.AutoModel  # it has no head
    return transformers.AutoModelForImageTextToText if family in MULTIMODAL else transformers.AutoModelForCausalLM


def made(family):
    torch.manual_seed(3)
    model = auto_class(family).from_config(config_of(family))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape) / 4)
    return model.eval()


def assert_equal(mine, want):
    assert mine.keys() == want.keys()
    for name, value in want.items():
        assert mine[name].dtype == value.dtype, name
        assert torch.equal(mine[name], value), name


def poisoned(model):
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    return model


def shapes(folder):
    from safetensors import safe_open

    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 - the file is no dict, and cannot be iterated
    return found


def as_on_the_hub(keys):
    """Their keys with what OTHERWISE says undone."""
    found = {}
    for key, shape in keys.items():
        old = next((old for old in OTHERWISE if key.startswith(old)), "")
        found[OTHERWISE.get(old, "") + key.removeprefix(old)] = shape
    return found


def text_of(model):
    """What maps tokens to logits; the whole of llama4 fails without an image (it asks its text model for some)."""
    return model.language_model if model.config.model_type == "llama4" else model


@pytest.mark.parametrize("family", [*MORE, *MULTIMODAL])
def test_their_files_load_here_and_ours_there(family, tmp_path):
    model = made(family)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "theirs", max_shard_size="3KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    other = poisoned(made(family))
    load_hf(other, tmp_path / "theirs")
    assert_equal(other.state_dict(), state)

    save_hf(model, tmp_path / "ours", max_shard_size="3KB")
    theirs = shapes(tmp_path / "theirs")
    assert shapes(tmp_path / "ours") == (as_on_the_hub(theirs) if family == "kimi_k25" else theirs)
    back, info = auto_class(family).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert_equal(back.state_dict(), state)
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        for parameter in back.parameters():
            parameter.data = parameter.clone()  # theirs lie in the mapped file, at odd addresses: other kernels run
        assert torch.equal(text_of(back.eval())(tokens)[0], text_of(model)(tokens)[0])


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "nemotron_h"])
def test_stacked_files_are_read_by_both(family, tmp_path):
    model = made(family)
    save_hf(model, tmp_path / "stacked", stacked=True)
    assert any(key.endswith("experts.down_proj") for key in shapes(tmp_path / "stacked"))
    assert not any("experts.0." in key for key in shapes(tmp_path / "stacked"))
    back, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stacked", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_equal(back.state_dict(), model.state_dict())
    other = poisoned(made(family))
    load_hf(other, tmp_path / "stacked")
    assert_equal(other.state_dict(), model.state_dict())


def grouped(model, experts, gate_up, biases):
    """The model's modules with experts stacked as moe_core's are, gate rows first."""
    count, dim, hidden = len(experts.down_proj), SIZES["hidden_size"], 20
    stacks = nn.Module()
    stacks.gate_up_proj = nn.Parameter(torch.full((count, 2 * hidden, dim), float("nan")))
    stacks.down_proj = nn.Parameter(torch.full((count, dim, hidden), float("nan")))
    if biases:
        stacks.gate_up_proj_bias = nn.Parameter(torch.full((count, 2 * hidden), float("nan")))
        stacks.down_proj_bias = nn.Parameter(torch.full((count, dim), float("nan")))
    holder = nn.Module()
    holder.experts = stacks
    return holder


@pytest.mark.parametrize(("family", "path"), [("gpt_oss", "mlp"), ("llama4_text", "feed_forward")])
def test_transposed_and_interleaved_stacks_compute_what_theirs_do(family, path, tmp_path):
    """Their files into stacks [E, 2F, D], gate first; then each expert by hand, against their own module."""
    model = made(family)
    theirs = getattr(model.model.layers[1], path).experts
    folder = tmp_path / "experts"
    source = nn.Module()
    source.experts = theirs
    save_hf(source, folder, family=family.removesuffix("_text"), config={"model_type": family})
    mine = grouped(model, theirs, 20, biases=family == "gpt_oss")
    row = f"{family.removesuffix('_text')}_grouped"
    load_hf(mine, folder, family=row)

    hidden = torch.randn(3, SIZES["hidden_size"])
    for e in range(5):
        rows = hidden @ mine.experts.gate_up_proj[e].T
        if family == "gpt_oss":
            rows = rows + mine.experts.gate_up_proj_bias[e]
            gate, up = rows[:, :20].clamp(max=7.0), rows[:, 20:].clamp(-7.0, 7.0)
            middle = (up + 1) * gate * torch.sigmoid(gate * 1.702)
            got = middle @ mine.experts.down_proj[e].T + mine.experts.down_proj_bias[e]
            ids = torch.full((3, 1), e)
            want = theirs(hidden, ids, torch.ones(3, 1))
        else:
            got = (torch.nn.functional.silu(rows[:, :20]) * rows[:, 20:]) @ mine.experts.down_proj[e].T
            every = torch.zeros(5, 3, SIZES["hidden_size"])
            every[e] = hidden
            want = theirs(every.view(-1, SIZES["hidden_size"])).view(5, 3, -1)[e]
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)

    save_hf(mine, tmp_path / "back", family=row)
    assert shapes(tmp_path / "back") == shapes(folder)
    again = nn.Module()
    again.experts = type(theirs)(config_of(family))
    load_hf(poisoned(again), tmp_path / "back", family=family.removesuffix("_text"))
    assert_equal(dict(again.experts.state_dict()), dict(theirs.state_dict()))


def test_every_row_is_covered():
    """Whatever model type of a row transformers can build is here; kimi_k3, of which it has no model, under a
    stand-in of its names in test_families; deepseek_v41 is deepseek_v4 in its names."""
    known = {model_type for row in families().values() for model_type in row.model_types}
    assert known == {*MORE, *MULTIMODAL, "kimi_k3", "deepseek_v41"}
    assert not {"kimi_k3", "deepseek_v41"} & set(transformers.CONFIG_MAPPING)
    assert {name for name, row in families().items() if not row.model_types} == {"gpt_oss_grouped", "llama4_grouped"}


@pytest.mark.parametrize("family", [*MORE, *MULTIMODAL])
def test_what_they_keep_in_fp32_a_bf16_export_keeps(family, tmp_path):
    model = made(family)
    kept = {*(type(model)._keep_in_fp32_modules or ()), *(type(model)._keep_in_fp32_modules_strict or ())}
    theirs = {name for name in model.state_dict() if any(f".{end}." in f".{name}." for end in kept)}
    save_hf(model, tmp_path / "bf16", dtype=torch.bfloat16)
    other = poisoned(made(family))
    load_hf(other, tmp_path / "bf16")
    state = model.state_dict()
    rounded = {name for name, value in other.state_dict().items() if not torch.equal(value, state[name])}
    assert not theirs & rounded, theirs & rounded
    assert rounded

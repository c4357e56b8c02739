"""The rows of the family table against transformers: its files load here, and ours load there."""

import pytest
import torch
import transformers

from ckpt_layout import families, load_hf, save_hf

SIZES = {
    "vocab_size": 23, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 12, "moe_intermediate_size": 20, "max_position_embeddings": 32, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip

MORE = {
    "mixtral": {"num_local_experts": 5, "head_dim": 4},
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "head_dim": 4},
    "deepseek_v3": {
        "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "q_lora_rank": 5, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
        "num_key_value_heads": 2,
    },
}  # fmt: skip


def made(family):
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **MORE[family]})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) / 4)
    return model.eval()


def assert_equal(mine, want):
    assert mine.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(mine[name], value), name


@pytest.mark.parametrize("family", MORE)
def test_their_files_load_here(family, tmp_path):
    model = made(family)
    model.save_pretrained(tmp_path, max_shard_size="3KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    other = made(family)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.fill_(float("nan"))
    load_hf(other, tmp_path)
    assert_equal(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("family", MORE)
def test_our_files_load_there_and_compute_the_same(family, tmp_path):
    model = made(family)
    save_hf(model, tmp_path / "out", max_shard_size="3KB")
    other, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_equal(other.state_dict(), model.state_dict())
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(other.eval()(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("family", MORE)
def test_the_keys_are_those_that_transformers_writes(family, tmp_path):
    from safetensors import safe_open

    model = made(family)
    model.save_pretrained(tmp_path / "theirs")
    save_hf(model, tmp_path / "ours")
    shapes = []
    for folder in ("theirs", "ours"):
        with safe_open(tmp_path / folder / "model.safetensors", framework="pt") as file:
            shapes.append({key: file.get_slice(key).get_shape() for key in file.keys()})  # noqa: SIM118 - the file is no dict, and cannot be iterated
            assert file.metadata() == {"format": "pt"}
    assert shapes[0] == shapes[1]


def test_every_row_but_our_own_models_is_covered_here():
    assert set(families()) - {"nemotron_h"} == set(MORE)

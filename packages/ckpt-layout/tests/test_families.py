"""The rows whose models transformers does not build tiny, other writers' names, and what a row may not say."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt_layout import Family, Rule, families, hf_blocks, load_hf, save_hf

E, F, D, C = 5, 3, 4, 6


def tree(shapes):
    """A module with parameters of these dotted names and shapes, all different numbers."""
    root, start = nn.Module(), 1
    for name, shape in shapes.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        count = torch.Size(shape).numel()
        values = torch.arange(start, start + count, dtype=torch.float32).view(shape)
        module.register_parameter(last, nn.Parameter(values))
        start += count
    return root


def per_expert(prefix, names, tensors):
    """File tensors of gate, up and down for each expert, cut out by hand."""
    gate_up, down = tensors
    found = {}
    for e in range(E):
        for name, values in zip(names, (gate_up[e, :F], gate_up[e, F:], down[e]), strict=True):
            found[f"{prefix}{e}.{name}.weight"] = values
    return found


def check(row, model, disk, folder):
    """Write, compare with `disk`; poison, read back, compare with what was there."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_hf(model, folder, family=row)
    written = load_file(folder / "model.safetensors")
    assert written.keys() == disk.keys()
    for key, values in disk.items():
        assert torch.equal(written[key], values), key
    read_back(row, model, state, folder)


def read_back(row, model, state, folder):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    load_hf(model, folder, family=row)
    for name, values in model.state_dict().items():
        assert torch.equal(values, state[name]), name


def linear_attention(layer):
    return {
        f"{layer}.self_attn.conv1d.weight": (3 * C, 1, 2),
        f"{layer}.self_attn.forget_gate.A_log": (1, 1, 2, 1),
        f"{layer}.self_attn.forget_gate.dt_bias": (C,),
        f"{layer}.self_attn.forget_gate.f_a_proj.weight": (2, D),
    }


def linear_attention_on_disk(layer, model):
    state = {name: value for name, value in model.state_dict().items() if "self_attn" in name}
    conv = state[f"{layer}.self_attn.conv1d.weight"]
    disk = {f"{layer}.self_attn.{part}_conv1d.weight": conv[i * C : i * C + C] for i, part in enumerate("qkv")}
    for name in ("A_log", "dt_bias", "f_a_proj.weight"):
        disk[f"{layer}.self_attn.{name}"] = state[f"{layer}.self_attn.forget_gate.{name}"]
    return disk


def moe(layer):
    return {
        f"{layer}.mlp.experts.gate_up_proj": (E, 2 * F, D),
        f"{layer}.mlp.experts.down_proj": (E, D, F),
        f"{layer}.mlp.gate.weight": (E, D),
        f"{layer}.mlp.gate.e_score_correction_bias": (E,),
    }


def stacks(model, layer):
    state = model.state_dict()
    return state[f"{layer}.mlp.experts.gate_up_proj"], state[f"{layer}.mlp.experts.down_proj"]


def test_kimi_k3(tmp_path):
    layer = "model.layers.1"
    model = tree({**moe(layer), **linear_attention(layer), "model.norm.weight": (D,)})
    disk = per_expert(f"{layer}.block_sparse_moe.experts.", ("w1", "w3", "w2"), stacks(model, layer))
    disk |= linear_attention_on_disk(layer, model)
    for name in ("weight", "e_score_correction_bias"):
        disk[f"{layer}.block_sparse_moe.gate.{name}"] = model.state_dict()[f"{layer}.mlp.gate.{name}"]
    disk["model.norm.weight"] = model.state_dict()["model.norm.weight"]
    check("kimi_k3", model, disk, tmp_path / "out")


def test_glm5_next(tmp_path):
    layer = "model.layers.1"
    model = tree({**moe(layer), **linear_attention(layer), f"{layer}.attn_hc.fn": (3, D), f"{layer}.ffn_hc.base": (3,)})
    disk = per_expert(f"{layer}.mlp.experts.", ("gate_proj", "up_proj", "down_proj"), stacks(model, layer))
    disk |= linear_attention_on_disk(layer, model)
    state = model.state_dict()
    disk |= {name: value for name, value in state.items() if ".gate." in name}
    disk[f"{layer}.hc_attn_fn"] = state[f"{layer}.attn_hc.fn"]
    disk[f"{layer}.hc_ffn_base"] = state[f"{layer}.ffn_hc.base"]
    check("glm5_next", model, disk, tmp_path / "out")


def test_kimi_k25_alone_and_inside_the_larger_model(tmp_path):
    layer = "layers.1"
    model = tree({**moe(f"model.language_model.{layer}"), "lm_head.weight": (7, D)})
    names = ("gate_proj", "up_proj", "down_proj")
    prefix = f"language_model.model.{layer}.mlp"
    state = model.state_dict()
    disk = per_expert(f"{prefix}.experts.", names, stacks(model, f"model.language_model.{layer}"))
    for name in ("weight", "e_score_correction_bias"):
        disk[f"{prefix}.gate.{name}"] = state[f"model.language_model.{layer}.mlp.gate.{name}"]
    disk["language_model.lm_head.weight"] = state["lm_head.weight"]
    check("kimi_k25", model, disk, tmp_path / "out")


def test_deepseek_v4_with_the_bare_names_of_its_first_files(tmp_path):
    layer = "model.layers.0"
    model = tree(
        {
            **moe(layer),
            "model.embed_tokens.weight": (7, D),
            "model.hc_head.hc_fn": (2, D),
            f"{layer}.self_attn.q_a_proj.weight": (2, D),
            "lm_head.weight": (7, D),
        }
    )
    state = {name: value.clone() for name, value in model.state_dict().items()}
    disk = per_expert("layers.0.ffn.experts.", ("w1", "w3", "w2"), stacks(model, layer))
    disk = {key: values.clone() for key, values in disk.items()} | {
        "layers.0.ffn.gate.weight": state[f"{layer}.mlp.gate.weight"],
        "layers.0.ffn.gate.bias": state[f"{layer}.mlp.gate.e_score_correction_bias"],
        "embed.weight": state["model.embed_tokens.weight"],
        "hc_head_fn": state["model.hc_head.hc_fn"],
        "layers.0.attn.wq_a.weight": state[f"{layer}.self_attn.q_a_proj.weight"],
        "head.weight": state["lm_head.weight"],
    }
    save_file(disk, tmp_path / "model.safetensors")
    read_back("deepseek_v4", model, state, tmp_path)


def test_dense_layers_of_kimi_linear_under_both_names(tmp_path):
    model = tree({"model.layers.0.mlp.up_proj.weight": (F, D), "model.norm.weight": (D,)})
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    read_back("kimi_linear", model, state, tmp_path)


def test_interleaving_by_hand(tmp_path):
    """On disk column 2j is gate j, and 2j + 1 is up j."""
    model = tree({"mlp.experts.gate_up_proj": (E, 2 * F, D), "mlp.experts.gate_up_proj_bias": (E, 2 * F)})
    stack, bias = model.mlp.experts.gate_up_proj.detach(), model.mlp.experts.gate_up_proj_bias.detach()
    disk = {
        "mlp.experts.gate_up_proj": torch.empty(E, D, 2 * F),
        "mlp.experts.gate_up_proj_bias": torch.empty(E, 2 * F),
    }
    for j in range(F):
        disk["mlp.experts.gate_up_proj"][:, :, 2 * j] = stack[:, j]
        disk["mlp.experts.gate_up_proj"][:, :, 2 * j + 1] = stack[:, F + j]
        disk["mlp.experts.gate_up_proj_bias"][:, 2 * j] = bias[:, j]
        disk["mlp.experts.gate_up_proj_bias"][:, 2 * j + 1] = bias[:, F + j]
    check("gpt_oss_grouped", model, disk, tmp_path / "out")


def test_interleaved_stacks_are_cut_by_experts_only():
    """A rank that holds every expert's half of the parts' dimension has no block of the file to itself."""
    from torch.distributed.tensor import Replicate, Shard

    from ckpt_layout._layout import layouts, overlaps
    from ckpt_layout._shards import held_region

    shape = (E, 4, D)
    ((piece,), *_) = layouts(families()["gpt_oss_grouped"], "experts.gate_up_proj", shape)
    whole = torch.arange(E * 4 * D).view(shape).float()
    by_experts = held_region(shape, (2,), (1,), (Shard(0),))
    (block,) = overlaps(whole[3:], by_experts, piece)
    want = whole[3:].unflatten(1, (2, 2)).permute(0, 3, 2, 1).reshape(2, D, 4)
    assert torch.equal(block.values(torch.float32), want)
    for placement, local in ((Shard(2), whole[:, :, :2]), (Replicate(), whole)):
        assert len(list(overlaps(local, held_region(shape, (2,), (0,), (placement,)), piece))) == 1
    with pytest.raises(ValueError, match=r"interleaves 2 parts along a dimension of 4, of which this rank holds 2"):
        list(overlaps(whole[:, :2], held_region(shape, (2,), (0,), (Shard(1),)), piece))


HEADS, HALF = 2, 3


def fused_by_hand(q, k, v):
    """kimi_k25's wqkv: rows of a head of q and k in pairs, (0, half), (1, half + 1), ...; those of v as they are."""
    disk = torch.empty(3 * len(q), *q.shape[1:])
    for part, values in enumerate((q, k)):
        for head in range(HEADS):
            for j in range(HALF):
                row, mine = part * len(q) + head * 2 * HALF + 2 * j, head * 2 * HALF + j
                disk[row], disk[row + 1] = values[mine], values[mine + HALF]
    disk[2 * len(q) :] = v
    return disk


def vision(layers=2):
    size = HEADS * 2 * HALF
    shapes = {"model.vision_tower.patch_embed.pos_emb.position_embeddings": (2, 3, D)}
    for layer in range(layers):
        attention = f"model.vision_tower.layers.{layer}.attn"
        shapes |= {f"{attention}.{name}_proj.weight": (size, D) for name in "qkv"}
        shapes |= {f"{attention}.{name}_proj.bias": (size,) for name in "qkv"}
        shapes |= {f"{attention}.proj.weight": (D, size), f"model.vision_tower.layers.{layer}.norm1.weight": (D,)}
        shapes |= {f"model.vision_tower.layers.{layer}.norm2.weight": (D,)}
    return tree(shapes)


def vision_on_disk(model, layers=2):
    state = model.state_dict()
    disk = {
        "vision_tower.patch_embed.pos_emb.weight": state["model.vision_tower.patch_embed.pos_emb.position_embeddings"]
    }
    for layer in range(layers):
        block, here = f"vision_tower.encoder.blocks.{layer}", f"model.vision_tower.layers.{layer}"
        for kind in ("weight", "bias"):
            disk[f"{block}.wqkv.{kind}"] = fused_by_hand(*(state[f"{here}.attn.{name}_proj.{kind}"] for name in "qkv"))
        disk[f"{block}.wo.weight"] = state[f"{here}.attn.proj.weight"]
        disk[f"{block}.norm0.weight"] = state[f"{here}.norm1.weight"]
        disk[f"{block}.norm1.weight"] = state[f"{here}.norm2.weight"]
    return disk


VISION_CONFIG = {"model_type": "kimi_k25", "vision_config": {"num_attention_heads": HEADS}}


def test_the_vision_tower_of_kimi_k25(tmp_path):
    model = vision()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_hf(model, tmp_path / "out", config=VISION_CONFIG)
    written, want = load_file(tmp_path / "out" / "model.safetensors"), vision_on_disk(model)
    assert written.keys() == want.keys()
    for key, values in want.items():
        assert torch.equal(written[key], values), key
    read_back(None, model, state, tmp_path / "out")


def test_a_rank_has_its_rows_of_what_is_interleaved_and_in_parts(tmp_path):
    """FSDP's uneven rows of each of q, k and v, an empty shard among them: written, read, nothing twice."""
    from torch.distributed.tensor import Shard

    from ckpt_layout._layout import layouts, overlaps
    from ckpt_layout._shards import held_region

    row = families()["kimi_k25"].with_config(VISION_CONFIG)
    q, k, v = torch.randn(3, HEADS * 2 * HALF, D).unbind()
    want, written = fused_by_hand(q, k, v), torch.full((3 * len(q), D), float("nan"))
    for ranks, dim in ((5, 0), (8, 0), (2, 1)):
        written.fill_(float("nan"))
        for rank in range(ranks):
            region = held_region(q.shape, (ranks,), (rank,), (Shard(dim),))
            for name, whole in (("q", q), ("k", k), ("v", v)):
                local = whole.chunk(ranks, dim)[rank] if rank < len(whole.chunk(ranks, dim)) else whole[:0]
                (piece,) = layouts(row, f"model.vision_tower.layers.0.attn.{name}_proj.weight", q.shape)[0]
                back = torch.full_like(local, float("nan"))
                for mine, target in zip(overlaps(local, region, piece), overlaps(back, region, piece), strict=True):
                    assert written[mine.disk].isnan().all()
                    written[mine.disk] = mine.values(torch.float32)
                    target.fill(want[target.disk])
                assert torch.equal(back, local)
        assert torch.equal(written, want)


def test_what_a_row_takes_from_the_config_must_be_there(tmp_path):
    with pytest.raises(ValueError, match=r"q_proj.weight: how it lies .* vision_config.num_attention_heads in config"):
        save_hf(vision(), tmp_path / "out", family="kimi_k25")
    other = {**VISION_CONFIG, "vision_config": {"num_attention_heads": 5}}
    with pytest.raises(ValueError, match="dimension 0 must divide into 10 equal parts"):
        save_hf(vision(), tmp_path / "out", config=other)


def test_a_tensor_on_disk_that_is_not_whole_is_neither_written_nor_read(tmp_path):
    save_hf(vision(), tmp_path / "whole", config=VISION_CONFIG)
    less = vision()
    del getattr(less.model.vision_tower.layers, "0").attn.k_proj
    message = r"blocks.0.wqkv.weight: is made of 3 tensors, of which the model has only 2: .*q_proj.weight, .*v_proj"
    with pytest.raises(ValueError, match=message):
        save_hf(less, tmp_path / "out", config=VISION_CONFIG)
    with pytest.raises(ValueError, match=message):
        load_hf(less, tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_a_family_that_does_not_exist_is_answered_with_those_that_do(tmp_path):
    model = tree({"model.norm.weight": (D,)})
    message = f"family = 'mixtrall': must be one of {', '.join(sorted(families()))}, or a Family"
    with pytest.raises(ValueError, match=message):
        save_hf(model, tmp_path / "out", family="mixtrall")
    save_hf(model, tmp_path / "out", family="mixtral")
    with pytest.raises(ValueError, match=message):
        load_hf(model, tmp_path / "out", family="mixtrall")


def test_two_tensors_of_one_name_in_the_files_are_refused(tmp_path):
    model = tree({"model.layers.0.mlp.gate.weight": (E, D), "model.layers.0.block_sparse_moe.gate.weight": (E, D)})
    message = "block_sparse_moe.gate.weight: several tensors of the model go by this name in the files: .*mlp.gate"
    with pytest.raises(ValueError, match=message):
        save_hf(model, tmp_path / "out", family="mixtral")
    save_file({"model.layers.0.block_sparse_moe.gate.weight": torch.ones(E, D)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_hf(model, tmp_path, family="mixtral")


@pytest.mark.parametrize("part", [(3, 3), (-1, 3), (0, 0)])
def test_a_part_that_is_none_is_refused(part):
    with pytest.raises(ValueError, match="0 <= index < count"):
        Rule("experts.up", "x", part=part)


def test_the_router_and_the_gate_projection_are_not_confused(tmp_path):
    """`gate.weight` ends the names of both kinds."""
    model = tree({**moe("model.layers.0"), "model.layers.0.mlp.shared_experts.gate_proj.weight": (F, D)})
    blocks = {
        block.key
        for name, tensor in model.state_dict().items()
        for block in hf_blocks(name, tensor, families()["deepseek_v4"])
    }
    assert {"model.layers.0.ffn.gate.weight", "model.layers.0.ffn.shared_experts.w1.weight"} <= blocks
    assert "model.layers.0.ffn.wgate.weight" not in blocks


def test_a_router_bias_stays_fp32_in_every_family_that_has_one(tmp_path):
    names = {
        "nemotron_h": "backbone.layers.1.mixer.router.bias",
        "deepseek_v3": "model.layers.1.mlp.gate.e_score_correction_bias",
        "deepseek_v32": "model.layers.1.mlp.gate.e_score_correction_bias",
        "deepseek_v4": "model.layers.1.mlp.gate.e_score_correction_bias",
        "kimi_k25": "model.language_model.layers.1.mlp.gate.e_score_correction_bias",
        "kimi_linear": "model.layers.1.mlp.gate.e_score_correction_bias",
        "kimi_k3": "model.layers.1.mlp.gate.e_score_correction_bias",
        "glm4_moe": "model.layers.1.mlp.gate.e_score_correction_bias",
        "glm5_next": "model.layers.1.mlp.gate.e_score_correction_bias",
        "minimax_m2": "model.layers.1.mlp.e_score_correction_bias",
        "ernie4_5_moe": "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias",
    }
    for row, name in names.items():
        save_hf(tree({name: (E,), "other.weight": (2,)}), tmp_path / row, family=row, dtype=torch.bfloat16)
        dtypes = {key: value.dtype for key, value in load_file(tmp_path / row / "model.safetensors").items()}
        assert sorted(dtypes.values(), key=str) == [torch.bfloat16, torch.float32], row
        assert dtypes["other.weight"] == torch.bfloat16


def test_a_conversion_leaves_no_trace_in_what_it_was_given():
    row, tensor = families()["mixtral"], torch.arange(E * 2 * F * D).view(E, 2 * F, D).float()
    before = tensor.clone()
    first = [(b.key, b.where) for b in hf_blocks("model.layers.0.mlp.experts.gate_up_proj", tensor, row)]
    assert first == [(b.key, b.where) for b in hf_blocks("model.layers.0.mlp.experts.gate_up_proj", tensor, row)]
    assert torch.equal(tensor, before)
    rows = dict(families())
    families().clear() if isinstance(families(), dict) else None
    assert families() == rows


@pytest.mark.parametrize("disk", [("a", "b"), "x.{e}.w"])
def test_a_rule_that_interleaves_what_is_apart_is_refused(disk):
    with pytest.raises(ValueError, match="interleave = 2"):
        Rule("experts.up", disk, interleave=2)


def test_sizes_that_do_not_divide_into_parts_are_refused():
    family = Family("mine", model_types=(), rules=(Rule("experts.up", "experts.up", interleave=2),))
    with pytest.raises(ValueError, match="dimension 1 must divide into 2 equal parts"):
        list(hf_blocks("experts.up", torch.zeros(2, 3), family))

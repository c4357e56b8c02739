"""Weights from a seed: the same global values under every layout, and the distributions of the recipe."""

import attrs
import pytest
import torch

from moe_core.testing import run_ranks
from nemotron_nano import NemotronNano, presets

TINY = presets["tiny"]


def built(config, seed=0, dtype=None):
    model = NemotronNano(config, device="meta", dtype=dtype)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    model.init_weights(seed)
    return model


def test_everything_is_filled():
    model = built(attrs.evolve(TINY, pattern="MEM*E-"))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.isfinite(tensor).all(), name
    for name, buffer in model.named_buffers():
        assert not buffer.any(), name


def test_the_seed_decides_and_nothing_else():
    first, torch_state = built(TINY, seed=3).state_dict(), torch.get_rng_state()
    torch.manual_seed(99)
    again, other = built(TINY, seed=3).state_dict(), built(TINY, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if not name.endswith(("norm.weight", "norm_f.weight", ".D", "router.bias"))]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    torch.set_rng_state(torch_state)


def test_all_experts_of_all_layers_differ():
    model = built(attrs.evolve(TINY, pattern="EE", num_experts=24))
    experts = [
        expert.flatten()[:8]
        for layer in model.backbone.layers
        for stack in (layer.mixer.experts.up_proj, layer.mixer.experts.down_proj)
        for expert in stack
    ]
    assert len(torch.stack(experts).unique(dim=0)) == 2 * 2 * 24


def test_half_precision_is_drawn_in_fp32():
    exact, rounded = built(TINY).state_dict(), built(TINY, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(exact[name].to(rounded[name].dtype), rounded[name]) for name in exact)


def test_megatrons_scheme():
    config = attrs.evolve(TINY, pattern="MEM*E-", mamba_num_heads=64, mamba_head_dim=8, initializer_range=0.05)
    weights = built(config).state_dict()
    to_residual = ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")
    for name, weight in weights.items():
        if weight.numel() > 2000 and "conv1d" not in name:
            std = 0.05 / 6**0.5 if name.endswith(to_residual) else 0.05
            assert weight.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(weight.mean().item()) < 0.1 * std, name
    ssm = {name: weights[f"backbone.layers.0.mixer.ssm.{name}"] for name in ("A_log", "D", "dt_bias")}
    A, dt = ssm["A_log"].exp(), torch.nn.functional.softplus(ssm["dt_bias"])
    assert A.min() >= 1
    assert A.max() <= 16
    assert 6 < A.mean() < 11
    assert dt.min() >= 0.99e-3
    assert dt.max() <= 0.101
    assert 0.003 < dt.log().mean().exp() < 0.03  # log-uniform: its middle is 0.01
    assert (ssm["D"] == 1).all()
    conv = weights["backbone.layers.0.mixer.conv1d.weight"]
    assert conv.abs().max() <= 0.5
    assert conv.std().item() == pytest.approx(0.5 / 3**0.5, rel=0.05)


def test_hugging_faces_scheme():
    weights = built(attrs.evolve(TINY, initializer="hf", initializer_range=0.02)).state_dict()
    layer = "backbone.layers.{}.mixer.".format
    assert torch.allclose(weights[layer(0) + "ssm.A_log"].exp(), torch.arange(1.0, 9.0))
    assert weights[layer(1) + "experts.down_proj"].std().item() == pytest.approx(0.02, rel=0.05)
    bound = TINY.mamba_hidden_size**-0.5 / 5**0.5
    out = weights[layer(0) + "out_proj.weight"]
    assert out.abs().max() <= bound
    assert out.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_a_parameter_of_no_known_distribution_is_an_error():
    model = built(TINY)
    model.backbone.adapter = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"backbone\.adapter"):
        model.init_weights(0)


def test_a_large_parameter_is_drawn_in_blocks_that_differ():
    config = attrs.evolve(TINY, pattern="*", vocab_size=40_000, hidden_size=64)
    embedding = built(config).backbone.embeddings.weight
    block = (1 << 20) // 64
    assert not torch.equal(embedding[:8], embedding[block : block + 8])


def sharded(expert_layout: str, num_experts: int, seed: int):
    """The global weights of a model sharded over this world, as one rank sees them; NaN before."""
    import attrs
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from nemotron_nano import NemotronNano, presets

    config = attrs.evolve(presets["tiny"], num_experts=num_experts)
    model = NemotronNano(config, device="meta")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "ep"))
    everyone = mesh._flatten("everyone")
    for layer in model.backbone.layers:
        experts = getattr(layer.mixer, "experts", None)
        if experts is not None and expert_layout != "replicated":
            for name, stack in list(experts.named_parameters()):
                local = distribute_tensor(stack.detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
                experts.register_parameter(name, torch.nn.Parameter(local))
            if expert_layout == "fsdp over ep":
                fully_shard(experts, mesh=mesh["outer"])
        ignored = set() if experts is None or expert_layout != "ep" else set(experts.parameters())
        fully_shard(layer, mesh=everyone, ignored_params=ignored)
    fully_shard(model, mesh=everyone, ignored_params=set(model.parameters()) - {model.lm_head.weight})
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).fill_(float("nan"))
    model.init_weights(seed)
    kinds = {type(p.placements[0]).__name__ for p in model.parameters() if isinstance(p, DTensor)}
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}
    return kinds, whole if dist.get_rank() == 1 else None


@pytest.mark.parametrize(
    ("layout", "world", "num_experts"),
    [("replicated", 4, 5), ("ep", 4, 7), ("fsdp over ep", 4, 10), ("fsdp over ep", 4, 5)],
)
def test_every_layout_gets_the_same_global_weights(layout, world, num_experts):
    expected = dict(built(attrs.evolve(TINY, num_experts=num_experts), seed=11).named_parameters())
    kinds, whole = run_ranks(sharded, world, layout, num_experts, 11, timeout=60)[1]
    assert ("_StridedShard" in kinds) == (layout == "fsdp over ep")
    assert whole.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(whole[name], weight), name


def small_at(ep: int, seed: int):
    """Digests of the global weights of `small` under expert parallelism and FSDP, as one rank sees them."""
    import hashlib

    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from ep_dispatch import shard_experts
    from ep_mesh import MeshConfig, build_mesh, resolve_sub_mesh
    from fsdp_ep import fully_shard_moe
    from nemotron_nano import NemotronNano, presets

    mesh = build_mesh(MeshConfig(ep=ep).resolve(dist.get_world_size()), "cpu")
    ep_mesh = resolve_sub_mesh(mesh, "ep")
    model = shard_experts(NemotronNano(presets["small"], device="meta"), ep_mesh)
    fully_shard_moe(
        model,
        dp_mesh=resolve_sub_mesh(mesh, "dp_shard"),
        ep_mesh=ep_mesh,
        expert_dp_mesh=resolve_sub_mesh(mesh, "dp_shard_mod_ep"),
        blocks=list(model.backbone.layers),
    )
    model.to_empty(device="cpu")
    model.init_weights(seed)
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {n: hashlib.sha256(p.detach().contiguous().numpy().tobytes()).hexdigest() for n, p in whole.items()}


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_small_has_the_same_weights_at_every_degree_bit_for_bit(ep):
    import hashlib

    model = built(presets["small"], seed=5)
    expected = {n: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for n, p in model.named_parameters()}
    assert run_ranks(small_at, 4, ep, 5, timeout=120)[2] == expected


def test_what_a_file_holds_is_not_drawn_again(tmp_path):
    from ckpt_layout import load_hf, save_hf

    model, other = built(TINY, seed=1), built(TINY, seed=2)
    save_hf(model, tmp_path, family="nemotron_h", config=TINY.to_hf())
    load_hf(other, tmp_path, family="nemotron_h")
    for name, weight in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_step_from_scratch_is_finite_and_moves_everything(dtype):
    model = built(attrs.evolve(TINY, pattern="MEM*E-", num_experts=4), dtype=dtype)
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    assert 4 < loss.item() < 8  # a uniform guess among 256 is at 5.5
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.norm() > 0, name

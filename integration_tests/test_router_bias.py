"""The router bias stays equal bit for bit on all ranks, and equal to that of one process that sees all their data."""

import pytest
import torch

STEPS, RATE = 10, 0.01


def biases_after_training(world_size, dp_replicate, ep, axis, device_type):
    """Two MoE layers with experts on `ep` ranks, each rank on data of its own; loads summed over `axis`.

    Returns the biases by layer, and the loads that the last update told.
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    from ep_dispatch import shard_experts
    from ep_mesh import MeshConfig, build_mesh, resolve_sub_mesh
    from moe_core import MoE, update_router_bias

    rank, world = dist.get_rank(), dist.get_world_size()
    config = MeshConfig(dp_replicate=dp_replicate, ep=ep).resolve(world, num_experts=7)
    mesh = build_mesh(config, device_type)
    torch.manual_seed(0)
    layers = nn.ModuleList([MoE(dim=12, num_experts=7, top_k=top_k, hidden_dim=8) for top_k in (2, 3)])
    layers = shard_experts(layers.to(device_type), resolve_sub_mesh(mesh, "ep"))
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        # another number of tokens on each rank, leaning another way, none on the last one
        batches = [torch.randn(5 * i + 3, 12, generator=generator) + 0.3 * i for i in range(world_size - 1)]
        batches.append(torch.empty(0, 12))
        hidden = (torch.cat(batches) if world == 1 else batches[rank]).to(device_type).requires_grad_()
        sum(layer(hidden) for layer in layers).sum().backward()
        loads = update_router_bias(layers, resolve_sub_mesh(mesh, axis), rate=RATE)
    assert all(int(layer.router.tokens_per_expert.sum()) == 0 for layer in layers)
    return [layer.router.bias.cpu() for layer in layers], [load.tolist() for load in loads.values()]


LAYOUTS = [(2, 1, 1), (2, 1, 2), (4, 1, 1), (4, 1, 2), (4, 1, 4), (4, 2, 1), (4, 2, 2)]


@pytest.fixture(scope="module")
def of_one_process(on_ranks, device_type):
    def biases(world_size):
        return on_ranks(biases_after_training, 1, world_size, 1, 1, "dp", device_type)[0]

    return {world_size: biases(world_size) for world_size in (2, 4)}


@pytest.mark.parametrize(("world_size", "dp_replicate", "ep"), LAYOUTS)
def test_the_bias_is_that_of_one_process_on_every_rank(
    of_one_process, on_ranks, device_type, world_size, dp_replicate, ep
):
    expected, loads = of_one_process[world_size]
    results = on_ranks(biases_after_training, world_size, world_size, dp_replicate, ep, "dp", device_type)
    tokens = sum(5 * i + 3 for i in range(world_size - 1))
    assert [sum(load) for load in loads] == [2 * tokens, 3 * tokens]
    assert all(bias.abs().max() >= 5 * RATE for bias in expected), "the loads are too even to tell anything"
    for biases, told in results:
        assert told == loads
        assert all(torch.equal(one, other) for one, other in zip(biases, expected, strict=True))


@pytest.mark.parametrize(
    ("dp_replicate", "ep", "axis"),
    [(1, 2, "ep"), (1, 2, "dp_shard_mod_ep"), (2, 2, "dp_shard"), (2, 1, "dp_replicate")],
)
def test_a_group_that_leaves_ranks_out_is_seen(of_one_process, on_ranks, device_type, dp_replicate, ep, axis):
    """What the test above must catch."""
    expected, _ = of_one_process[4]
    results = on_ranks(biases_after_training, 4, 4, dp_replicate, ep, axis, device_type)
    biases = [torch.cat(biases) for biases, _ in results]
    assert any(not torch.equal(biases[0], other) for other in biases[1:]), "ranks agree though they count apart"
    assert any(not torch.equal(bias, torch.cat(expected)) for bias in biases)

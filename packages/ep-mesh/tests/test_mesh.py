"""Meshes on real gloo ranks; warnings are errors there too."""

import pytest

from ep_mesh import MeshConfig
from moe_core.testing import run_ranks

_NAMES = ("dp_replicate", "dp_shard_mod_ep", "ep", "dp_shard", "dp")


def _built(degrees):
    import warnings

    with warnings.catch_warnings(action="error"):
        return _looked_up(degrees)


def _looked_up(degrees):
    import torch.distributed as dist

    from ep_mesh import build_mesh, rank_table, resolve_sub_mesh

    config = MeshConfig(**degrees).resolve(dist.get_world_size())
    mesh = build_mesh(config, "cpu")
    groups_before = dist.distributed_c10d._world.group_count
    ranks = {name: resolve_sub_mesh(mesh, name).mesh.flatten().tolist() for name in _NAMES}
    pairs = {}
    for inner in ("dp_shard", "dp_shard_mod_ep"):
        pair = resolve_sub_mesh(mesh, ("dp_replicate", inner))
        pairs[inner] = (pair.mesh.tolist(), pair.mesh_dim_names)
        assert [dist.get_process_group_ranks(group) for group in pair.get_all_groups()] == [
            ranks["dp_replicate"],
            ranks[inner],
        ]
    assert dist.distributed_c10d._world.group_count == groups_before, "a look-up created a process group"
    row = rank_table(config, config.world_size)[dist.get_rank()]
    return mesh.mesh_dim_names, ranks, pairs, row


@pytest.mark.parametrize(
    ("world_size", "degrees"),
    [
        (1, {}),
        (2, {"ep": 2}),
        (4, {}),
        (4, {"ep": 2}),
        (4, {"ep": 4}),
        (4, {"dp_replicate": 2, "ep": 2}),
        (8, {"dp_replicate": 2, "ep": 2}),
    ],
)
def test_all_names_resolve_at_every_degree(world_size, degrees):
    dp_replicate, ep = degrees.get("dp_replicate", 1), degrees.get("ep", 1)
    dp_shard = world_size // dp_replicate
    for rank, (axes, ranks, pairs, row) in enumerate(run_ranks(_built, world_size, degrees)):
        assert axes == ("dp_replicate", "dp_shard_mod_ep", "ep")
        replica, shard = divmod(rank, dp_shard)
        first = replica * dp_shard
        own_experts = list(range(first + shard % ep, first + dp_shard, ep))
        assert ranks["dp"] == list(range(world_size))
        assert ranks["dp_shard"] == list(range(first, first + dp_shard))
        assert ranks["ep"] == [first + shard // ep * ep + i for i in range(ep)]
        assert ranks["dp_shard_mod_ep"] == own_experts
        assert pairs["dp_shard"] == (
            [[r * dp_shard + s for s in range(dp_shard)] for r in range(dp_replicate)],
            ("dp_replicate", "dp_shard"),
        )
        assert pairs["dp_shard_mod_ep"][1] == ("dp_replicate", "dp_shard_mod_ep")
        assert pairs["dp_shard_mod_ep"][0][replica] == own_experts
        assert list(row.all_to_all_peers) == ranks["ep"]
        assert list(row.gather_peers) == ranks["dp_shard"]
        assert list(row.expert_gather_peers) == ranks["dp_shard_mod_ep"]
        assert row.data_shard == rank


def _refusals():
    from torch.distributed.device_mesh import init_device_mesh

    from ep_mesh import MeshConfig, MeshConfigError, build_mesh, resolve_sub_mesh

    messages = []

    def refused(call, *args):
        try:
            call(*args)
        except MeshConfigError as error:
            messages.append(str(error))
        else:
            messages.append("accepted")

    refused(build_mesh, MeshConfig(), "cpu")
    refused(build_mesh, MeshConfig().resolve(4), "cpu")
    mesh = build_mesh(MeshConfig(ep=2).resolve(2), "cpu")
    refused(resolve_sub_mesh, mesh, "dp_cp")
    refused(resolve_sub_mesh, mesh, ("dp_shard", "ep"))
    foreign = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    refused(resolve_sub_mesh, foreign, "dp_shard")
    foreign["outer", "inner"]._flatten("all")
    assert resolve_sub_mesh(foreign, "inner").size() == 2
    assert resolve_sub_mesh(foreign, "all").mesh.tolist() == [0, 1]
    assert resolve_sub_mesh(foreign["inner"], "inner").size() == 2
    return messages


def test_what_is_refused_says_what_is_valid():
    unresolved, other_world, unknown, overlap, foreign = run_ranks(_refusals, 2)[0]
    assert "resolve(world_size)" in unresolved
    assert "4 ranks" in other_world
    assert "has 2" in other_world
    for name in _NAMES:
        assert name in unknown
    assert "must not share" in overlap
    assert "axes: outer, inner" in foreign
    assert "aliases: none" in foreign


def _mesh_of(rank_devices):
    import torch.distributed as dist

    from ep_mesh import build_mesh, resolve_sub_mesh

    mesh = build_mesh(MeshConfig(**rank_devices).resolve(dist.get_world_size()), "cpu")
    return [resolve_sub_mesh(mesh, "dp").get_local_rank() for _ in range(2)]


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_ep_peers_read_different_data(ep):
    assert run_ranks(_mesh_of, 4, {"ep": ep}) == [[0, 0], [1, 1], [2, 2], [3, 3]]

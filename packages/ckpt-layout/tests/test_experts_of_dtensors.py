"""`expert_range` and `split_experts` on DTensors that torch made, on real ranks: ids, values, no collective."""

import pytest
import torch

from ckpt_layout import expert_range, split_experts
from moe_core.testing import run_ranks


def stack(experts):
    """Expert e holds e + 0.01 row + 0.001 column."""
    rows, columns = torch.arange(4).view(1, 4, 1), torch.arange(6).view(1, 1, 6)
    return torch.arange(experts).view(-1, 1, 1) + rows * 0.01 + columns * 0.001


KINDS = ["plain", "replicated", "shard", "inner", "nested", "shard + inner", "fsdp", "hsdp", "ep", "ep + fsdp"]
COUNTS = [5, 10, 8]


def shards_of_all_kinds():
    """{(kind, experts): this rank's ({expert: values}, collectives)} for every way of sharding."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from ckpt_layout import expert_range, split_experts
    from moe_core.testing import count_collectives

    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "ep"))

    def fsdp(tensor, mesh):
        holder = nn.Module()
        holder.experts = nn.Parameter(tensor)
        fully_shard(holder, mesh=mesh)
        return holder.experts

    def expert_parallel(full):
        local = full.chunk(2)[grid.get_local_rank("ep")].clone() if len(full) > 1 else full.clone()
        return DTensor.from_local(local, grid["ep"], (Shard(0),), shape=full.shape, stride=full.stride())

    made = {
        "plain": lambda full: full,
        "replicated": lambda full: distribute_tensor(full, flat, (Replicate(),)),
        "shard": lambda full: distribute_tensor(full, flat, (Shard(0),)),
        "inner": lambda full: distribute_tensor(full, grid, (Replicate(), Shard(2))),
        "nested": lambda full: distribute_tensor(full, grid, (Shard(0), Shard(0))),
        "shard + inner": lambda full: distribute_tensor(full, grid, (Shard(0), Shard(1))),
        "fsdp": lambda full: fsdp(full, flat),
        "hsdp": lambda full: fsdp(full, grid),
        "ep": expert_parallel,
        "ep + fsdp": lambda full: fsdp(expert_parallel(full), grid["outer"]),
    }

    def shards_of(tensor):
        with count_collectives() as count:
            views = split_experts(tensor)
            ids = expert_range(tensor)
        assert list(views) == list(ids)
        if views:
            first = next(iter(views.values()))
            assert first.data_ptr() == (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()
        return {expert: view.detach().clone() for expert, view in views.items()}, count.total

    return {(kind, experts): shards_of(made[kind](stack(experts))) for kind in KINDS for experts in COUNTS}


@pytest.fixture(scope="module")
def every():
    return run_ranks(shards_of_all_kinds, 4)


SIZES = {
    "plain": lambda E: [E] * 4,
    "replicated": lambda E: [E] * 4,
    "inner": lambda E: [E] * 4,
    "shard": lambda E: [len(c) for c in torch.arange(E).chunk(4)] + [0] * (4 - len(torch.arange(E).chunk(4))),
}


@pytest.mark.parametrize("experts", COUNTS)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_values(every, kind, experts):
    full = stack(experts)
    results = [of_rank[kind, experts] for of_rank in every]
    seen = []
    for views, collectives in results:
        assert collectives == 0
        for expert, values in views.items():
            seen.append(expert)
            if kind == "inner":
                assert any(torch.equal(values, full[expert][:, half]) for half in (slice(0, 3), slice(3, 6)))
            elif kind == "shard + inner":
                assert any(torch.equal(values, full[expert][half]) for half in (slice(0, 2), slice(2, 4)))
            else:
                assert torch.equal(values, full[expert])
    copies = {"plain": 4, "replicated": 4, "inner": 4, "hsdp": 2, "ep": 2, "shard + inner": 2}.get(kind, 1)
    assert sorted(seen) == sorted(list(range(experts)) * copies)
    if kind in SIZES or kind == "fsdp":
        assert [len(views) for views, _ in results] == SIZES[kind if kind in SIZES else "shard"](experts)


def test_the_uneven_table(every):
    assert [list(of_rank["fsdp", 5][0]) for of_rank in every] == [[0, 1], [2, 3], [4], []]


def test_a_shard_of_the_wrong_length_is_named():
    def mislabelled():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        from ckpt_layout import split_experts

        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(
            torch.zeros(3, 2), mesh, (Shard(0),), run_check=False, shape=torch.Size((8, 2)), stride=(2, 1)
        )
        try:
            split_experts(tensor)
        except ValueError as error:
            return str(error)

    messages = run_ranks(mislabelled, 2)
    assert messages[1] == "Expected local tensor first dimension to be 4 (experts 4:8), got 3"


def test_experts_that_are_not_consecutive_have_no_range():
    def strided():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.placement_types import _StridedShard

        from ckpt_layout import expert_range, split_experts

        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(
            torch.zeros(4, 2), mesh, (_StridedShard(0, split_factor=2),), shape=torch.Size((8, 2)), stride=(2, 1)
        )
        try:
            expert_range(tensor)
        except ValueError as error:
            return list(split_experts(tensor)), str(error)

    results = run_ranks(strided, 2)
    assert [ids for ids, _ in results] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert "experts 0:2, 4:6, which is no single range" in results[0][1]


def test_a_plain_tensor_holds_all_experts():
    tensor = stack(3)
    assert expert_range(tensor) == range(3)
    assert torch.equal(split_experts(tensor)[2], tensor[2])

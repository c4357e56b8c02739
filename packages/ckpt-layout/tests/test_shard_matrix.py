"""Who holds which expert, on four real ranks: uneven FSDP shards through two families, beside layouts that are even.

Every rank-case compares ids, values and keys with what `torch.chunk` gives. The same cases under a balanced split in
place of `torch.chunk`'s are the negative control.
"""

import pytest
import torch

from moe_core.testing import run_ranks

F, D = 6, 4
SIZES = (5, 10, 8)
FAMILIES = ("kimi_linear", "kimi_k3")
CONTROLS = ("replicated", "inner axis", "hsdp", "ep", "ep + shard", "nested")


def stack(experts, rows, columns, start):
    return start + torch.arange(experts * rows * columns, dtype=torch.float32).view(experts, rows, columns)


def cases_of_this_rank():
    """{balanced: {case: None or what is wrong}} of this rank, under `torch.chunk`'s split and under a balanced one."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from ckpt_layout import _shards, balanced_expert_range, expert_range, families, hf_blocks, split_experts
    from moe_core.testing import count_collectives

    rank = dist.get_rank()
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "ep"))
    outer, ep = grid.get_coordinate()

    def fsdp(tensor, mesh):
        module = nn.Module()
        module.experts = nn.Parameter(tensor)
        fully_shard(module, mesh=mesh)
        return module.experts

    def chunk(tensor, parts, index, dim=0):
        chunks = tensor.chunk(parts, dim)
        return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)

    def on_ep(tensor):
        local = chunk(tensor, 2, ep).clone()
        return DTensor.from_local(local, grid["ep"], (Shard(0),), shape=tensor.shape, stride=tensor.stride())

    # (the sharded stack, what this rank must hold of it, in which dimension it was cut)
    layouts = {
        "shard": lambda t: (fsdp(t, flat), chunk(t, 4, rank)),
        "replicated": lambda t: (distribute_tensor(t, flat, (Replicate(),)), t),
        "inner axis": lambda t: (distribute_tensor(t, grid, (Replicate(), Shard(2))), chunk(t, 2, ep, 2)),
        "hsdp": lambda t: (fsdp(t, grid), chunk(t, 2, ep)),
        "ep": lambda t: (on_ep(t), chunk(t, 2, ep)),
        "ep + shard": lambda t: (fsdp(on_ep(t), grid["outer"]), chunk(chunk(t, 2, ep), 2, outer)),
        "nested": lambda t: (distribute_tensor(t, grid, (Shard(0), Shard(0))), chunk(chunk(t, 2, outer), 2, ep)),
    }

    def tensors(layout, experts):
        """The two stacks under `layout`, what they must hold, and the ids that go with it."""
        ids = torch.arange(experts, dtype=torch.float32).view(-1, 1, 1).expand(-1, 2, 2).contiguous()
        held_ids = [int(i) for i in layouts[layout](ids)[1][:, 0, 0]]
        up, down = stack(experts, 2 * F, D, 0), stack(experts, D, F, 5000)
        return layouts[layout](up), layouts[layout](down), held_ids

    def check_split(layout, experts):
        (up, held), _, ids = tensors(layout, experts)
        with count_collectives() as count:
            views = split_experts(up)
            listed = list(expert_range(up))
        assert count.total == 0
        assert list(views) == listed == ids, f"holds {list(views)}, not {ids}"
        for view, values in zip(views.values(), held, strict=True):
            assert torch.equal(view, values)

    def blocks(name, tensor, family):
        with count_collectives() as count:
            found = {block.key: block for block in hf_blocks(f"model.layers.3.mlp.{name}", tensor, families()[family])}
        assert count.total == 0
        return found

    def check_keys(layout, experts, family):
        """The adapter's own split: which experts it gives this shard to."""
        _, (down, _), ids = tensors(layout, experts)
        prefix = "model.layers.3.block_sparse_moe.experts."
        keys = list(blocks("experts.down_proj", down, family))
        assert keys == [f"{prefix}{i}.w2.weight" for i in ids], f"gives {keys}, holds {ids}"

    def check_hf(layout, experts, family):
        """Keys and values as they go into the files."""
        (up, held_up), (down, held_down), ids = tensors(layout, experts)
        prefix = "model.layers.3.block_sparse_moe.experts."
        want = {}
        for i, values in zip(ids, held_up, strict=True):
            want[f"{prefix}{i}.w1.weight"], want[f"{prefix}{i}.w3.weight"] = values[:F], values[F:]
        for i, values in zip(ids, held_down, strict=True):
            want[f"{prefix}{i}.w2.weight"] = values
        found = blocks("experts.gate_up_proj", up, family) | blocks("experts.down_proj", down, family)
        assert set(found) == set(want)
        for key, values in want.items():
            assert torch.equal(found[key].values, values), key

    def control(layout, experts):
        check_split(layout, experts)
        for family in FAMILIES:
            check_keys(layout, experts, family)
            check_hf(layout, experts, family)

    cases = {}
    for experts in SIZES:
        cases[f"split/{experts}"] = lambda e=experts: check_split("shard", e)
        for family in FAMILIES:
            cases[f"{family} split/{experts}"] = lambda e=experts, f=family: check_keys("shard", e, f)
            cases[f"{family} to HF/{experts}"] = lambda e=experts, f=family: check_hf("shard", e, f)
        for layout in CONTROLS:
            cases[f"{layout}/{experts}"] = lambda e=experts, name=layout: control(name, e)

    def outcome_of(case):
        try:
            case()
        except (AssertionError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    outcomes = {False: {name: outcome_of(case) for name, case in cases.items()}}
    original, _shards.chunk_range = _shards.chunk_range, balanced_expert_range
    try:
        outcomes[True] = {name: outcome_of(case) for name, case in cases.items()}
    finally:
        _shards.chunk_range = original
    return outcomes


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(cases_of_this_rank, 4)


def test_every_rank_case_has_its_ids_values_and_keys(outcomes):
    results = [of_rank[False] for of_rank in outcomes]
    assert sum(len(outcome) for outcome in results) == 132
    wrong = {(rank, name): what for rank, outcome in enumerate(results) for name, what in outcome.items() if what}
    assert not wrong


def test_a_balanced_split_fails_exactly_the_uneven_shards(outcomes):
    results = [of_rank[True] for of_rank in outcomes]
    wrong = {(rank, name): what for rank, outcome in enumerate(results) for name, what in outcome.items() if what}
    assert len(wrong) == 25
    # 5 experts: ranks 1 to 3; 10: ranks 2 and 3
    assert {(rank, name.split("/")[1]) for rank, name in wrong} == {(1, "5"), (2, "5"), (3, "5"), (2, "10"), (3, "10")}
    assert not any(name.split("/")[0] in CONTROLS for _, name in wrong)
    assert wrong[1, "split/5"].endswith("Expected local tensor first dimension to be 1 (experts 2:3), got 2")
    # one expert each way, but another one: a count alone would not notice
    assert wrong[2, "split/5"].startswith("AssertionError: holds [3], not [4]")

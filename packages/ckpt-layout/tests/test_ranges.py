"""Ranges against `torch.chunk`, and regions against data that was really split."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_layout import balanced_expert_range, chunk_range, get_sharded_expert_range, local_blocks
from ckpt_layout._shards import held_region, runs_length
from moe_core.testing import run_ranks


@pytest.mark.parametrize("of", [chunk_range, get_sharded_expert_range])
def test_every_size_and_number_of_parts_splits_like_torch_chunk(of):
    for size in range(131):
        for parts in range(1, 33):
            chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)] if size else []
            chunks += [[]] * (parts - len(chunks))
            assert [list(of(size, parts, index)) for index in range(parts)] == chunks


@pytest.mark.parametrize(
    ("experts", "ranks", "sizes"),
    [
        (5, 4, [2, 2, 1, 0]),
        (10, 4, [3, 3, 3, 1]),
        (60, 2, [30, 30]),
        (60, 8, [8] * 7 + [4]),
        (64, 24, [3] * 21 + [1, 0, 0]),
        (128, 12, [11] * 11 + [7]),
    ],
)
def test_known_sizes(experts, ranks, sizes):
    assert [len(get_sharded_expert_range(experts, ranks, rank)) for rank in range(ranks)] == sizes


def test_an_empty_range_stands_at_the_end():
    assert get_sharded_expert_range(5, 4, 3) == range(5, 5)
    assert get_sharded_expert_range(3, 4, 3).start == 3


def test_balanced_ownership_covers_all_and_differs_by_one_at_most():
    for experts in range(131):
        for ranks in range(1, 33):
            owned = [balanced_expert_range(experts, ranks, rank) for rank in range(ranks)]
            assert [expert for each in owned for expert in each] == list(range(experts))
            sizes = [len(each) for each in owned]
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)
    assert [len(balanced_expert_range(5, 4, rank)) for rank in range(4)] == [2, 1, 1, 1]


def test_the_label_says_that_it_chooses_nothing():
    assert "Do not use it to choose a placement" in get_sharded_expert_range.__doc__


@pytest.mark.parametrize("arguments", [(-1, 2, 0), (4, 0, 0), (4, 2, 2), (4, 2, -1)])
@pytest.mark.parametrize("of", [chunk_range, get_sharded_expert_range, balanced_expert_range])
def test_arguments_out_of_range_are_refused(of, arguments):
    with pytest.raises(ValueError, match="must be"):
        of(*arguments)


def parts(values, count):
    chunks = list(values.chunk(count)) if values.numel() else []
    return chunks + [values[:0]] * (count - len(chunks))


def indices(runs):
    return [index for run in runs for index in run]


def test_fsdp_over_an_expert_parallel_stack_is_named_by_content():
    placements = (_StridedShard(0, split_factor=1), Shard(0))
    for ep in (1, 2, 3, 4):
        placements = (_StridedShard(0, split_factor=ep), Shard(0))
        for fsdp in (1, 2, 3, 4):
            for experts in range(1, 34):
                owned = parts(torch.arange(experts), ep)
                for i in range(fsdp):
                    for j in range(ep):
                        held = parts(owned[j], fsdp)[i].tolist()
                        region = held_region((experts, 7), (fsdp, ep), (i, j), placements)
                        assert indices(region[0]) == held
                        assert indices(region[1]) == list(range(7))


def test_every_index_is_held_once_for_any_nesting():
    shape, mesh = (11, 6), (2, 3, 2)
    for placements, copies in (
        ((Shard(0), Shard(0), Shard(0)), 1),
        ((Replicate(), Shard(0), Shard(1)), 2),
        ((Replicate(), _StridedShard(0, split_factor=2), Shard(0)), 2),
        ((_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=2), Shard(0)), 1),
        ((_StridedShard(0, split_factor=5), Replicate(), Replicate()), 6),
    ):
        seen = torch.zeros(shape, dtype=torch.int64)
        for a in range(2):
            for b in range(3):
                for c in range(2):
                    rows, columns = held_region(shape, mesh, (a, b, c), placements)
                    if runs_length(rows) and runs_length(columns):
                        seen[torch.tensor(indices(rows))[:, None], torch.tensor(indices(columns))] += 1
        assert (seen == copies).all(), placements


def shape_and_blocks(case):
    """What each rank of (2, 2) finds in its shard of an uneven matrix; and that it may write there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(9 * 6).view(9, 6)
    if case == "several runs":
        # rows 0:3, 3:6 and 6:9, each cut in two
        rank = mesh.get_coordinate()[0]
        rows = torch.cat([third.chunk(2)[rank] for third in whole.chunk(3)])
        placements = (_StridedShard(0, split_factor=3), Replicate())
        tensor = DTensor.from_local(rows, mesh, placements, shape=whole.shape, stride=whole.stride(), run_check=False)
    elif case == "plain":
        tensor = whole.clone()
    elif case == "empty":
        tensor = distribute_tensor(whole[:2], mesh, (Shard(0), Shard(0)))
    else:
        rows_and_columns = {"rows": (Shard(0), Shard(0)), "both": (Shard(0), Shard(1)), "half": (Replicate(), Shard(0))}
        tensor = distribute_tensor(whole, mesh, rows_and_columns[case])
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    blocks = list(local_blocks(tensor))
    assert all(torch.equal(values, whole[where]) for values, where in blocks)
    assert sum(values.numel() for values, _ in blocks) == local.numel()
    for values, _ in blocks:
        values.fill_(-1)
    assert (local == -1).all()
    return [[(part.start, part.stop) for part in where] for _, where in blocks]


@pytest.mark.parametrize(
    ("case", "first", "last"),
    [
        ("plain", [[(0, 9), (0, 6)]], [[(0, 9), (0, 6)]]),
        ("rows", [[(0, 3), (0, 6)]], [[(7, 9), (0, 6)]]),
        ("both", [[(0, 5), (0, 3)]], [[(5, 9), (3, 6)]]),
        ("half", [[(0, 5), (0, 6)]], [[(5, 9), (0, 6)]]),
        ("empty", [[(0, 1), (0, 6)]], []),
        (
            "several runs",
            [[(0, 2), (0, 6)], [(3, 5), (0, 6)], [(6, 8), (0, 6)]],
            [[(2, 3), (0, 6)], [(5, 6), (0, 6)], [(8, 9), (0, 6)]],
        ),
    ],
)
def test_blocks_of_a_shard_are_views_of_it(case, first, last):
    results = run_ranks(shape_and_blocks, 4, case)
    assert (results[0], results[3]) == (first, last)

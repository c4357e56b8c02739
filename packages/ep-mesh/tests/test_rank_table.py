"""The rank table and the command that prints it."""

from importlib.metadata import version

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_mesh import MeshConfig, rank_table
from ep_mesh._cli import main


def test_hsdp_with_ep_on_eight_ranks():
    rows = rank_table(MeshConfig(dp_replicate=2, ep=2), 8, num_experts=5)
    assert [row.rank for row in rows] == list(range(8))
    assert [tuple(row.coordinates.values()) for row in rows] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip
    assert [row.dp_shard for row in rows] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [row.experts for row in rows] == [range(3), range(3, 5)] * 4
    assert rows[6].all_to_all_peers == (6, 7)
    assert rows[6].gather_peers == (4, 5, 6, 7)
    assert rows[6].expert_gather_peers == (4, 6)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    dp_replicate=st.integers(1, 3),
    expert_replicas=st.integers(1, 4),
    ep=st.integers(1, 4),
    others=st.sampled_from([{}, {"tp": 2}, {"pp": 2, "cp": 3}]),
    more_experts=st.integers(0, 3),
)
def test_groups_partition_the_world_and_experts_the_group(dp_replicate, expert_replicas, ep, others, more_experts):
    others = others if ep == 1 else {}
    config = MeshConfig(dp_replicate=dp_replicate, dp_shard=expert_replicas * ep, ep=ep, **others)
    world_size, num_experts = config.world_size, ep * (1 + more_experts)
    rows = rank_table(config, world_size, num_experts)
    assert [row.rank for row in rows] == list(range(world_size))
    for name, size in [
        ("all_to_all_peers", ep),
        ("gather_peers", expert_replicas * ep),
        ("expert_gather_peers", expert_replicas),
    ]:
        groups = {getattr(row, name) for row in rows}
        assert sorted(rank for group in groups for rank in group) == list(range(world_size))
        assert {len(group) for group in groups} == {size}
        assert all(row.rank in getattr(row, name) for row in rows)
    for row in rows:
        owned = [rows[peer].experts for peer in row.all_to_all_peers]
        assert [expert for experts in owned for expert in experts] == list(range(num_experts))
        assert len({rows[peer].data_shard for peer in row.gather_peers}) == len(row.gather_peers)
        assert {rows[peer].experts for peer in row.expert_gather_peers} == {row.experts}
        assert set(row.all_to_all_peers) & set(row.expert_gather_peers) == {row.rank}
    assert {row.data_shard for row in rows} == set(range(dp_replicate * expert_replicas * ep))


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_every_rank_reads_its_own_data_at_every_ep_degree(ep):
    rows = rank_table(MeshConfig(ep=ep), 4)
    assert [row.data_shard for row in rows] == [0, 1, 2, 3]
    assert all(row.experts is None for row in rows)


def test_model_parallel_ranks_share_their_data():
    rows = rank_table(MeshConfig(pp=2, tp=2), 8)
    assert list(rows[0].coordinates) == ["pp", "dp_replicate", "dp_shard_mod_ep", "ep", "tp"]
    assert [row.data_shard for row in rows] == [0, 0, 1, 1] * 2


def test_the_command_prints_the_table(capsys):
    assert main(["show", "--world-size", "16", "--dp-shard", "8", "--ep", "4", "--num-experts", "60"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 17
    # rank, dp_replicate, dp_shard_mod_ep, ep, experts, data shard, all-to-all, gathers, gathers of experts
    assert lines[1] == ["0", "0", "0", "0", "0-14", "0", "0-3", "0-7", "0-4:4"]
    assert lines[16] == ["15", "1", "1", "3", "45-59", "15", "12-15", "8-15", "11-15:4"]


def test_the_command_says_what_is_wrong_and_exits_with_2(capsys):
    assert main(["show", "--world-size", "4", "--ep", "3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "ep = 3" in captured.err
    assert "1, 2, 4" in captured.err


def test_the_command_tells_all_that_is_wrong(capsys):
    assert main(["show", "--world-size", "8", "--dp-shard", "4", "--dp-replicate", "1", "--ep", "3"]) == 2
    product, divisor = capsys.readouterr().err.splitlines()
    assert "dp_shard = 4" in product
    assert "ep = 3" in divisor
    assert main(["show", "--world-size", "8", "--tp", "0"]) == 2
    assert "tp = 0" in capsys.readouterr().err


def test_the_command_prints_its_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"ep-mesh {version('ep-mesh')}\n"

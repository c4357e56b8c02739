"""Rules between degrees: no process group, no torch."""

import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_mesh import MeshConfig, MeshConfigError


@pytest.mark.parametrize(
    ("degrees", "world_size", "expected"),
    [
        ({}, 1, (1, 1)),
        ({}, 8, (1, 8)),
        ({"ep": 4}, 8, (1, 8)),
        ({"dp_replicate": 2, "ep": 2}, 12, (2, 6)),
        ({"dp_replicate": -1, "dp_shard": 4}, 12, (3, 4)),
        ({"tp": 2, "cp": 3}, 12, (1, 2)),
        ({"dp_replicate": 3, "dp_shard": 4, "ep": 4}, 12, (3, 4)),
    ],
)
def test_minus_one_takes_what_the_others_leave(degrees, world_size, expected):
    resolved = MeshConfig(**degrees).resolve(world_size)
    assert (resolved.dp_replicate, resolved.dp_shard) == expected
    assert resolved.resolve(world_size) == resolved
    assert resolved.world_size == world_size


@pytest.mark.parametrize(
    ("degrees", "world_size", "num_experts", "key", "said"),
    [
        ({"dp_shard": 4, "ep": 3}, 4, None, "ep", ["3", "dp_shard = 4", "1, 2, 4"]),
        ({"ep": 8}, 4, None, "ep", ["8", "dp_shard = 4", "1, 2, 4"]),
        ({"dp_shard": 4, "ep": 4}, 4, 5, "ep", ["5 experts on 4 ranks", "2, 2, 1, 0", "1, 2"]),
        ({"dp_shard": 4, "ep": 4}, 4, 6, "ep", ["2, 2, 2, 0", "1, 2"]),
        ({"dp_shard": 4, "ep": 4}, 4, 3, "ep", ["1, 1, 1, 0", "1, 2"]),
        ({"dp_replicate": -1, "dp_shard": -1}, 4, None, "dp_replicate", ["only one", "-1"]),
        ({"dp_replicate": 3}, 4, None, "dp_shard", ["dp_replicate 3", "world size 4"]),
        ({"dp_shard": 2, "ep": 2}, 4, None, "dp_shard", ["world size 4", "no factor of the world", "dp_shard = 4"]),
        ({"dp_shard": 4}, 8, None, "dp_shard", ["world size 8", "start 4 ranks"]),
        ({"dp_shard": 2, "tp": 2, "cp": 2, "ep": 4}, 8, None, "ep", ["tp = 2", "cp = 2", "tensor", "context"]),
        ({"dp_shard": 2, "tp": 2, "cp": 2, "ep": 8}, 8, None, "ep", ["8", "tp = 2", "cp = 2", "tensor", "context"]),
        ({"dp_shard": 2, "pp": 2, "ep": 2}, 4, None, "ep", ["pp = 2", "pipeline"]),
        ({"dp_shard": 4}, 0, None, "world_size", ["at least 1"]),
        ({"dp_shard": 4}, 4, 0, "num_experts", ["at least 1"]),
    ],
)  # fmt: skip
def test_each_rule_is_refused_with_key_numbers_and_a_fix(degrees, world_size, num_experts, key, said):
    with pytest.raises(MeshConfigError) as caught:
        MeshConfig(**degrees).resolve(world_size, num_experts)
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.key == key
    assert error.rule
    assert error.hint
    for words in said:
        assert words in str(error)


@pytest.mark.parametrize("value", [0, -2, 2.0, True, "2", None])
@pytest.mark.parametrize("key", ["dp_replicate", "dp_shard", "ep", "tp", "pp", "cp"])
def test_a_degree_is_an_integer_of_at_least_one(key, value):
    with pytest.raises(MeshConfigError) as caught:
        MeshConfig(**{key: value})
    assert caught.value.key == key
    assert caught.value.value == value


@pytest.mark.parametrize("key", ["ep", "tp", "pp", "cp"])
def test_only_the_data_parallel_degrees_may_be_minus_one(key):
    with pytest.raises(MeshConfigError):
        MeshConfig(**{key: -1})


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_uneven_experts_are_fine_where_every_rank_has_one(ep):
    assert MeshConfig(ep=ep).resolve(4, num_experts=10).ep == ep  # 10 on 4 is 3, 3, 3, 1


def splits(num_experts, ep):
    """Whether `torch.chunk`, which is how `Shard(0)` divides, gives each of `ep` ranks an expert."""
    return num_experts >= 1 and len(torch.arange(num_experts).chunk(ep)) == ep


def layouts(world_size, dp_replicate, dp_shard, ep, others, num_experts):
    """By trying every number: the (dp_replicate, dp_shard) that the degrees may stand for."""
    numbers = range(1, world_size + 1)
    found = [
        (replicate, shard)
        for replicate in (numbers if dp_replicate == -1 else [dp_replicate])
        for shard in (numbers if dp_shard == -1 else [dp_shard])
        if replicate * shard * others == world_size
        and any(ep * groups == shard for groups in numbers)
        and (ep == 1 or others == 1)
        and (num_experts is None or splits(num_experts, ep))
    ]
    return [] if dp_replicate == dp_shard == -1 else found


DEGREE = st.integers(1, 12)
REST_OR = st.one_of(st.just(-1), DEGREE)


@settings(max_examples=400, derandomize=True, deadline=None)
@given(
    world_size=st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 16, 24]),
    dp_replicate=REST_OR,
    dp_shard=REST_OR,
    ep=DEGREE,
    others=st.sampled_from([{}, {}, {}, {"tp": 2}, {"cp": 3}, {"pp": 2, "tp": 2}]),
    num_experts=st.one_of(st.none(), st.integers(0, 20)),
)
def test_accepted_is_exactly_what_trying_every_number_accepts(
    world_size, dp_replicate, dp_shard, ep, others, num_experts
):
    config = MeshConfig(dp_replicate=dp_replicate, dp_shard=dp_shard, ep=ep, **others)
    model_parallel = others.get("tp", 1) * others.get("cp", 1) * others.get("pp", 1)
    accepted = layouts(world_size, dp_replicate, dp_shard, ep, model_parallel, num_experts)
    broken = config.broken_rules(world_size, num_experts)
    if broken:
        assert accepted == []
        with pytest.raises(MeshConfigError) as caught:
            config.resolve(world_size, num_experts)
        assert str(caught.value) == str(broken[0])
        assert len({(error.key, error.rule) for error in broken}) == len(broken)
    else:
        resolved = config.resolve(world_size, num_experts)
        assert accepted == [(resolved.dp_replicate, resolved.dp_shard)]


def test_small_worlds_are_accepted_exactly_as_trying_every_number_accepts_them():
    for world_size in (1, 2, 4, 6, 8):
        for dp_replicate in (-1, 1, 2, 3):
            for dp_shard in (-1, 1, 2, 3, 4, 6, 8):
                for ep in range(1, 9):
                    config = MeshConfig(dp_replicate=dp_replicate, dp_shard=dp_shard, ep=ep)
                    for num_experts in (None, 1, 3, 4, 5, 6, 7, 8, 10):
                        accepted = layouts(world_size, dp_replicate, dp_shard, ep, 1, num_experts)
                        assert bool(accepted) != bool(config.broken_rules(world_size, num_experts))


def test_all_broken_rules_are_told_the_one_that_is_raised_first():
    config = MeshConfig(dp_shard=4, tp=2, ep=3)
    keys = [error.key for error in config.broken_rules(4, num_experts=2)]
    assert keys == ["ep", "dp_shard", "ep", "ep"]
    rules = "; ".join(error.rule for error in config.broken_rules(4, num_experts=2))
    for words in ("tp = 2", "world size 4", "must divide dp_shard = 4", "2 experts on 3 ranks are 1, 1, 0"):
        assert words in rules
    # without the sizes there is nothing to say about ep
    assert [e.key for e in MeshConfig(dp_replicate=3, ep=5).broken_rules(4, 1)] == ["dp_shard"]
    assert [e.key for e in MeshConfig(dp_replicate=-1, ep=5).broken_rules(4, 1)] == ["dp_replicate"]
    assert [e.key for e in MeshConfig(dp_shard=4, ep=3).broken_rules(0, 0)] == ["world_size", "ep", "num_experts"]


def test_experts_are_no_ep_degree():
    """8 experts on 4 ranks: one group of 4, or 2 of 2; never 8, and never world // experts = 0 groups."""
    for ep in (1, 2, 4):
        resolved = MeshConfig(ep=ep).resolve(4, num_experts=8)
        assert resolved.axes["ep"] == ep
        assert resolved.axes["dp_shard_mod_ep"] * ep == 4
    with pytest.raises(MeshConfigError, match="ep = 8: must divide dp_shard = 4"):
        MeshConfig(ep=8).resolve(4, num_experts=8)


def test_replicas_hold_no_part_of_the_experts():
    """2 replicas x 2 shards and 2 experts: each shard rank has one, in both replicas."""
    assert MeshConfig(dp_replicate=2, ep=2).resolve(4, num_experts=2).dp_shard == 2
    with pytest.raises(MeshConfigError, match="ep = 4: must divide dp_shard = 2"):
        MeshConfig(dp_replicate=2, ep=4).resolve(4, num_experts=4)


def test_an_error_survives_the_way_out_of_a_worker_process():
    error = MeshConfigError("ep", 3, "must divide", "use 2")
    other = pickle.loads(pickle.dumps(error))
    assert (other.key, other.value, other.rule, other.hint) == ("ep", 3, "must divide", "use 2")
    assert str(other) == str(error)


def test_degrees_and_rank_table_need_no_torch():
    code = "import sys, ep_mesh, ep_mesh._plugin; ep_mesh.rank_table(ep_mesh.MeshConfig(), 4)"
    code += "; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert printed.stdout.strip() == "False"

"""Rules between degrees: no process group, no torch."""

import pickle
import subprocess
import sys

import pytest

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

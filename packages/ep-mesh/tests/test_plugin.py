"""The component: what it registers, and the problems it reports before any process exists."""

from types import SimpleNamespace

import pytest

from ep_mesh import MeshConfig
from ep_mesh._plugin import moe_components, moe_validate
from moe_core.plugins import Selected
from moe_core.testing import run_ranks


def _config(mesh, **model):
    (component,) = moe_components()
    tables = {"mesh": Selected(component, mesh)}
    if model:
        tables["model"] = SimpleNamespace(config=SimpleNamespace(**model))
    return tables


def test_the_component_loads():
    (component,) = moe_components()
    assert (component.kind, component.name) == ("mesh", "device_mesh")
    assert component.load_config_class() is MeshConfig
    assert callable(component.load_factory())


@pytest.mark.parametrize(
    ("mesh", "model", "key"),
    [
        (MeshConfig(ep=3), {}, "mesh.ep"),
        (MeshConfig(ep=4), {"num_experts": 5}, "mesh.ep"),
        (MeshConfig(dp_shard=3), {"num_experts": 5}, "mesh.dp_shard"),
    ],
)
def test_a_broken_rule_becomes_one_problem(mesh, model, key):
    (problem,) = moe_validate(_config(mesh, **model), 4)
    assert problem.key == key
    assert problem.rule
    assert problem.hint


def test_all_broken_rules_become_problems():
    problems = moe_validate(_config(MeshConfig(dp_shard=4, tp=2, ep=3), num_experts=2), 4)
    assert [problem.key for problem in problems] == ["mesh.ep", "mesh.dp_shard", "mesh.ep", "mesh.ep"]
    assert len({problem.rule for problem in problems}) == 4


@pytest.mark.parametrize("model", [{}, {"num_experts": 10}, {"dim": 3}])
def test_a_good_mesh_has_no_problem(model):
    assert moe_validate(_config(MeshConfig(ep=4), **model), 4) == []


def _selected():
    from moe_core.plugins import Run

    config = _config(MeshConfig(ep=2), num_experts=3)
    mesh = config["mesh"].build(Run(config, world_size=2, device_type="cpu"))
    return mesh.shape


def test_the_factory_builds_the_mesh_of_the_run():
    assert run_ranks(_selected, 2) == [(1, 1, 2)] * 2

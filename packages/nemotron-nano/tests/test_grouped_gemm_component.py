"""The experts' matrix product of a model chosen from TOML: any component of its kind, somebody else's as well."""

from importlib.metadata import EntryPoint, entry_points

import pytest
import torch

from moe_core import load_config
from moe_core.config import ConfigError, validate
from moe_core.plugins import Run, load_registry

SOURCE = '''
import attrs
from moe_core.plugins import Component, Problem, hookimpl

CALLS = []

@attrs.frozen
class OutsideConfig:
    factor: float = 1.0

def build(config, run):
    import torch

    def product(rows, weight, tokens_per_expert):
        """[R, I], [e, O, I], [e] -> [R, O], by a plain loop."""
        CALLS.append((tuple(weight.shape), run.config.run.name))
        out = rows.new_zeros(rows.shape[0], weight.shape[1])
        start = 0
        for expert, count in enumerate(tokens_per_expert.tolist()):
            out[start : start + count] = config.factor * rows[start : start + count] @ weight[expert].T
            start += count
        return out

    return product

@hookimpl
def moe_components():
    return [Component("grouped_gemm", "outside", "outside_gemm:OutsideConfig", "outside_gemm:build")]

@hookimpl
def moe_validate(config, world_size):
    chosen = config["model"].config.grouped_gemm
    return [Problem("model.grouped_gemm.factor", "must not be 7", 7.0)] if chosen.config.factor == 7 else []
'''


@pytest.fixture
def registry(tmp_path, monkeypatch):
    (tmp_path / "outside_gemm.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    outside = EntryPoint(name="outside", value="outside_gemm", group="moe_core")
    return load_registry([*entry_points(group="moe_core"), outside])


def built(config):
    model = config["model"].build(Run(config))
    model.to_empty(device="cpu")
    model.init_weights(0)
    return model.eval()


def test_a_component_of_anybody_computes_the_experts(registry):
    import outside_gemm

    words = ["run.name=mine", "model.pattern=*E", "model.grouped_gemm.type=outside"]
    tokens = torch.arange(18).view(2, 9)
    left_out = load_config((), words[:2])
    assert left_out["model"].config.grouped_gemm is None  # by dtype and device
    expected = built(left_out)(tokens)
    logits = built(load_config((), words, registry=registry))(tokens)
    assert outside_gemm.CALLS == [((16, 128, 128), "mine")] * 2  # up and down, of one layer
    assert (logits - expected).norm() / expected.norm() < 1e-5
    # with a setting of its own
    other = built(load_config((), [*words, "model.grouped_gemm.factor=2"], registry=registry))(tokens)
    assert (other - expected).norm() / expected.norm() > 1e-2


@pytest.mark.parametrize("name", ["grouped_mm", "loop"])
def test_ours_are_chosen_the_same_way(name):
    config = load_config((), [f"model.grouped_gemm.type={name}", "model.pattern=E"])
    assert built(config).backbone.layers[0].mixer.experts.grouped_gemm.__name__ == name


def test_the_choice_is_written_out_and_read_again(registry):
    config = load_config((), ["model.grouped_gemm.type=outside", "model.grouped_gemm.factor=3"], registry=registry)
    text = config.to_toml()
    assert '[model.grouped_gemm]\ntype = "outside"\nfactor = 3.0\n' in text
    assert 'grouped_gemm = "none"' in load_config(()).to_toml()


def test_a_name_that_nobody_has_is_refused_with_those_that_there_are(registry):
    with pytest.raises(ConfigError) as refused:
        load_config((), ["model.grouped_gemm.type=cutlass"], registry=registry)
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("model.grouped_gemm.type", "cutlass")
    assert "no grouped_gemm component is called 'cutlass'; there are: outside, grouped_mm, loop" in str(problem)
    with pytest.raises(ConfigError, match="did you mean 'loop'"):
        load_config((), ["model.grouped_gemm.type=loops"])


def test_its_plugin_is_asked_whether_the_tables_fit(registry):
    config = load_config((), ["model.grouped_gemm.type=outside", "model.grouped_gemm.factor=7"], registry=registry)
    with pytest.raises(ConfigError, match="must not be 7"):
        validate(config, 1)

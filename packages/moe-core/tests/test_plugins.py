"""The plugin host: discovery, failures, duplicates, and the record that factories read."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from moe_core.plugins import (
    Component,
    DuplicateComponentError,
    Run,
    RunOrderError,
    UnknownComponentError,
    load_registry,
)

OFFERS_A_LOSS = """
from moe_core.plugins import Component, hookimpl

@hookimpl
def moe_components():
    return [Component("loss", "{name}", config="{module}:Config", factory="{module}:build")]
"""


def _offer(install_plugin, distribution, name):
    module = distribution.replace("-", "_")
    return install_plugin(distribution, module, OFFERS_A_LOSS.format(name=name, module=module))


def test_a_distribution_is_found_through_its_entry_point_alone(install_plugin):
    _offer(install_plugin, "outside-loss", "outside")
    entry = load_registry().find("loss", "outside")
    assert (entry.distribution, entry.version) == ("outside-loss", "1.0")
    assert entry.component == Component("loss", "outside", "outside_loss:Config", "outside_loss:build")


def test_an_entry_point_that_is_listed_twice_counts_once(install_plugin):
    _offer(install_plugin, "outside-loss", "outside")
    point = EntryPoint("same", "outside_loss", "moe_core")
    assert load_registry([point, point]).names("loss") == ["outside"]


def test_a_duplicate_name_names_both_distributions(install_plugin):
    _offer(install_plugin, "first-dist", "twice")
    _offer(install_plugin, "second-dist", "twice")
    with pytest.raises(DuplicateComponentError, match=r"'twice'.*first-dist.*second-dist"):
        load_registry()


def test_disabling_one_of_two_duplicates_leaves_the_other(install_plugin, monkeypatch):
    _offer(install_plugin, "first-dist", "twice")
    _offer(install_plugin, "second-dist", "twice")
    monkeypatch.setenv("MOE_PLUGINS_DISABLE", "Second_Dist")
    assert load_registry().find("loss", "twice").distribution == "first-dist"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
        ("raise SystemExit(3)", "SystemExit"),
        ("from moe_core.plugins import hookimpl\n@hookimpl\ndef moe_components(): raise RuntimeError('boo')", "boo"),
        ("from moe_core.plugins import hookimpl\n@hookimpl\ndef moe_component(): return []", "moe_component"),
        (OFFERS_A_LOSS.format(name="x", module="m").replace('"loss"', '"losss"'), "did you mean 'loss'"),
    ],
)
def test_a_plugin_that_fails_is_named_and_left_out(install_plugin, caplog, source, reason):
    _offer(install_plugin, "good-dist", "good")
    install_plugin("bad-dist", "bad_dist", source)
    registry = load_registry()
    assert "good" in registry.names("loss")
    (failure,) = registry.failures
    assert failure.distribution == "bad-dist"
    assert reason in failure.error
    assert "bad-dist" in caplog.text


def test_a_failed_plugin_is_named_when_its_component_is_asked_for(install_plugin):
    install_plugin("bad-dist", "bad_dist", "import a_module_that_is_not_there")
    with pytest.raises(UnknownComponentError, match=r"bad-dist.*a_module_that_is_not_there"):
        load_registry().find("loss", "from_bad_dist")


def test_the_order_does_not_depend_on_that_of_discovery(install_plugin):
    _offer(install_plugin, "b-dist", "b")
    _offer(install_plugin, "a-dist", "a")
    points = [EntryPoint("b-dist", "b_dist", "moe_core"), EntryPoint("a-dist", "a_dist", "moe_core")]
    forward, backward = load_registry(points), load_registry(reversed(points))
    assert forward.names("loss") == backward.names("loss") == ["a", "b"]
    assert forward.fingerprint() == backward.fingerprint()
    assert forward.fingerprint() != load_registry(points[:1]).fingerprint()


def test_only_the_chosen_plugins_validate(install_plugin):
    source = OFFERS_A_LOSS + ("\n@hookimpl\ndef moe_validate(config, world_size):\n    return ['{name} was asked']\n")
    for name in ("one", "two"):
        install_plugin(f"{name}-dist", f"{name}_dist", source.format(name=name, module=f"{name}_dist"))
    registry = load_registry()
    used = {registry.find("loss", "two").plugin}
    assert registry.validators(used)(config=None, world_size=1) == [["two was asked"]]


def test_discovery_imports_no_torch():
    code = (
        "import sys, json; from moe_core.plugins import load_registry; r = load_registry(); "
        "print(json.dumps([len(r.entries), [str(f) for f in r.failures], 'torch' in sys.modules]))"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    entries, failures, torch_was_imported = json.loads(answer.stdout)
    assert entries > 0
    assert failures == []
    assert not torch_was_imported


@pytest.mark.parametrize("reference", ["module", ":name", "module:", ""])
def test_a_component_needs_references(reference):
    with pytest.raises(ValueError, match="module:attribute"):
        Component("loss", "x", config=reference, factory="m:f")


def test_a_factory_may_read_only_what_is_built_before_it():
    run = Run(SimpleNamespace(), rank=1, world_size=2).with_part("mesh", "the mesh")
    assert (run.mesh, run.rank, run.world_size) == ("the mesh", 1, 2)
    with pytest.raises(RunOrderError, match=r"run\.optimizer is not built yet.*config -> mesh -> model"):
        _ = run.optimizer
    with pytest.raises(AttributeError, match="frozen"):
        run.mesh = "another"
    with pytest.raises(AttributeError, match="no attribute 'mesch'"):
        _ = run.mesch

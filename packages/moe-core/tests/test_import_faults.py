"""The reader of imports finds what is planted, wherever an import can hide."""

import sys

import pytest

from moe_core.testing import import_faults

LAZY = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from planted.a import x\ndef __getattr__(name): ...\n"


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Writes a package called `planted` and says what is wrong with its imports."""

    def faults(files, **options):
        folder = tmp_path / "planted"
        for name, text in {"__init__.py": "", **files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        found = import_faults("planted", **options)
        assert "planted" not in sys.modules  # it was read, not run
        return found

    return faults


@pytest.mark.parametrize(
    "second",
    [
        "from planted.a import x",
        "from planted import a",
        "import planted.a",
        "from . import a",
        "from .a import x",
        "def f():\n    from planted.a import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from planted.a import x",
    ],
)
def test_a_circle_of_two_is_found_however_it_is_closed(planted, second):
    (fault,) = planted({"a.py": "from planted.b import y\nx = 1\n", "b.py": second + "\ny = 1\n"})
    assert fault.startswith("circle: planted.a -> planted.b (y); planted.b -> planted.a (")


def test_a_circle_of_three_over_folders_is_one_fault_and_names_every_tie(planted):
    files = {"a.py": "from planted.inner.b import y", "inner/__init__.py": "", "c.py": "import planted.a\n"}
    (fault,) = planted({**files, "inner/b.py": "from ..c import z", "d.py": "from planted.a import x"})
    ties = [
        "planted.a -> planted.inner.b (y)",
        "planted.c -> planted.a (the module)",
        "planted.inner.b -> planted.c (z)",
    ]
    assert fault == "circle: " + "; ".join(ties)


def test_an_init_that_hands_names_on_is_on_a_circle_and_a_lazy_one_is_not(planted):
    back = {"a.py": "x = 1\nfrom planted import x\n"}
    assert planted({"__init__.py": LAZY, **back}) == []
    (fault,) = planted({"__init__.py": "from planted.a import x", **back})
    assert fault.startswith("circle: planted -> planted.a")


def test_one_way_is_no_fault(planted):
    assert (
        planted({"a.py": "from planted.b import y\nfrom planted import c", "b.py": "from . import c", "c.py": ""}) == []
    )


@pytest.mark.parametrize("line", ["import chunked_loss", "def f():\n    from chunked_loss import linear_cross_entropy"])
def test_another_package_is_a_fault_unless_it_may_be_imported(planted, line, monkeypatch):
    monkeypatch.setattr("moe_core.testing._imports.entry_points", lambda group: [_Point("chunked_loss._plugin")])
    (fault,) = planted({"a.py": line})
    assert "planted.a imports chunked_loss" in fault
    assert fault.endswith(", another package")
    assert planted({"a.py": line}, may_import=["chunked_loss"]) == []


class _Point:
    def __init__(self, value):
        self.value = value


def test_the_host_may_be_imported_by_the_plugin_alone(planted):
    line = "from moe_core.plugins import hookimpl\nfrom moe_core.config import Config\n"
    assert planted({"_plugin.py": line}) == []
    assert len(planted({"_plugin.py": "", "other.py": line})) == 2
    (fault,) = planted({"_plugin.py": "from moe_core import MoE", "other.py": ""})
    assert "planted._plugin imports moe_core.MoE, another package" in fault


@pytest.mark.parametrize(
    "line",
    [
        "from moe_core._moe import MoE",
        "import moe_core._moe",
        "from moe_core import _moe",
        "import moe_core\nmoe_core._moe",
    ],
)
def test_a_private_name_of_another_package_is_a_fault_in_its_tests_too(planted, tmp_path, line):
    (fault,) = planted({"a.py": line}, may_import=["moe_core"])
    assert fault.endswith("a private name of another package")
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_a.py").write_text(line)
    (fault,) = planted({"a.py": "import moe_core\nmoe_core.__name__"}, may_import=["moe_core"], tests=tests)
    assert f"{tests / 'test_a.py'}:" in fault

"""No file imports another in a circle, and none another package of the project."""

from pathlib import Path

from moe_core.testing import import_faults


def test_the_imports_run_one_way():
    assert import_faults("moe_core", tests=Path(__file__).parent) == []

"""No file imports another in a circle, and none a private name of another package; a leaf knows no other package."""

from pathlib import Path

from moe_core.testing import import_faults


def test_the_imports_run_one_way():
    assert import_faults("chunked_loss", tests=Path(__file__).parent) == []

"""No file imports another in a circle, and none a private name of another package; the trainer knows no model."""

from pathlib import Path

import nemotron_nano.train
from moe_core.testing import import_faults

OTHERS = (
    "moe_core", "ep_mesh", "ep_dispatch", "fsdp_ep", "grad_clip_multimesh", "chunked_loss", "ckpt_layout",
)  # fmt: skip


def test_the_imports_run_one_way():
    assert import_faults("nemotron_nano", may_import=OTHERS, tests=Path(__file__).parent) == []


def test_the_trainer_imports_no_model():
    folder = Path(nemotron_nano.train.__file__).parent
    files = sorted(folder.glob("*.py"))
    assert len(files) > 5
    assert [path.name for path in files if "import nemotron_nano.model" in path.read_text()] == []
    assert [path.name for path in files if "from nemotron_nano.model" in path.read_text()] == []

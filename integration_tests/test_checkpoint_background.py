"""A run that saves in the background leaves the checkpoints that a run without it leaves, and resumes from them."""

from pathlib import Path

import pytest

WORDS = (
    'transform=[{type="expert_parallelized"}, {type="fsdp", separate_lm_head=true}]',
    "tracker=[]",
    "mesh.ep=2",
    "run.steps=4",
    "trainer.checkpoint_every=2",
    "trainer.evaluate_every=0",
    'model.pattern="E"',
    "model.hidden_size=32",
    "model.num_experts=5",
    "model.expert_hidden_size=24",
    "model.shared_expert_hidden_size=40",
    "data.sequence_length=16",
    "data.global_batch_size=4",
)


def train(words: list[str], device_type: str, resume: bool) -> int:
    from moe_core import load_config
    from nemotron_nano.train.assemble import assemble

    run = assemble(load_config((), words), device_type=device_type, resume=resume)
    return int(run.config["trainer"].build(run)(run))


def stored(folder: Path, step: int) -> dict[str, object]:
    """Every tensor of a checkpoint, moments included."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder / f"step-{step:08d}")
    items = reader.read_metadata().state_dict_metadata
    state = {key: torch.empty(item.size, dtype=item.properties.dtype) for key, item in items.items()}
    load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process reads what two wrote
def test_checkpoints_of_a_run_that_saves_in_the_background(tmp_path, on_ranks, device_type):
    import torch

    def words(name: str, background: bool) -> list[str]:
        flag = str(background).lower()
        return [*WORDS, f'checkpointer.directory="{tmp_path / name}"', f"checkpointer.background={flag}"]

    assert on_ranks(train, 2, words("at once", False), device_type, False) == [0, 0]
    assert on_ranks(train, 2, words("behind", True), device_type, False) == [0, 0]
    assert sorted(entry.name for entry in (tmp_path / "behind").iterdir()) == [
        "latest",
        "step-00000002",
        "step-00000004",
    ]
    want = {step: stored(tmp_path / "at once", step) for step in (2, 4)}
    assert any("exp_avg" in key for key in want[2])
    for step in (2, 4):
        found = stored(tmp_path / "behind", step)
        assert found.keys() == want[step].keys()
        for key, value in want[step].items():
            assert torch.equal(found[key], value), (step, key)

    (tmp_path / "behind" / "latest").write_text("step-00000002\n")
    assert on_ranks(train, 2, words("behind", True), device_type, True) == [0, 0]
    # the second save of step 4 lies beside the first until it is whole, then replaces it
    latest = (tmp_path / "behind" / "latest").read_text().strip()
    assert latest == "step-00000004.1"
    (tmp_path / "behind" / latest).rename(tmp_path / "behind" / "step-00000004")
    resumed = stored(tmp_path / "behind", 4)
    for key, value in want[4].items():
        assert torch.equal(resumed[key], value), key

"""Folders that are damaged or meant to harm, disks that are full, and ranks that die while a folder is written."""

import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt_layout import load_checkpoint, load_hf, save_checkpoint, save_hf
from ckpt_layout._cli import main
from moe_core.testing import RankFailed, run_ranks


class Bomb:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def linear(value=None):
    model = nn.Linear(4, 3)
    if value is not None:
        with torch.no_grad():
            model.weight.fill_(value)
            model.bias.fill_(value)
    return model


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "hf"
    path.mkdir()
    save_file(dict(linear(1.0).state_dict()), path / "model.safetensors")
    (path / "config.json").write_text('{"model_type": "mixtral"}')
    return path


def pickle_as_weights(folder, bomb):
    torch.save({"weight": bomb}, folder / "model.safetensors")


def pickle_of_old(folder, bomb):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(bomb))


def pickle_in_index(folder, bomb):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(bomb))
    index = {"weight_map": {"weight": "pytorch_model.bin", "bias": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickle_as_config(folder, bomb):
    (folder / "config.json").write_bytes(pickle.dumps(bomb))


def pickle_as_index(folder, bomb):
    (folder / "model.safetensors.index.json").write_bytes(pickle.dumps(bomb))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (pickle_as_weights, "is no whole safetensors file"),
        (pickle_of_old, "has neither .*; other formats are not read"),
        (pickle_in_index, "must be a .safetensors file in this folder"),
        (pickle_as_config, "is no JSON"),
        (pickle_as_index, "is no JSON"),
    ],
)
def test_a_pickle_where_none_is_due_is_never_loaded(folder, tmp_path, capsys, harm, message):
    harm(folder, Bomb(tmp_path / "harmed"))
    with pytest.raises(ValueError, match=message):
        load_hf(linear(), folder, family=None)
    for command in (["inspect"], ["verify"], ["diff", str(folder)], ["convert", "--to", "dcp", str(tmp_path / "out")]):
        assert main([command[0], str(folder), *command[1:]]) != 0
    capsys.readouterr()
    assert not (tmp_path / "harmed").exists()
    assert not (tmp_path / "out").exists()
    pickle.loads(pickle.dumps(Bomb(tmp_path / "harmed")))
    assert (tmp_path / "harmed").exists()  # it would have been seen


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", 7, None])
def test_a_weight_map_that_leaves_the_folder(folder, tmp_path, name):
    save_file({"weight": torch.full((3, 4), 9.0), "bias": torch.full((3,), 9.0)}, tmp_path / "outside.safetensors")
    before = (tmp_path / "outside.safetensors").read_bytes()
    index = {"weight_map": {"weight": name, "bias": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = linear(2.0)
    with pytest.raises(ValueError, match="in this folder"):
        load_hf(model, folder)
    assert (model.weight == 2).all()
    assert (tmp_path / "outside.safetensors").read_bytes() == before


@pytest.mark.parametrize("length", [2**60, 2**63, 2**64 - 1, 10**9])
def test_a_header_that_claims_to_be_huge_takes_no_memory(folder, length):
    import resource

    file = folder / "model.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        load_hf(linear(), folder)
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    )  # kB; bytes on macOS, where it is stricter


def test_offsets_that_reach_beyond_the_file_or_overlap(folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for offsets in ([0, 2**40], [4, 52], [48, 0]):
        table = json.loads(data[8 : 8 + length])
        table["weight"]["data_offsets"] = offsets
        text = json.dumps(table).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        with pytest.raises(ValueError, match="is no whole safetensors file"):
            load_hf(linear(), folder)


@pytest.mark.parametrize("cut", [1, 7, 40, 10**6])
def test_a_truncated_file_changes_nothing(folder, cut):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut] if cut < 10**6 else b"")
    model = linear(2.0)
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        load_hf(model, folder)
    assert (model.weight == 2).all()


# -- our own checkpoints -----------------------------------------------------------------------------------


def test_a_checkpoint_with_a_truncated_shard_is_named_and_the_one_before_loads(tmp_path):
    save_checkpoint(tmp_path, 1, model=linear(1.0))
    path = save_checkpoint(tmp_path, 2, model=linear(2.0))
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(RuntimeError, match="step-00000002 failed on rank 0"):
        load_checkpoint(tmp_path, model=linear())
    model = linear()
    load_checkpoint(tmp_path, model=model, step=1)
    assert (model.weight == 1).all()


def test_a_latest_that_leaves_the_folder_is_refused(tmp_path):
    save_checkpoint(tmp_path / "a", 1, model=linear(1.0))
    save_checkpoint(tmp_path / "b", 1, model=linear(2.0))
    for name in ("../b/step-00000001", "/etc", "", "step-1"):
        (tmp_path / "a" / "latest").write_text(name)
        with pytest.raises(ValueError, match="which is no checkpoint; there are: step-00000001"):
            load_checkpoint(tmp_path / "a", model=linear())


def test_settings_with_code_in_them_are_not_run(tmp_path):
    path = save_checkpoint(tmp_path, 1, model=linear(1.0))
    torch.save({"optimizer": Bomb(tmp_path / "harmed"), "scheduler": None}, path / "host.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load_checkpoint(tmp_path, model=linear())
    assert not (tmp_path / "harmed").exists()


def test_an_index_with_code_in_it_is_not_run(tmp_path, capsys):
    path = save_checkpoint(tmp_path, 1, model=linear(1.0))
    (path / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "harmed")))
    with pytest.raises(ValueError, match=r"names posix.mkdir, which no checkpoint has"):
        load_checkpoint(tmp_path, model=linear())
    assert main(["inspect", str(tmp_path)]) == 2
    assert "which no checkpoint has" in capsys.readouterr().err
    assert not (tmp_path / "harmed").exists()


# -- while writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [torch.Size([2**62, 2**62]), (3.0, 4), None], ids=["huge", "no number", "no chunks"])
def test_an_index_that_cannot_be_right_is_said_in_a_line(tmp_path, capsys, size):
    folder = save_checkpoint(tmp_path, 1, model=linear(1.0))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    item = metadata.state_dict_metadata["model/weight"]
    if size is None:
        item.chunks.clear()
    else:
        item.size = size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert main(["verify", str(tmp_path)]) == 1
    assert "weight" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path)]) == 2
    assert "weight" in capsys.readouterr().err
    with pytest.raises((ValueError, RuntimeError), match="weight"):
        load_checkpoint(tmp_path, model=linear())


@pytest.mark.parametrize("text", ["[]", '{"x": 1}', "{"])
def test_a_damaged_record_of_a_checkpoint_is_said_in_a_line(tmp_path, capsys, text):
    folder = save_checkpoint(tmp_path, 1, model=linear(1.0))
    (folder / "meta.json").write_text(text)
    assert main(["verify", str(tmp_path)]) == 1
    assert "meta.json: is missing, or damaged" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"meta\.json: is no (JSON|record of a checkpoint)"):
        load_checkpoint(tmp_path, model=linear())


def test_a_rank_killed_in_an_export_leaves_no_folder_and_the_next_one_works(tmp_path):
    def killed(target):
        import os
        import signal

        import torch
        import torch.distributed as dist
        from torch import nn

        import ckpt_layout._hf_folder as files
        from ckpt_layout import save_hf

        model = nn.Linear(4, 3)
        with torch.no_grad():
            model.weight.fill_(1)
            model.bias.fill_(1)
        if dist.get_rank() == 1:
            files._write_all = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        save_hf(model, target, family="mixtral")

    with pytest.raises(RankFailed, match="SIGKILL"):
        run_ranks(killed, 2, tmp_path / "out", timeout=30)
    assert not (tmp_path / "out").exists()
    save_hf(linear(3.0), tmp_path / "out", family="mixtral")
    assert (load_file(tmp_path / "out" / "model.safetensors")["weight"] == 3).all()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


FULL_DISK = """
import errno, sys, warnings
from pathlib import Path
import torch
from torch import nn
from ckpt_layout import load_checkpoint, save_checkpoint, save_hf
disk = Path(sys.argv[1])
small, large = nn.Linear(4, 3), nn.Linear(1024, 1024)
save_checkpoint(disk / "run", 1, model=small)
jobs = [
    lambda: save_checkpoint(disk / "run", 2, model=large),
    lambda: save_hf(large, disk / "hf", family="mixtral"),
]
for job in jobs:
    try:
        job()
    except (OSError, RuntimeError) as error:
        print("said:", error)
assert [p.name for p in disk.iterdir()] == ["run"]
assert sorted(p.name for p in (disk / "run").iterdir()) == ["latest", "step-00000001"]
assert load_checkpoint(disk / "run", model=small) == {"step": 1}
save_hf(small, disk / "hf", family="mixtral")
print("whole")
"""


def test_a_full_disk(tmp_path):
    """A real one, of 2 MB, in a mount namespace of its own."""
    unshare = shutil.which("unshare")
    if unshare is None:
        # macOS has no way to mount without root
        pytest.skip("needs Linux's unshare, to mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=2m tmpfs "{disk}"'
    command = [unshare, "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*command, mount], capture_output=True, check=False).returncode:
        # containers may forbid user namespaces, and a full disk cannot be had otherwise
        pytest.skip("this machine lets nobody mount a small disk in a namespace")
    done = subprocess.run(
        [*command, f'{mount} && exec "{sys.executable}" -c "$0" "{disk}"', FULL_DISK],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 3
    assert "failed on rank 0" in said[0]
    assert "No space left on device" in said[1]
    assert said[2] == "whole"

"""A rank that dies or fails ends the whole run, soon and with one line that says which."""

import os
import signal
import subprocess
import sys
import time

import pytest

SOURCE = """
import os

import attrs
import torch.distributed as dist

from moe_core.plugins import Component, hookimpl


@attrs.frozen
class SaboteurConfig:
    how: str = "kill"


class SabotageError(ValueError):
    pass


class Saboteur:
    def __init__(self, how):
        self.how = how

    def step_end(self, *, step, **_):
        if step == 2 and dist.get_rank() == 1:
            if self.how == "kill":
                os.kill(os.getpid(), 9)
            if self.how == "user error":
                raise SabotageError("a mistake that only one rank sees")
            raise RuntimeError("sabotage on one rank")


def build(config, run):
    return Saboteur(config.how)


@hookimpl
def moe_components():
    return [Component("tracker", "saboteur", "saboteur:SaboteurConfig", "saboteur:build")]
"""


@pytest.fixture
def environment(tmp_path):
    """One with a distribution that offers a tracker which fails on rank 1 in step 2."""
    (tmp_path / "saboteur.py").write_text(SOURCE)
    info = tmp_path / "saboteur-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: saboteur\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[moe_core]\nsaboteur = saboteur\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("kill", "rank 1 of 2 was ended by signal 9; all ranks are stopped"),
        ("raise", "rank 1 of 2 exited with 1; all ranks are stopped"),
        ("user error", "rank 1 of 2 exited with 2; all ranks are stopped"),
    ],
)
def test_a_rank_that_fails_ends_the_run_and_is_named(environment, tmp_path, device_type, how, says):
    words = [
        f'tracker=[{{type="saboteur", how="{how}"}}]',
        'transform=[{type="expert_parallelized"}, {type="fsdp"}]',
        "mesh.ep=2",
        "run.steps=1000",
        f"run.device_type={device_type}",
        "data.sequence_length=32",
    ]
    empty = tmp_path / "empty.toml"
    empty.touch()
    command = [sys.executable, "-m", "nemotron_nano", "train", str(empty), *words, "--nproc", "2"]
    begin = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert time.monotonic() - begin < 100
    assert result.returncode == (2 if how == "user error" else 1)
    assert says in result.stderr
    if how == "raise":
        assert "sabotage on one rank" in result.stderr
    if how == "user error":
        assert "nemotron-nano: a mistake that only one rank sees" in result.stderr


def test_ctrl_c_stops_all_ranks_and_says_so_in_one_line(environment, tmp_path, device_type):
    words = ['transform=[{type="fsdp"}]', "run.steps=1000", "data.sequence_length=32", f"run.device_type={device_type}"]
    empty = tmp_path / "empty.toml"
    empty.touch()
    command = [sys.executable, "-m", "nemotron_nano", "train", str(empty), *words, "--nproc", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    ) as process:
        assert process.stdout is not None
        while "step" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "stopped by SIGINT; all 2 ranks are stopped" in errors
    assert "Traceback" not in errors

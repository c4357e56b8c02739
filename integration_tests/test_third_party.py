"""A package of somebody else's: built, installed, listed, chosen by name from TOML, and trained with on 2 ranks."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def outside_python(tmp_path_factory):
    """A Python that has all of ours and, from a wheel, the outside package."""
    folder = tmp_path_factory.mktemp("outside")
    environment, wheels = folder / "venv", folder / "wheels"
    _run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    (site,) = environment.glob("lib/python*/site-packages")
    # addsitedir also takes in the editable installs that the parent has as .pth files
    (site / "parent.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [sys.executable, "-m", "pip"]
    _run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(HERE / "third_party")])
    (wheel,) = wheels.glob("*.whl")
    python = environment / "bin" / "python"
    _run([*pip, "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)])
    return str(python)


def test_it_is_listed_with_its_distribution_and_version(outside_python):
    lines = _run([outside_python, "-m", "nemotron_nano", "components"]).stdout.splitlines()
    listed = [line.split() for line in lines if "outside" in line]
    assert listed == [
        ["loss", "outside_smoothed", "outside-plugin", "3.2.1"],
        ["trainer", "outside_loop", "outside-plugin", "3.2.1"],
    ]


def test_it_trains_on_two_ranks_when_the_config_names_it(outside_python, tmp_path):
    config = tmp_path / "outside.toml"
    config.write_text(
        '[run]\nname = "outside"\nsteps = 3\n[mesh]\nep = 2\n[trainer]\ntype = "outside_loop"\nlog_as = "hello"\n'
        '[loss]\ntype = "outside_smoothed"\nsmoothing = 0.2\n[data]\nsequence_length = 32\nglobal_batch_size = 4\n'
        '[[transform]]\ntype = "expert_parallelized"\n[[transform]]\ntype = "fsdp"\n'
    )
    output = _run([outside_python, "-m", "nemotron_nano", "train", str(config), "--nproc", "2"], cwd=tmp_path).stdout
    losses = [float(line.split()[4]) for line in output.splitlines() if line.startswith("hello step")]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_a_wrong_key_of_it_is_refused_like_one_of_ours(outside_python, tmp_path):
    words = ["trainer.type=outside_loop", "trainer.log_az=x"]
    empty = tmp_path / "empty.toml"
    empty.touch()
    result = subprocess.run(
        [outside_python, "-m", "nemotron_nano", "train", str(empty), *words], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "did you mean 'log_as'?" in result.stderr


def _run(command, cwd=None):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result

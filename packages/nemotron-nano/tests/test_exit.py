"""A process ends with its status, whatever torch's threads are at."""

import os
import subprocess
import sys

import pytest

_THREADS = """
import atexit, sys, threading, time, torch
from nemotron_nano._exit import leave

def add():
    a = torch.randn(100)
    while True:
        a + a  # gives the interpreter's lock away and asks for it again, as gloo's threads do

threading.Thread(target=add, daemon=True).start()
atexit.register(print, "registered")
time.sleep(0.1)
print("said", end=" ")
"""


def _ended(how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _THREADS + how], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("status", [0, 3])
def test_threads_that_want_the_lock_do_not_abort_it(status):
    ended = _ended(f"leave({status})")
    assert (ended.returncode, ended.stdout) == (status, "said registered\n"), ended.stderr


@pytest.mark.parametrize(
    ("closed", "status", "says"),
    [(">&-", 0, ""), ("2>&-", 0, ""), (">/dev/full", 1, "could not be written"), ("| true", 1, "")],
)
def test_a_stream_that_takes_no_more_changes_no_more_than_it_must(closed, status, says):
    code = "import time, torch; from nemotron_nano._exit import leave; time.sleep(0.2); print('said'); leave(0)"
    command = f'set -o pipefail; "{sys.executable}" -c "{code}" {closed}'
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    ended = subprocess.run(
        ["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=120, env=environment, check=False
    )
    assert ended.returncode == status
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_python_s_own_threads_are_waited_for():
    wait = "threading.Thread(target=lambda: (time.sleep(0.5), print('waited for', end=' '))).start(); leave(0)"
    ended = _ended(wait)
    assert (ended.returncode, ended.stdout) == (0, "said waited for registered\n"), ended.stderr


def test_without_torch_it_is_the_usual_exit():
    code = "import sys; from nemotron_nano._exit import leave; assert 'torch' not in sys.modules; leave(4)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 4, ended.stderr


def test_the_command_ends_that_way():
    from importlib.metadata import entry_points

    from nemotron_nano.cli import command

    (script,) = entry_points(group="console_scripts", name="nemotron-nano")
    assert script.load() is command


def test_a_table_is_for_nobody_where_there_is_no_standard_output():
    command = f'"{sys.executable}" -m nemotron_nano components >&-'
    ended = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")

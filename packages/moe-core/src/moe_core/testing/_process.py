"""Starting the processes that are ranks.

Importing torch takes seconds. On Linux it happens once: a template process imports it, starts no thread and no
group, and every rank is a fork of it, ready at once. Elsewhere each rank is a Python of its own.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Protocol

import attrs


class Process(Protocol):
    """What the pool needs of a process; `subprocess.Popen` has it."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class RankStarter:
    """Starts ranks, from a template where forking is safe."""

    def __init__(self) -> None:
        self._template: _Template | None = None

    def start(self) -> tuple[Process, Connection]:
        """A process that runs `moe_core.testing._worker`, and the connection to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._fork(theirs) if sys.platform == "linux" else _spawn("_worker", theirs)
        return process, Connection(ours.detach())

    def close(self) -> None:
        if self._template is not None:
            self._template.close()
            self._template = None

    def _fork(self, theirs: socket.socket) -> Process:
        if self._template is None or not self._template.is_alive():
            self._template = _Template()
        return self._template.fork(theirs)


def _spawn(module: str, theirs: socket.socket) -> "subprocess.Popen[bytes]":
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-m", f"moe_core.testing.{module}", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )


class _Template:
    """The process that ranks are forks of. They are its children, so it is asked how they ended."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn("_template", theirs)
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, theirs: socket.socket) -> Process:
        self._connection.send(("fork", list(sys.path)))
        socket.send_fds(self._socket, [b"fd"], [theirs.fileno()])
        return _Forked(self._connection.recv(), self._connection)

    def close(self) -> None:
        self._connection.close()
        self._socket.close()
        self._process.wait()


@attrs.define
class _Forked:
    """A fork of the template, by its process id."""

    pid: int
    _connection: Connection
    _status: int | None = None

    def poll(self) -> int | None:
        return self._ask("poll")

    def wait(self, timeout: float | None = None) -> int:
        status = self._ask("wait")
        assert status is not None
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _ask(self, what: str) -> int | None:
        if self._status is None:
            self._connection.send((what, self.pid))
            self._status = self._connection.recv()
        return self._status


def serve(descriptor: int, run_rank: "RunRank") -> None:
    """The template's loop: fork a rank, or say how one ended, until the other side hangs up."""
    # Ctrl-C reaches the whole terminal group; the pool ends its ranks itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(descriptor))
    connection = Connection(descriptor)
    while True:
        try:
            what, argument = connection.recv()
        except EOFError:
            return
        if what == "fork":
            _, (theirs, *_), _, _ = socket.recv_fds(channel, 2, 1)
            connection.send(_fork(theirs, argument, (connection, channel), run_rank))
            os.close(theirs)
        else:
            pid, status = os.waitpid(argument, os.WNOHANG if what == "poll" else 0)
            connection.send(os.waitstatus_to_exitcode(status) if pid else None)


class RunRank(Protocol):
    """Serves calls on a file descriptor until it is closed."""

    def __call__(self, descriptor: int) -> None: ...


def _fork(theirs: int, path: list[str], inherited: Sequence[Connection | socket.socket], run_rank: RunRank) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for resource in inherited:
            resource.close()
        sys.path[:] = path
        run_rank(theirs)
        status = 0
    finally:
        # without the clean-up that belongs to the template
        os._exit(status)

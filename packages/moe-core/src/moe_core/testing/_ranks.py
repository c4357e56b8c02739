"""`run_ranks`: a function on several gloo ranks, in processes that are started once and kept.

Starting a rank costs seconds, a call on ranks that are there about 0.05 s: importing torch is what takes long. On Linux
it happens once: a template process imports it, starts no thread and no group, and every rank is a fork of it, ready at
once. Elsewhere each rank is a Python of its own. Ranks are never trusted after something went wrong: any exception,
kill or time-out ends all of them, and the next call starts afresh.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it silently

try:
    import cloudpickle
except ImportError as error:
    raise ImportError("moe_core.testing needs cloudpickle: pip install 'moe-core[testing]'") from error

_GRACE_SECONDS = 2.0
"""How long peers may take to report after the first failure, so that the root can be told from its echoes."""

_START_SECONDS = 120.0

_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout", "Timed out")
"""What a rank says when a peer of it is gone."""


class RankFailed(RuntimeError):
    """A rank raised or died; the message has the rank and its traceback. `rank` is the root's."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class RanksTimedOut(TimeoutError):
    """The time limit passed while these ranks were still at work."""


@attrs.frozen
class _Failure:
    rank: int
    when: float
    text: str

    @property
    def is_echo(self) -> bool:
        return any(echo in self.text for echo in _ECHOES)


def _spawn(theirs: socket.socket, *words: str) -> "subprocess.Popen[bytes]":
    """A Python of its own that runs `moe_core.testing._worker`, with its end of a connection."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-m", "moe_core.testing._worker", str(theirs.fileno()), *words],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )


class _Template:
    """The process that ranks are forks of. They are its children, so it is asked how they ended."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = _spawn(theirs, "template")
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))

    def fork(self, theirs: socket.socket) -> "_Forked":
        self._connection.send(("fork", list(sys.path)))
        socket.send_fds(self._socket, [b"fd"], [theirs.fileno()])
        return _Forked(self._connection.recv(), self._connection)

    def close(self) -> None:
        self._connection.close()
        self._socket.close()
        self.process.wait()


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


@attrs.define(eq=False)
class _Worker:
    process: "subprocess.Popen[bytes] | _Forked"
    connection: Connection

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class _Pool:
    """The ranks that are alive. Grows to the largest world asked for."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._template: _Template | None = None

    def run(
        self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float, device_type: str
    ) -> list[Any]:
        payload = _by_value(fn, args)
        self._discard_the_dead()
        try:
            self._grow(world_size)
            workers = self._workers[:world_size]
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for rank, worker in enumerate(workers):
                call = (rank, world_size, store.port, timeout, device_type, payload)
                worker.connection.send_bytes(cloudpickle.dumps(call))
            return _collect(workers, timeout)
        except BaseException:
            self.end_ranks()
            raise

    def end_ranks(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def close(self) -> None:
        self.end_ranks()
        if self._template is not None:
            self._template.close()
            self._template = None

    def _discard_the_dead(self) -> None:
        if any(worker.process.poll() is not None for worker in self._workers):
            self.end_ranks()

    def _grow(self, world_size: int) -> None:
        fresh = [self._start() for _ in range(world_size - len(self._workers))]
        self._workers += fresh
        for worker in fresh:
            if not worker.connection.poll(_START_SECONDS):
                raise RanksTimedOut(f"a rank did not start within {_START_SECONDS:.0f} s")
            worker.connection.recv_bytes()

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            if sys.platform != "linux":
                return _Worker(_spawn(theirs), Connection(ours.detach()))
            if self._template is None or self._template.process.poll() is not None:
                self._template = _Template()
            return _Worker(self._template.fork(theirs), Connection(ours.detach()))


def _collect(workers: list[_Worker], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    deadline = time.monotonic() + timeout
    pending = {worker.connection: rank for rank, worker in enumerate(workers)}
    while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            try:
                succeeded, when, value = cloudpickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                failures.append(_Failure(rank, 0.0, _how_it_died(workers[rank].process)))
                continue
            if succeeded:
                results[rank] = value
            else:
                failures.append(_Failure(rank, when, value))
        if failures:
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if failures:
        root = min(failures, key=lambda failure: (failure.is_echo, failure.when))
        raise RankFailed(root.rank, f"rank {root.rank} of {len(workers)} failed:\n{root.text}")
    if pending:
        stuck = ", ".join(map(str, sorted(pending.values())))
        raise RanksTimedOut(f"after {timeout} s these of {len(workers)} ranks were still at work: {stuck}")
    return [results[rank] for rank in range(len(workers))]


def _how_it_died(process: "subprocess.Popen[bytes] | _Forked") -> str:
    code = process.wait(timeout=10)
    if code < 0:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    return f"exited with status {code} in the middle of the call"


def _by_value(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """`fn` and `args`, with all that they use of the module of `fn`, unless that is an installed one.

    A test module is in `sys.modules`, so that cloudpickle would send its name, but no rank can import it.
    """
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    installed = file is None or any(Path(file).is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix))
    if module is None or installed or module.__name__ in ("__main__", *cloudpickle.list_registry_pickle_by_value()):
        return cloudpickle.dumps((fn, args))
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((fn, args))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


_pool = _Pool()
atexit.register(_pool.close)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, device_type: str = "cpu"
) -> list[Any]:
    """Call `fn(*args)` on `world_size` ranks at once; returns the results by rank.

    The function is sent by value (lambdas and closures work) and finds a default process group with a store
    of its own; `torch.distributed.get_rank()` tells the rank. RNG (seed 0), default dtype, grad mode and
    the number of threads (1) are set anew for each call.

    Args:
        timeout: seconds for the whole call, and the time limit of each of its collectives.
        device_type: "cpu" for gloo alone; else each rank has a device of this type as its current one, and the
            group the backend that goes with it beside gloo.

    Raises:
        RankFailed: a rank raised or died; says which was first, and how.
        RanksTimedOut: the time was up.
    """
    if world_size < 1:
        raise ValueError(f"world_size = {world_size}: must be at least 1")
    return _pool.run(fn, world_size, args, timeout, device_type)

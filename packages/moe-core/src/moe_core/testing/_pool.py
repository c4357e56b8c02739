"""`run_ranks`: a function on several gloo ranks, in processes that are started once and kept.

Starting a rank costs seconds, a call on ranks that are there about 0.05 s. Ranks are never trusted after
something went wrong: any exception, kill or time-out ends all of them, and the next call starts afresh.
"""

import atexit
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it silently

from moe_core.testing._process import Process, RankStarter

try:
    import cloudpickle
except ImportError as error:
    raise ImportError("moe_core.testing needs cloudpickle: pip install 'moe-core[testing]'") from error

_GRACE_SECONDS = 2.0
"""How long peers may take to report after the first failure, so that the root can be told from its echoes."""

_START_SECONDS = 120.0

_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "Timed out",
)
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


@attrs.define(eq=False)
class _Worker:
    process: Process
    connection: Connection

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class _Pool:
    """The ranks that are alive. Grows to the largest world asked for."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._starter = RankStarter()

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
        self._starter.close()

    def _discard_the_dead(self) -> None:
        if any(worker.process.poll() is not None for worker in self._workers):
            self.end_ranks()

    def _grow(self, world_size: int) -> None:
        fresh = [_Worker(*self._starter.start()) for _ in range(world_size - len(self._workers))]
        self._workers += fresh
        for worker in fresh:
            if not worker.connection.poll(_START_SECONDS):
                raise RanksTimedOut(f"a rank did not start within {_START_SECONDS:.0f} s")
            worker.connection.recv_bytes()


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


def _how_it_died(process: Process) -> str:
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
    if module is None or file is None or module.__name__ == "__main__":
        return cloudpickle.dumps((fn, args))
    if any(Path(file).is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix)):
        return cloudpickle.dumps((fn, args))
    if module.__name__ in cloudpickle.list_registry_pickle_by_value():
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

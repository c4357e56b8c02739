"""The process at the other end of `run_ranks`: a rank that waits for calls, or the template that ranks are forked from.

Both are given the file descriptor of their connection.
"""

import functools
import gc
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
import torch.distributed.tensor._redistribute
import torch.distributed.tensor.debug
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it silently


def _serve_calls(descriptor: int) -> None:
    connection = Connection(descriptor)
    connection.send_bytes(b"ready")
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        reply = _answer(*cloudpickle.loads(message))
        connection.send_bytes(reply)


def _answer(*call: Any) -> bytes:
    try:
        # pickled while the group is alive: a result may be a DTensor
        with warnings.catch_warnings():
            return cloudpickle.dumps((True, time.time(), _run(*call)))
    except (Exception, SystemExit):  # whatever the function raises goes to the caller
        return cloudpickle.dumps((False, time.time(), traceback.format_exc()))


def _run(rank: int, world_size: int, port: int, timeout: float, device_type: str, payload: bytes) -> Any:
    _reset()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    limit = timedelta(seconds=timeout)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    backend = "gloo"
    if device_type != "cpu":
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    try:
        fn, args = cloudpickle.loads(payload)
        result = fn(*args)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()
        _forget_meshes()
        gc.collect()


def _forget_meshes() -> None:
    """DTensor's caches hold meshes, and with them the groups and their threads; as meshes compare equal across calls,
    they would even hand out one whose groups are gone.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor."):
            for holder in (module, *(value for value in vars(module).values() if isinstance(value, type))):
                for attribute in list(vars(holder)):
                    cached = getattr(holder, attribute, None)
                    if isinstance(cached, functools._lru_cache_wrapper):
                        cached.cache_clear()
    _clear(torch.distributed.tensor.debug, "_clear_sharding_prop_cache")
    _clear(torch.distributed.tensor._redistribute, "clear_redistribute_planner_cache")


def _clear(holder: Any, method: str) -> None:
    """Versions of torch differ in what there is to clear."""
    clear = getattr(holder, method, None)
    if callable(clear):
        clear()


def _reset() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


def _serve_forks(descriptor: int) -> None:
    """The template: imports what ranks need, then forks a rank or says how one ended, until the other side hangs up."""
    import torch._dynamo  # what a first process group imports, and the slowest of all
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401 - imported for the forks

    # what is imported is never garbage: the collections of the ranks need not look at it
    gc.freeze()
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
            connection.send(_fork(theirs, argument, (connection, channel)))
            os.close(theirs)
        else:
            pid, status = os.waitpid(argument, os.WNOHANG if what == "poll" else 0)
            connection.send(os.waitstatus_to_exitcode(status) if pid else None)


def _fork(theirs: int, path: list[str], inherited: Sequence[Connection | socket.socket]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for resource in inherited:
            resource.close()
        sys.path[:] = path
        _serve_calls(theirs)
        status = 0
    finally:
        # without the clean-up that belongs to the template
        os._exit(status)


if __name__ == "__main__":
    serve = _serve_forks if "template" in sys.argv else _serve_calls
    serve(int(sys.argv[1]))

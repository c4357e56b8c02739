"""How a process that has used torch ends."""

import atexit
import ctypes
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End this process with `status`, as `sys.exit` does in one that has threads of torch's.

    Gloo's and autograd's threads outlive `destroy_process_group` for a moment. One that asks for the interpreter's
    lock while the interpreter takes itself down is unwound by Python 3.11 from within C++, and the process aborts
    ("terminate called without an active exception", pytorch #38228) after all its work is done. So threads of Python's
    are waited for, what was registered for the exit is run and what was printed is flushed, but the interpreter is not
    taken down. A file that is still open, other than the standard streams, loses what is in its buffer.
    """
    if "torch" not in sys.modules:
        sys.exit(status)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls at its end; typeshed lacks it
        atexit._run_exitfuncs()
        if not _flushed() and status == 0:
            status = 1
    finally:
        os._exit(status)


def _flushed() -> bool:
    """Whether all that was printed has arrived; a reader that has gone is the only reason that is not told."""
    with suppress(Exception):  # a platform whose C library is found in another way; its buffer is most often empty
        ctypes.CDLL(None).fflush(None)
    arrived = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # a stream that was closed before the start
                stream.flush()
        except (OSError, ValueError) as error:
            arrived = False
            if not isinstance(error, BrokenPipeError) and sys.stderr is not None:
                with suppress(OSError, ValueError):
                    print(f"nemotron-nano: what was printed could not be written: {error}", file=sys.stderr, flush=True)
    return arrived

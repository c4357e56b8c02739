"""How a process of the command ends: which errors are said in one line, and leaving once torch has been used."""

import atexit
import ctypes
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "safetensors", "cattrs", "attr"})


def is_user_error(error: BaseException) -> bool:
    """Whether the error is of a class made to be read by users.

    Those are subclasses of ValueError (a wrong config, path or layout) and of ImportError (a missing extra) that
    a plugin or one of our packages defines. The classes of Python and of libraries tell of bugs.
    """
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, (ValueError, ImportError)) and package not in _LIBRARIES


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

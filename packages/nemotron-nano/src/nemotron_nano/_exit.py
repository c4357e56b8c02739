"""How a process that has used torch ends."""

import atexit
import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End this process with `status`, as `sys.exit` does in one that has threads of torch's.

    Gloo's and autograd's threads outlive `destroy_process_group` for a moment. One that asks for the interpreter's
    lock while the interpreter takes itself down is unwound by Python 3.11 from within C++, and the process aborts
    ("terminate called without an active exception", pytorch #38228) after all its work is done. So what was
    registered for the exit is run and what was printed is flushed, but the interpreter is not taken down.
    """
    if "torch" not in sys.modules:
        sys.exit(status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the reader of a pipe is gone: nobody is left to tell
            status = status or 1
    os._exit(status)

"""Which errors are mistakes of the user's, to be said in one line without a traceback."""

import sys

_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "safetensors", "cattrs", "attr"})


def is_user_error(error: BaseException) -> bool:
    """Whether the error is of a class made to be read by users.

    Those are subclasses of ValueError (a wrong config, path or layout) and of ImportError (a missing extra) that
    a plugin or one of our packages defines. The classes of Python and of libraries tell of bugs.
    """
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, (ValueError, ImportError)) and package not in _LIBRARIES

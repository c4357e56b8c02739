"""Which errors are mistakes of the user's, to be said in one line without a traceback."""


def is_user_error(error: BaseException) -> bool:
    """Whether the error is of a class made to be read by users.

    Those are subclasses of ValueError (a wrong config, path or layout) and of ImportError (a missing extra).
    The bare classes are bugs, or of libraries.
    """
    libraries = (ValueError, ImportError, ModuleNotFoundError, UnicodeDecodeError, UnicodeEncodeError)
    return isinstance(error, (ValueError, ImportError)) and type(error) not in libraries

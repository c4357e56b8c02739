"""What torch.distributed.checkpoint raises and warns, as this package's users should see it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from ckpt_layout._errors import PeerError


@contextmanager
def dcp_errors(what: str) -> Iterator[None]:
    """Raise a `PeerError` that names the ranks where torch raises a `BaseException`, which `except Exception` misses.

    It also warns of a save without process group even where that is asked for.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:
        failures = sorted(error.failures.items())
        ranks = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in failures)
        raise PeerError(f"{what} failed on {ranks}") from error

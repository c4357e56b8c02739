"""Doing something on all ranks so that all of them fail if one does."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ckpt_layout._errors import PeerError


def world() -> tuple[int, int]:
    """(rank, number of ranks) of the default process group; (0, 1) without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gathered(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """`value` of every rank, by rank."""
    if group is None and world()[1] == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def together(what: str, group: ProcessGroup | None = None) -> Iterator[None]:
    """Leave the block on all ranks or raise on all: the own error where there is one, `PeerError` elsewhere.

    The block must hold no collective, for a rank that failed does not take part in the next one.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # raised again below, once the peers know of it
        error = caught
    reports = gathered(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    failed = [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report is not None]
    if failed:
        raise PeerError(f"{what} failed on {'; '.join(failed)}")


@contextmanager
def removed_on_failure(partial: Path) -> Iterator[None]:
    """Remove the folder `partial` if the block raises, so that a full disk is not full of what is of no use.

    The block must raise on all ranks or on none, as `together` does: then nobody writes there any more.
    """
    try:
        yield
    except Exception:  # whatever it was: it is raised again below, once the folder is gone
        if world()[0] == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise

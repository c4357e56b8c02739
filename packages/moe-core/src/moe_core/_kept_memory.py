"""Memory for a CPU's large results that is used again, instead of going back to the system and coming anew.

The gradient of an expert stack is a new tensor in every step. Beyond 32 MiB glibc returns at once what is freed, and
the first touch of what comes instead, page by page, can take longer than the products that are written there: 25 of
42 ms for 50 MB. Here a block that is freed waits for the next tensor of its size. Meanwhile the system may take its
pages if it runs short of memory (`MADV_FREE`). Blocks in use and waiting are together never more than were once in use
at the same time.
"""

import ctypes
import math
import mmap
import threading
import weakref
from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

_WORTHWHILE = 32 << 20
"""Bytes from which on it is used: what is smaller glibc itself may keep and hand out again."""

_CAN = hasattr(mmap, "MADV_FREE")


class _Blocks:
    """An allocator's cache: it changes no result."""

    def __init__(self) -> None:
        self._returned: deque[mmap.mmap] = deque()
        """Blocks whose tensors died, on any thread and between any two lines: only appended to, and popped from."""
        self._lock = threading.RLock()
        self._waiting: list[mmap.mmap] = []
        """The oldest first."""
        self._bytes = 0
        """Of all blocks, in use or waiting."""
        self._most_in_use = 0

    def take(self, size: int) -> mmap.mmap:
        """Raises OSError: the system has no memory for a new one, even without those that wait."""
        with self._lock:
            with suppress(IndexError):
                while True:
                    self._waiting.append(self._returned.popleft())
            in_use = self._bytes - sum(map(len, self._waiting))
            self._most_in_use = max(self._most_in_use, in_use + size)
            fitting = [block for block in self._waiting if len(block) == size]
            if fitting:
                self._waiting.remove(fitting[-1])
                return fitting[-1]
            self._drop_down_to(self._most_in_use - size)
            try:
                block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError:
                self._drop_down_to(0)
                block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._bytes += size
            return block

    def give(self, block: mmap.mmap) -> None:
        with suppress(OSError):  # a system that takes nothing back
            block.madvise(mmap.MADV_FREE)
        self._returned.append(block)

    def _drop_down_to(self, size: int) -> None:
        while self._waiting and self._bytes > size:
            self._bytes -= len(self._waiting.pop(0))


_blocks = _Blocks()


def new_empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Like `like.new_empty(shape)`; a large one on the CPU lies in a block that an earlier one left, if there is one.

    Such a tensor's storage cannot be resized; else it is one like any other.
    """
    count = math.prod(shape)
    size = count * like.element_size()
    if not _CAN or like.device.type != "cpu" or size < _WORTHWHILE:
        return like.new_empty(shape)
    try:
        block = _blocks.take(size)
    except OSError:  # torch's own error says how much was asked for
        return like.new_empty(shape)
    lent = (ctypes.c_char * size).from_buffer(block)  # the storage holds it, so it dies with the last tensor there
    weakref.finalize(lent, _blocks.give, block).atexit = False
    return torch.frombuffer(lent, dtype=like.dtype, count=count).view(shape)

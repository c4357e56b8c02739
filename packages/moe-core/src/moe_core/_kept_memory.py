"""Memory for a CPU's large results that is used again, instead of going back to the system and coming anew.

The gradient of an expert stack is a new tensor in every step. Beyond 32 MiB glibc returns at once what is freed, and
the first touch of what comes instead, page by page, can take longer than the products that are written there: 25 of
42 ms for 50 MB. Here a block that is freed waits for the next tensor of its size. Meanwhile the system may take its
pages if it runs short of memory (`MADV_FREE`), so what waits costs nothing but what `top` shows.
"""

import ctypes
import math
import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor

_WORTHWHILE = 32 << 20
"""Bytes from which on it is used: what is smaller glibc itself may keep and hand out again."""

_CAN = hasattr(mmap, "MADV_FREE")


class _Waiting:
    """Blocks by size, for whoever asks first. An allocator's cache: it changes no result.

    Tensors die on any thread, and within any of these lines, so each is one step that nothing can come between.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, list[mmap.mmap]] = {}

    def take(self, size: int) -> mmap.mmap | None:
        with suppress(IndexError):
            return self._by_size.setdefault(size, []).pop()
        return None

    def give(self, block: mmap.mmap) -> None:
        with suppress(OSError):  # a system that cannot take its pages back: the block is freed for good
            block.madvise(mmap.MADV_FREE)
            self._by_size[len(block)].append(block)


_waiting = _Waiting()


def new_empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Like `like.new_empty(shape)`; a large one on the CPU lies in a block that an earlier one left, if there is one.

    Such a tensor's storage cannot be resized; else it is one like any other.
    """
    count = math.prod(shape)
    size = count * like.element_size()
    if not _CAN or like.device.type != "cpu" or size < _WORTHWHILE:
        return like.new_empty(shape)
    block = _waiting.take(size)
    if block is None:
        try:
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:  # no memory, most likely, and torch's own error says how much was asked for
            return like.new_empty(shape)
    lent = (ctypes.c_char * size).from_buffer(block)  # the storage holds it, so it dies with the last tensor there
    weakref.finalize(lent, _waiting.give, block).atexit = False
    return torch.frombuffer(lent, dtype=like.dtype, count=count).view(shape)

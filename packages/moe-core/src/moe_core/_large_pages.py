"""Memory in large pages for a CPU's large results."""

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

_WORTHWHILE = 32 << 20
"""Bytes from which on it is used: what is smaller glibc may keep and hand out again, which is faster still."""

_CAN = hasattr(mmap, "MADV_HUGEPAGE")


def new_empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Like `like.new_empty(shape)`; on Linux, a large one on the CPU is in large pages if the system gives them.

    Such a tensor's storage cannot be resized; else it is one like any other.

    The gradient of an expert stack is new memory in every step, and its first touch, page by page, can take as long
    as the products that are written to it: 33 of 58 ms for 50 MB in pages of 4 KiB, 4 of 29 ms in large ones.
    """
    count = math.prod(shape)
    if not _CAN or like.device.type != "cpu" or count * like.element_size() < _WORTHWHILE:
        return like.new_empty(shape)
    try:
        memory = mmap.mmap(-1, count * like.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no memory, most likely, and torch's own error says how much was asked for
        return like.new_empty(shape)
    with suppress(OSError):  # a system without them: the pages are small then
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype, count=count).view(shape)

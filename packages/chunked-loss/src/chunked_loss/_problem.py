"""The inputs of the loss that take no gradient, as the ways to compute it receive them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunked_loss._chunk import ChunkLosses, Terms

ChunkKernel = Callable[[Tensor, Tensor, Terms, Tensor | None], tuple[ChunkLosses, Tensor]]


class Problem(NamedTuple):
    """T rows of hidden states against a vocabulary, and what each row counts."""

    labels: Tensor
    """[T] int64, 0 where ignored."""
    valid: Tensor
    """[T] bool."""
    row_weight: Tensor
    """[T] in the accumulation dtype: d(result)/d(loss of token t), 0 where ignored."""
    terms: Terms
    vocab_size: int
    """Rows of the weight that are classes; the others are padding."""
    chunk_tokens: int
    kernel: ChunkKernel


def chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def joined(parts: list[ChunkLosses], like: Tensor) -> ChunkLosses:
    """The losses of all chunks; of no chunk too."""
    if not parts:
        empty = like.new_zeros(0)
        return ChunkLosses(empty, empty, empty.bool())
    return ChunkLosses(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Products go by the rules of this package; some devices, like meta, have no autocast to switch off."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)

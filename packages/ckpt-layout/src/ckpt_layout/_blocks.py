"""What a rank's shard of a native tensor is in a Hugging Face folder: blocks of the tensors on disk."""

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor

from ckpt_layout._families import Family
from ckpt_layout._pieces import Piece, layouts, overlaps
from ckpt_layout._region import local_of, region_of


@attrs.frozen
class Block:
    """A part of a tensor on disk, and the values that this rank has for it."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor on disk."""
    where: tuple[slice, ...]
    values: Tensor
    """On the CPU, in the order of the dimensions on disk; a view of the shard where that is possible."""


def hf_blocks(
    name: str, tensor: Tensor, family: Family, *, dtype: torch.dtype | None = None, stacked: bool = False
) -> Iterator[Block]:
    """This rank's part of the native tensor `name`, as blocks of the tensors that `family` has on disk.

    No collective, no state, and nothing of other ranks: right for a plain tensor (all of it) and for any DTensor,
    an empty shard included (no blocks). Blocks of all ranks together are the whole tensors; replicas repeat them.

    Args:
        dtype: of the values; None: the tensor's.
        stacked: experts in one tensor, under the native name as the family writes it.

    Raises:
        LayoutError: a ValueError: a shard that does not fit its placements, or cuts what the family interleaves.
    """
    pieces = layouts(family, name, tensor.shape, stacked=stacked)[0]
    return blocks_of(tensor, pieces, tensor.dtype if dtype is None else dtype)


def blocks_of(tensor: Tensor, pieces: Sequence[Piece], dtype: torch.dtype) -> Iterator[Block]:
    local, region = local_of(tensor), region_of(tensor)
    for piece in pieces:
        for overlap in overlaps(local, region, piece):
            yield Block(piece.key, piece.shape, overlap.disk, overlap.values(dtype))

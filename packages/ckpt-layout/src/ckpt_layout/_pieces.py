"""From a native tensor to the tensors on disk that it is made of, and the part of each that a rank has."""

import re
from collections.abc import Iterator, Sequence
from itertools import product

import attrs
from torch import Tensor

from ckpt_layout._errors import LayoutError
from ckpt_layout._families import Family, Rule
from ckpt_layout._ranges import positions
from ckpt_layout._region import Region


@attrs.frozen
class Piece:
    """One tensor on disk: a box of the native tensor."""

    key: str
    box: tuple[range, ...]
    """Per native dimension, the indices that it covers."""
    is_expert: bool = False
    """The box has one index of dimension 0, and the tensor on disk lacks that dimension."""
    transpose: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on disk."""
        return self.to_disk([len(indices) for indices in self.box])

    def to_disk(self, per_dim: Sequence) -> tuple:
        """What is given per native dimension, in the order of the dimensions on disk."""
        values = list(per_dim[1:] if self.is_expert else per_dim)
        if self.transpose:
            values[-2:] = reversed(values[-2:])
        return tuple(values)


@attrs.frozen
class Overlap:
    """A block that a rank's shard and a piece have in common."""

    local: Tensor
    """A view of the local shard, with the dimensions that are on disk, in their order."""
    disk: tuple[slice, ...]
    """Where the block lies in the tensor on disk."""


def overlaps(local: Tensor, region: Region, piece: Piece) -> Iterator[Overlap]:
    """The blocks of `piece` that `local`, which holds `region` of the native tensor, has."""
    per_dim = [positions(runs, box) for runs, box in zip(region, piece.box, strict=True)]
    for block in product(*per_dim):
        view = local[tuple(held for held, _ in block)]
        view = view[0] if piece.is_expert else view
        view = view.transpose(-1, -2) if piece.transpose else view
        inside = [
            slice(indices.start - box.start, indices.stop - box.start)
            for (_, indices), box in zip(block, piece.box, strict=True)
        ]
        yield Overlap(view, piece.to_disk(inside))


def layouts(family: Family, name: str, shape: Sequence[int]) -> list[list[Piece]]:
    """The ways in which the native tensor `name` of the global `shape` may lie on disk; the first is written."""
    ways = [_pieces(rule, prefix, shape) for rule, prefix in _matches(family, name)]
    return [*ways, [Piece(name, tuple(range(size) for size in shape))]]


def _matches(family: Family, name: str) -> Iterator[tuple[Rule, str]]:
    for rule in family.rules:
        found = re.fullmatch(rf"(|.*\.){re.escape(rule.native)}", name)
        if found:
            yield rule, found[1]


def _pieces(rule: Rule, prefix: str, shape: Sequence[int]) -> list[Piece]:
    parts = len(rule.disk)
    if parts > 1 and (len(shape) <= rule.join_dim or shape[rule.join_dim] % parts):
        raise LayoutError(
            f"{prefix}{rule.native} of shape {tuple(shape)}: "
            f"dimension {rule.join_dim} must divide into {parts} equal parts"
        )
    whole = [range(size) for size in shape]
    pieces = []
    for index, pattern in enumerate(rule.disk):
        box = list(whole)
        if parts > 1:
            length = shape[rule.join_dim] // parts
            box[rule.join_dim] = range(index * length, (index + 1) * length)
        if "{e}" not in pattern:
            pieces.append(Piece(prefix + pattern, tuple(box), transpose=rule.transpose))
            continue
        for expert in range(shape[0]):
            key = prefix + pattern.replace("{e}", str(expert))
            pieces.append(Piece(key, (range(expert, expert + 1), *box[1:]), is_expert=True, transpose=rule.transpose))
    return sorted(pieces, key=lambda piece: piece.box[0].start if piece.box else 0)

"""From a native tensor to the tensors on disk that it is made of, and the part of each that a rank has."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import attrs
import torch
from torch import Tensor

from ckpt_layout._errors import LayoutError
from ckpt_layout._families import Family, Rule, on_disk, renamed
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
    interleave: int = 1
    join_dim: int = 1
    """The native dimension of whose `interleave` parts the disk has one index after the other of each."""
    groups: int = 1
    """Equal groups of `join_dim` that are interleaved each by itself."""
    part: tuple[int, int] = (0, 1)
    """(index, count): the disk has the boxes of `count` native tensors one behind the other along `join_dim`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on disk."""
        sizes = [len(indices) for indices in self.box]
        if self.part[1] > 1:
            sizes[self.join_dim] *= self.part[1]
        return self.to_disk(sizes)

    def to_disk(self, per_dim: Sequence) -> tuple:
        """What is given per native dimension, in the order of the dimensions on disk."""
        values = list(per_dim[1:] if self.is_expert else per_dim)
        if self.transpose:
            values[-2:] = reversed(values[-2:])
        return tuple(values)

    @property
    def interleaved_dim(self) -> int:
        """`join_dim` as a dimension on disk, counted from the end."""
        dim = self.join_dim - len(self.box)
        return -3 - dim if self.transpose and dim >= -2 else dim

    def place(self, index: int) -> int:
        """Where on disk `index` of an interleaved `join_dim` stands, counted from the start of the part."""
        per_group = len(self.box[self.join_dim]) // self.groups
        group, inside = divmod(index, per_group)
        which, nth = divmod(inside, per_group // self.interleave)
        return group * per_group + nth * self.interleave + which


@attrs.frozen
class Overlap:
    """A block that a rank's shard and a piece have in common."""

    local: Tensor
    """A view of the local shard, with the dimensions that are on disk, in their order. Where the disk interleaves
    parts, the dimension stands there as two: (index in a part, part)."""
    disk: tuple[slice, ...]
    """Where the block lies in the tensor on disk."""

    def fill(self, values: Tensor) -> None:
        """Set this part of the shard to `values`, which have the shape of the block on disk, or are `local`."""
        if values is not self.local:
            self.local.copy_(values.reshape(self.local.shape))

    def values(self, dtype: torch.dtype) -> Tensor:
        """This part of the shard as it lies on disk, on the CPU; shares memory with it where it can."""
        return self.local.to(dtype).cpu().reshape([part.stop - part.start for part in self.disk])


def overlaps(local: Tensor, region: Region, piece: Piece) -> Iterator[Overlap]:
    """The blocks of `piece` that `local`, which holds `region` of the native tensor, has."""
    per_dim = [positions(runs, box) for runs, box in zip(region, piece.box, strict=True)]
    whole = piece.interleave == 1 or _holds_all(per_dim[piece.join_dim], piece)
    if not whole:
        per_dim[piece.join_dim] = _one_by_one(per_dim[piece.join_dim], piece)
    for block in product(*per_dim):
        view = local[tuple(held for held, _ in block)]
        view = view[0] if piece.is_expert else view
        view = view.transpose(-1, -2) if piece.transpose else view
        view = _interleaved(view, piece) if piece.interleave > 1 and whole else view
        inside = [
            slice(indices.start - box.start, indices.stop - box.start)
            for (_, indices), box in zip(block, piece.box, strict=True)
        ]
        if piece.part[0] > 0:
            inside[piece.join_dim] = _moved(inside[piece.join_dim], piece.part[0] * len(piece.box[piece.join_dim]))
        yield Overlap(view, piece.to_disk(inside))


def _moved(indices: slice, by: int) -> slice:
    return slice(indices.start + by, indices.stop + by)


def _holds_all(held: Sequence[tuple[slice, range]], piece: Piece) -> bool:
    return [indices for _, indices in held] == [piece.box[piece.join_dim]]


def _one_by_one(held: Sequence[tuple[slice, range]], piece: Piece) -> list[tuple[slice, range]]:
    """Blocks of one row each, where a rank has only some of the rows that the disk interleaves."""
    if held and piece.interleaved_dim != -len(piece.shape):
        whole, mine = len(piece.box[piece.join_dim]), sum(len(indices) for _, indices in held)
        raise LayoutError(
            f"{piece.key}: its file interleaves {piece.interleave} parts along a dimension of {whole}, of which this "
            f"rank holds {mine}; shard another dimension (Shard(0): the experts), or redistribute first"
        )
    rows = ((run.start + i, index) for run, indices in held for i, index in enumerate(indices))
    return [(slice(row, row + 1), range(place := piece.place(index), place + 1)) for row, index in rows]


def _interleaved(view: Tensor, piece: Piece) -> Tensor:
    dim = piece.interleaved_dim
    return view.unflatten(dim, (piece.groups, piece.interleave, -1)).transpose(dim, dim - 1)


def layouts(family: Family, name: str, shape: Sequence[int], *, stacked: bool = False) -> list[list[Piece]]:
    """The ways in which the native tensor `name` of the global `shape` may lie on disk; the first is written.

    Args:
        stacked: put the ways without a file tensor for each expert first.
    """
    ways = [_pieces(rule, on_disk(prefix, family), shape) for rule, prefix in _matches(family, name)]
    whole = tuple(range(size) for size in shape)
    names = dict.fromkeys([on_disk(name, family), name])
    ways += [[Piece(key, whole)] for key in names]
    if stacked:
        ways.sort(key=lambda way: any(piece.is_expert for piece in way))
    others = [family.also] if len(family.also) == 1 else [family.also, *((pair,) for pair in family.also)]
    for way, renames in product(list(ways), others):
        keys = [renamed(piece.key, renames) for piece in way]
        if keys != [piece.key for piece in way]:
            ways.append([attrs.evolve(piece, key=key) for piece, key in zip(way, keys, strict=True)])
    return ways


def check_parts(pieces: Iterable[tuple[str, Piece]]) -> None:
    """Each tensor on disk must be made of what the native tensors given with their names have, each number once.

    Raises:
        LayoutError: two native tensors claim the same numbers, or nobody has some of them.
    """
    claims: dict[str, list[tuple[str, Piece]]] = {}
    for name, piece in pieces:
        claims.setdefault(piece.key, []).append((name, piece))
    for key, those in claims.items():
        names = ", ".join(name for name, _ in those)
        parts = [piece.part for _, piece in those]
        if len(set(parts)) < len(parts) or len({count for _, count in parts}) > 1:
            raise LayoutError(f"{key}: several tensors of the model go by this name in the files: {names}")
        if len(parts) < parts[0][1]:
            raise LayoutError(
                f"{key}: is made of {parts[0][1]} tensors, of which the model has only {len(parts)}: {names}"
            )


def _matches(family: Family, name: str) -> Iterator[tuple[Rule, str]]:
    for rule in family.rules:
        found = re.fullmatch(rf"(|.*\.){re.escape(rule.native)}", name)
        if found:
            yield rule, found[1]


def _groups(rule: Rule, prefix: str) -> int:
    if isinstance(rule.groups, str):
        raise LayoutError(f"{prefix}{rule.native}: how it lies in the files depends on {rule.groups} in config.json")
    return rule.groups


def _pieces(rule: Rule, prefix: str, shape: Sequence[int]) -> list[Piece]:
    groups = _groups(rule, prefix)
    parts = max(len(rule.disk), rule.interleave * groups)
    if parts > 1 and (len(shape) <= rule.join_dim or shape[rule.join_dim] % parts):
        raise LayoutError(
            f"{prefix}{rule.native} of shape {tuple(shape)}: "
            f"dimension {rule.join_dim} must divide into {parts} equal parts"
        )
    whole = [range(size) for size in shape]
    pieces = []
    for index, pattern in enumerate(rule.disk):
        box = list(whole)
        if len(rule.disk) > 1:
            length = shape[rule.join_dim] // parts
            box[rule.join_dim] = range(index * length, (index + 1) * length)
        if "{e}" not in pattern:
            pieces.append(
                Piece(
                    prefix + pattern,
                    tuple(box),
                    transpose=rule.transpose,
                    interleave=rule.interleave,
                    join_dim=rule.join_dim,
                    groups=groups,
                    part=rule.part,
                )
            )
            continue
        for expert in range(shape[0]):
            key = prefix + pattern.replace("{e}", str(expert))
            pieces.append(Piece(key, (range(expert, expert + 1), *box[1:]), is_expert=True, transpose=rule.transpose))
    return sorted(pieces, key=lambda piece: piece.box[0].start if piece.box else 0)

"""How native tensors lie on disk: names both ways, the pieces that one is made of, and a rank's blocks of them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import attrs
import torch
from torch import Tensor

from ckpt_layout._errors import LayoutError
from ckpt_layout._families import Family, Renames, Rule
from ckpt_layout._shards import Region, local_of, positions, region_of

# -- names -------------------------------------------------------------------------------------------------


def renamed(name: str, renames: Renames) -> str:
    """`name` with each pair's first parts replaced by its second, in order."""
    for old, replacement in renames:
        if old.removeprefix("^") not in name:
            continue
        start, old = ("^()", old[1:]) if old.startswith("^") else (r"(^|\.)", old)
        name = re.sub(rf"{start}{re.escape(old)}(?=\.|$)", rf"\g<1>{replacement}", name).removeprefix(".")
    return name


def on_disk(name: str, family: Family) -> str:
    """The name on disk of a native tensor that no rule matches."""
    return renamed(name, (*family.renames, *family.aliases))


def native(key: str, family: Family) -> str:
    """The name that `on_disk` made `key` of; of several, the one without aliases."""
    for old, replacement in reversed(family.renames):
        anchor = "^" if old.startswith("^") else ""
        key = renamed(key, ((anchor + replacement, old.removeprefix("^")),))
    return key


# -- pieces ------------------------------------------------------------------------------------------------


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


def _pieces(rule: Rule, prefix: str, shape: Sequence[int]) -> list[Piece]:
    if isinstance(rule.groups, str):
        raise LayoutError(f"{prefix}{rule.native}: how it lies in the files depends on {rule.groups} in config.json")
    parts = max(len(rule.disk), rule.interleave * rule.groups)
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
        if "{e}" in pattern:
            pieces += [
                Piece(key, (range(e, e + 1), *box[1:]), is_expert=True, transpose=rule.transpose)
                for e in range(shape[0])
                for key in [prefix + pattern.replace("{e}", str(e))]
            ]
        else:
            pieces.append(
                Piece(
                    prefix + pattern,
                    tuple(box),
                    transpose=rule.transpose,
                    interleave=rule.interleave,
                    join_dim=rule.join_dim,
                    groups=rule.groups,
                    part=rule.part,
                )
            )
    return sorted(pieces, key=lambda piece: piece.box[0].start if piece.box else 0)


def native_shapes(family: Family, on_disk: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the native tensors that a folder holds, from the names and shapes `on_disk`."""
    shapes: dict[str, tuple[int, ...]] = {}
    experts: dict[str, int] = defaultdict(int)
    for key, shape in sorted(on_disk.items()):
        if any(key.endswith(end) for end in family.ignore):
            continue
        matched = _matching(family, key)
        if not matched:
            shapes[native(key, family)] = shape
        for rule, name, expert in matched:
            if expert is not None:
                experts[name] = max(experts[name], expert + 1)
            shapes[name] = _native_shape(key, rule, shape, is_expert=expert is not None)
    return {name: (experts[name], *shape) if name in experts else shape for name, shape in shapes.items()}


def _matching(family: Family, key: str) -> list[tuple[Rule, str, int | None]]:
    """The rule that made this key, the native name, and which expert it is; several where it has several parts."""
    matched: list[tuple[Rule, str, int | None]] = []
    for rule in family.rules:
        if matched and rule.disk != matched[0][0].disk:
            continue
        for pattern in rule.disk:
            suffix = re.escape(pattern).replace(r"\{e\}", r"(?P<e>\d+)")
            found = re.fullmatch(rf"(?P<prefix>|.*\.){suffix}", key)
            if found:
                expert = int(found["e"]) if "{e}" in pattern else None
                matched.append((rule, native(found["prefix"], family) + rule.native, expert))
                if rule.part[1] == 1:
                    return matched
    return matched


def _native_shape(key: str, rule: Rule, shape: tuple[int, ...], *, is_expert: bool) -> tuple[int, ...]:
    sizes = list(shape)
    if rule.transpose:
        sizes[-2:] = reversed(sizes[-2:])
    if len(rule.disk) > 1:
        sizes[rule.join_dim - is_expert] *= len(rule.disk)
    if rule.part[1] > 1:
        if len(sizes) <= rule.join_dim or sizes[rule.join_dim] % rule.part[1]:
            raise LayoutError(f"{key} of shape {shape}: dimension {rule.join_dim} must divide into {rule.part[1]}")
        sizes[rule.join_dim] //= rule.part[1]
    return tuple(sizes)


# -- what a rank has of a piece ----------------------------------------------------------------------------


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

"""`load_hf` and `save_hf`: a model from and to a Hugging Face folder, each rank reading and writing what it holds."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ckpt_layout._errors import LayoutError, some
from ckpt_layout._families import Family, resolve_family
from ckpt_layout._folders import fresh_folder, partial_of, refuse_occupied
from ckpt_layout._hf_folder import Entry, FilePlan, HfFolder, bytes_of, create, plan_files, write_block, write_index
from ckpt_layout._layout import Piece, blocks_of, check_parts, layouts, overlaps
from ckpt_layout._ranks import assert_replicated, removed_on_failure, together, world
from ckpt_layout._shards import local_of, model_tensors, region_of, without_ties

_log = logging.getLogger(__name__)


def load_hf(model: nn.Module, path: str | Path, family: Family | str | None = None) -> None:
    """Fill every parameter and persistent buffer of `model` from a folder of safetensors files.

    Each rank reads only the bytes of its own shards, straight into them, under any layout; values take the
    dtype of the model's tensors (fp32 ones stay fp32). Experts may be one tensor each on disk or stacked. All
    ranks must call, and see the folder.

    Args:
        model: on its device; sharded or not.
        path: a folder with model.safetensors, or with an index and its files.
        family: a `Family`, or the name of one; None: by `model_type` in config.json.

    Raises:
        LayoutError: a ValueError, before anything is changed: keys on disk that nothing uses, tensors that
            nothing fills (both listed), shapes that differ, an unknown family, a damaged folder.
    """
    with together("reading the folder"):
        folder = HfFolder(path)
        row = resolve_family(family, folder.config(), folder.path / "config.json")
        tensors = model_tensors(model)
        _refuse_meta(tensors)
        regions = {name: region_of(tensor) for name, tensor in tensors.items()}
        plan = _plan(tensors, folder, row)
    with together("reading the tensors"), torch.no_grad():
        for name, pieces in plan.items():
            local = local_of(tensors[name])
            for piece in pieces:
                for overlap in overlaps(local, regions[name], piece):
                    overlap.fill(folder.read(piece.key, overlap.disk, overlap.local))


def _refuse_meta(tensors: dict[str, Tensor]) -> None:
    meta = {name for name, tensor in tensors.items() if tensor.is_meta}
    if meta:
        raise LayoutError(f"on the meta device: {some(meta)}; give them memory first (model.to_empty(device=...))")


def _plan(tensors: dict[str, Tensor], folder: HfFolder, family: Family) -> dict[str, list[Piece]]:
    """The pieces that fill each native tensor; an error unless all keys and all tensors are accounted for."""
    on_disk = folder.keys()
    plan: dict[str, list[Piece]] = {}
    unfilled: dict[str, set[str]] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        ways = layouts(family, name, tensor.shape)
        pieces = max(ways, key=lambda way: sum(piece.key in on_disk for piece in way) / len(way))
        keys = {piece.key for piece in pieces}
        used |= keys
        missing = keys - on_disk
        if missing:
            unfilled[name] = missing
        else:
            plan[name] = pieces
    filled = {id(tensors[name]) for name in plan}
    unfilled = {name: missing for name, missing in unfilled.items() if id(tensors[name]) not in filled}
    unused = on_disk - used
    ignored = {key for key in unused if any(key.endswith(end) for end in family.ignore)}
    if ignored:
        _log.info("%s: ignored, as the model computes them: %s", folder.path, some(ignored))
    _report(folder, family, unused - ignored, unfilled)
    check_parts((name, piece) for name in without_ties(tensors) if name in plan for piece in plan[name])
    _check_shapes(folder, plan)
    return plan


def _report(folder: HfFolder, family: Family, unused: set[str], unfilled: dict[str, set[str]]) -> None:
    if not unused and not unfilled:
        return
    lines = [f"{folder.path} does not fit the model (family {family.name}):"]
    if unfilled:
        missing = {f"{name} (no {some(keys, 3)})" for name, keys in unfilled.items()}
        lines.append(f"tensors that nothing fills: {some(missing)}")
    if unused:
        lines.append(f"keys that nothing uses: {some(unused)}")
    raise LayoutError("\n  ".join(lines))


def _check_shapes(folder: HfFolder, plan: dict[str, list[Piece]]) -> None:
    wrong = {
        f"{piece.key} is {folder.shape(piece.key)}, {name} needs {piece.shape}"
        for name, pieces in plan.items()
        for piece in pieces
        if folder.shape(piece.key) != piece.shape
    }
    if wrong:
        raise LayoutError(f"{folder.path}: shapes differ: {some(wrong)}")


def save_hf(
    model: nn.Module,
    path: str | Path,
    *,
    family: Family | str | None = None,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
    stacked: bool = False,
) -> None:
    """Write every parameter and persistent buffer as a folder that transformers reads.

    Names, index and files are as `save_pretrained` makes them. Ranks write in parallel, each its own shards,
    straight to their place in the files: nothing is gathered, and a rank needs memory for one block of one
    tensor beside the model. The ranks must share the file system. The folder is written aside, under the
    name `.<name>.partial`, and renamed when all of it is there. All ranks must call.

    Args:
        path: a folder that does not exist, or is empty.
        family: a `Family`, or the name of one; None: by `model_type` in the config.
        max_shard_size: bytes a file, or such as "5GB" (10^9), "500MB", "2GiB"; a larger tensor has a file to
            itself.
        dtype: for floating-point tensors, but not for those the family keeps in fp32; None: as they are.
        config: what config.json gets; None: `model.config.to_hf()`, or `.to_dict()`, or no config.json.
        stacked: all experts of a layer in one tensor, as transformers has them in memory, and not one tensor each.

    Raises:
        LayoutError: a ValueError: a folder that is not empty, an unknown family, a size that is none.
        ReplicaMismatchError: what ranks have copies of differs between them.
        PeerError: another rank failed, for instance at a full disk.
    """
    path = Path(path)
    partial = partial_of(path)
    with together("preparing the export"):
        content = dict(config) if config is not None else _config_of(model)
        row = resolve_family(family, content, "the model's config")
        tensors = without_ties(model_tensors(model))
        items = items_to_write(tensors, row, dtype, stacked=stacked)
        plans = file_plans(items, bytes_of(max_shard_size))
    assert_replicated(model)
    with together("looking at the folder"):
        if world()[0] == 0:
            refuse_occupied(path)
    with removed_on_failure(partial):
        with together("creating the files"):
            if world()[0] == 0:
                _create(partial, plans, content)
        with together("writing the tensors"):
            _write_mine(partial, plans, items, tensors)
        with together("renaming the folder"):
            if world()[0] == 0:
                partial.replace(path)


def _config_of(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    for method in ("to_hf", "to_dict"):
        if callable(getattr(config, method, None)):
            return dict(getattr(config, method)())
    return {}


@attrs.frozen
class Item:
    """A native tensor, the pieces that it becomes, and the dtype that they have in the files."""

    name: str
    pieces: list[Piece]
    dtype: torch.dtype


def items_to_write(
    tensors: Mapping[str, Tensor], family: Family, dtype: torch.dtype | None, *, stacked: bool
) -> list[Item]:
    return [
        Item(name, layouts(family, name, t.shape, stacked=stacked)[0], stored_dtype(name, t.dtype, family, dtype))
        for name, t in tensors.items()
    ]


def stored_dtype(name: str, own: torch.dtype, family: Family, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in the files of the native tensor `name`, which has the dtype `own`."""
    if wanted is None or not own.is_floating_point:
        return own
    kept = own == torch.float32 and any(f".{name}".endswith(f".{end}") for end in family.keep_fp32)
    return own if kept else wanted


def file_plans(items: Sequence[Item], limit: int) -> list[FilePlan]:
    """The files of at most `limit` bytes, filled in the model's order.

    Raises:
        LayoutError: two native tensors become the same one on disk, or one on disk would not be whole.
    """
    check_parts((item.name, piece) for item in items for piece in item.pieces)
    entries: dict[str, Entry] = {}
    for item in items:
        for piece in item.pieces:  # what several native tensors are parts of comes with the first of them
            entries.setdefault(piece.key, Entry(piece.key, piece.shape, item.dtype))
    return plan_files(entries.values(), limit)


def _create(partial: Path, plans: Sequence[FilePlan], config: Mapping[str, Any]) -> None:
    fresh_folder(partial)
    for plan in plans:
        create(partial, plan)
    write_index(partial, plans, config)


def _write_mine(partial: Path, plans: Sequence[FilePlan], items: Sequence[Item], tensors: Mapping[str, Tensor]) -> None:
    home = {entry.key: plan for plan in plans for entry in plan.entries}
    with ExitStack() as stack:
        files = {plan.name: stack.enter_context((partial / plan.name).open("r+b", buffering=0)) for plan in plans}
        for item in _written_here(items, tensors):
            for block in blocks_of(tensors[item.name], item.pieces, item.dtype):
                plan = home[block.key]
                write_block(files[plan.name], plan.starts[block.key], block.shape, block.where, block.values)
        for file in files.values():
            os.fsync(file.fileno())


def _written_here(items: Sequence[Item], tensors: Mapping[str, Tensor]) -> Iterator[Item]:
    """What this rank writes: of copies, one rank's; plain tensors are dealt out over the ranks."""
    rank, ranks = world()
    for index, item in enumerate(items):
        tensor = tensors[item.name]
        if _is_first_replica(tensor) if isinstance(tensor, DTensor) else index % ranks == rank:
            yield item


def _is_first_replica(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return all(index == 0 for index, p in zip(coordinate, tensor.placements, strict=True) if isinstance(p, Replicate))

"""`save_hf`: a model into a Hugging Face folder, each rank writing what it holds."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ckpt_layout._blocks import blocks_of
from ckpt_layout._errors import LayoutError
from ckpt_layout._families import Family
from ckpt_layout._hf_folder import INDEX, SINGLE
from ckpt_layout._hf_load import resolve_family
from ckpt_layout._model_tensors import model_tensors, without_ties
from ckpt_layout._pieces import Piece, check_parts, layouts
from ckpt_layout._replicated import assert_replicated
from ckpt_layout._safetensors_file import Entry, FilePlan, create, plan_file, write_block
from ckpt_layout._together import removed_on_failure, together, world

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@attrs.frozen
class _Item:
    """A native tensor, the pieces that it becomes, and the dtype that they have in the files."""

    name: str
    tensor: Tensor
    pieces: list[Piece]
    dtype: torch.dtype


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
    partial = path.parent / f".{path.name}.partial"
    with together("preparing the export"):
        content = dict(config) if config is not None else _config_of(model)
        row = resolve_family(family, content, "the model's config")
        items = _items(model, row, dtype, stacked)
        plans = file_plans(items, bytes_of(max_shard_size))
    assert_replicated(model)
    with together("looking at the folder"):
        if world()[0] == 0:
            _refuse_occupied(path)
    with removed_on_failure(partial):
        with together("creating the files"):
            if world()[0] == 0:
                _create(partial, plans, content)
        with together("writing the tensors"):
            _write_mine(partial, plans, items)
        with together("renaming the folder"):
            if world()[0] == 0:
                partial.replace(path)


def _config_of(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    for method in ("to_hf", "to_dict"):
        if callable(getattr(config, method, None)):
            return dict(getattr(config, method)())
    return {}


def _items(model: nn.Module, family: Family, dtype: torch.dtype | None, stacked: bool) -> list[_Item]:
    return [
        _Item(
            name,
            tensor,
            layouts(family, name, tensor.shape, stacked=stacked)[0],
            stored_dtype(name, tensor.dtype, family, dtype),
        )
        for name, tensor in without_ties(model_tensors(model)).items()
    ]


def stored_dtype(name: str, own: torch.dtype, family: Family, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in the files of the native tensor `name`, which has the dtype `own`."""
    if wanted is None or not own.is_floating_point:
        return own
    kept = own == torch.float32 and any(f".{name}".endswith(f".{end}") for end in family.keep_fp32)
    return own if kept else wanted


def bytes_of(size: int | str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMGT]?I?B)?", str(size).strip().upper())
    count = int(found[1]) * _UNITS.get(found[2] or "B", 0) if found else 0
    if count < 1:
        raise LayoutError(f'max_shard_size = {size!r}: must be a number of bytes, or such as "5GB", "500MB", "2GiB"')
    return count


class Planned(Protocol):
    """The tensors on disk that one native tensor becomes."""

    @property
    def name(self) -> str: ...
    @property
    def pieces(self) -> list[Piece]: ...
    @property
    def dtype(self) -> torch.dtype: ...


def file_plans(items: Sequence[Planned], limit: int) -> list[FilePlan]:
    """Fill files in the model's order, as long as the next tensor fits.

    Raises:
        LayoutError: two native tensors become the same one on disk, or one on disk would not be whole.
    """
    check_parts((item.name, piece) for item in items for piece in item.pieces)
    files: list[list[Entry]] = [[]]
    filled, planned = 0, set[str]()
    for item in items:
        for piece in item.pieces:
            if piece.key in planned:  # by the first of the native tensors that it is made of
                continue
            planned.add(piece.key)
            entry = Entry(piece.key, piece.shape, item.dtype)
            if files[-1] and filled + entry.bytes > limit:
                files.append([])
                filled = 0
            files[-1].append(entry)
            filled += entry.bytes
    if len(files) == 1:
        return [plan_file(SINGLE, files[0])]
    count = len(files)
    return [
        plan_file(f"model-{number:05d}-of-{count:05d}.safetensors", entries)
        for number, entries in enumerate(files, start=1)
    ]


def _refuse_occupied(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise LayoutError(f"{path}: exists and is not empty; give another folder, or remove it first")


def _create(partial: Path, plans: Sequence[FilePlan], config: Mapping[str, Any]) -> None:
    if partial.exists():  # of an export that did not finish
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    for plan in plans:
        create(partial, plan)
    write_index(partial, plans, config)


def write_index(partial: Path, plans: Sequence[FilePlan], config: Mapping[str, Any]) -> None:
    """What lies beside the files: the index, if there are several, and config.json."""
    if len(plans) > 1:
        total = sum(entry.bytes for plan in plans for entry in plan.entries)
        home = {entry.key: plan.name for plan in plans for entry in plan.entries}
        _write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(home.items()))})
    if config:
        _write_json(partial / "config.json", config)


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_mine(partial: Path, plans: Sequence[FilePlan], items: Sequence[_Item]) -> None:
    home = {entry.key: plan for plan in plans for entry in plan.entries}
    with ExitStack() as stack:
        files = {plan.name: stack.enter_context((partial / plan.name).open("r+b", buffering=0)) for plan in plans}
        for item in _written_here(items):
            for block in blocks_of(item.tensor, item.pieces, item.dtype):
                plan = home[block.key]
                write_block(files[plan.name], plan.starts[block.key], block.shape, block.where, block.values)
        for file in files.values():
            os.fsync(file.fileno())


def _written_here(items: Sequence[_Item]) -> Iterator[_Item]:
    """What this rank writes: of copies, one rank's; plain tensors are dealt out over the ranks."""
    rank, ranks = world()
    for index, item in enumerate(items):
        if not isinstance(item.tensor, DTensor):
            if index % ranks == rank:
                yield item
        elif _is_first_replica(item.tensor):
            yield item


def _is_first_replica(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return all(index == 0 for index, p in zip(coordinate, tensor.placements, strict=True) if isinstance(p, Replicate))

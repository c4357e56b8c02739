"""From one format of checkpoint to another, tensor by tensor, in one process."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckpt_layout._checkpoint import host_bytes, meta_bytes
from ckpt_layout._dcp import MODEL, dcp_errors
from ckpt_layout._families import Family, resolve_family
from ckpt_layout._folders import free_name, fresh_folder, partial_of, publish, refuse_occupied, write_durably
from ckpt_layout._hf import Item, file_plans, items_to_write, stored_dtype
from ckpt_layout._hf_folder import FilePlan, bytes_of, create, write_block, write_index
from ckpt_layout._inspect import HfView, View, open_view
from ckpt_layout._layout import blocks_of

Step = Callable[[int], object]
"""Told the bytes that were written."""

_BESIDE = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "chat_template*")
"""What lies in a Hugging Face folder beside the weights and belongs to the model."""


def convert(
    source: Path,
    target: Path,
    to: Literal["hf", "stacked", "dcp"],
    *,
    family: str | None = None,
    config: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    step: Step = lambda count: None,
) -> None:
    """Write the model's weights in `source` as another format. One native tensor is in memory at a time.

    An interrupted conversion to "hf" or "stacked" goes on behind the files that were complete, if the source is as it
    was; one to "dcp" starts again. The target appears when it is whole.

    Args:
        to: "hf" (a tensor for each expert, as the family's files are), "stacked" (all of a layer in one), or
            "dcp" (what `load_checkpoint` reads, without optimizer).
        family: needed where the source names none: a dcp source, or a folder without config.json.
        config: a config.json for the target, where the source has none.
        step: called after each part with its size in bytes.

    Raises:
        LayoutError: a ValueError: the source is damaged or incomplete, or the target exists.
    """
    refuse_occupied(target, but_for=partial_of(free_name(target, step=0)) if to == "dcp" else None)
    view = open_view(source, family)
    if to == "dcp":
        _to_dcp(view, target, dtype, step)
    else:
        content = _config(view, config)
        row = resolve_family(family, content, f"{source}: its config")
        _to_hf(
            view, target, row, content, stacked=to == "stacked", dtype=dtype, limit=bytes_of(max_shard_size), step=step
        )


def _config(view: View, config: Path | None) -> Mapping[str, Any]:
    if config is not None:
        content = json.loads(config.read_text(encoding="utf-8"))
        assert isinstance(content, dict)
        return content
    return view.folder.config() if isinstance(view, HfView) else {}


def total_bytes(source: Path, family: str | None = None) -> int:
    """How much `convert` has to read."""
    return sum(info.nbytes for info in open_view(source, family).tensors().values())


# -- to a Hugging Face folder ------------------------------------------------------------------------------


def _to_hf(
    view: View,
    target: Path,
    row: Family,
    config: Mapping[str, Any],
    *,
    stacked: bool,
    dtype: torch.dtype | None,
    limit: int,
    step: Step,
) -> None:
    items = items_to_write(view.tensors(), row, dtype, stacked=stacked)
    plans = file_plans(items, limit)
    partial = partial_of(target)
    done = _Progress.of(partial, plans, view.place)
    for plan in plans:
        if plan.name not in done.files:
            create(partial, plan)
            _fill(view, partial, plan, items)
            done = done.with_file(partial, plan.name)
        step(plan.size)
    (partial / _Progress.NAME).unlink()
    write_index(partial, plans, config)
    if isinstance(view, HfView):
        _copy_beside(view.folder.path, partial)
    if target.exists():
        target.rmdir()
    partial.replace(target)


def _fill(view: View, folder: Path, plan: FilePlan, items: list[Item]) -> None:
    with (folder / plan.name).open("r+b", buffering=0) as file:
        for item in items:
            pieces = [piece for piece in item.pieces if piece.key in plan.starts]
            if pieces:
                for block in blocks_of(view.read(item.name), pieces, item.dtype):
                    write_block(file, plan.starts[block.key], block.shape, block.where, block.values)
        os.fsync(file.fileno())


def _copy_beside(source: Path, target: Path) -> None:
    for pattern in _BESIDE:
        for file in source.glob(pattern):
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)


@attrs.frozen
class _Progress:
    """Which files of an unfinished conversion are complete, of which plan and source."""

    NAME = "progress.json"
    digest: str
    files: tuple[str, ...] = ()

    @classmethod
    def of(cls, partial: Path, plans: list[FilePlan], source: Path) -> "_Progress":
        """What an earlier try left, if it had the same plan and source; else an empty folder."""
        hashed = hashlib.blake2b(b"".join(plan.name.encode() + plan.header for plan in plans))
        files = sorted((file.name, file.stat()) for file in source.resolve().iterdir() if file.is_file())
        told = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
        hashed.update(repr((str(source.resolve()), told)).encode())
        try:
            found = json.loads((partial / cls.NAME).read_text(encoding="utf-8"))
            if found["digest"] == hashed.hexdigest():
                return cls(found["digest"], tuple(found["files"]))
        except (OSError, ValueError, TypeError, KeyError):
            pass  # there is none, or it was damaged: begin again
        fresh_folder(partial)
        return cls(hashed.hexdigest())

    def with_file(self, partial: Path, name: str) -> "_Progress":
        longer = attrs.evolve(self, files=(*self.files, name))
        aside = partial / f".{self.NAME}"
        write_durably(aside, json.dumps({"digest": longer.digest, "files": longer.files}).encode())
        aside.replace(partial / self.NAME)
        return longer


# -- to torch.distributed.checkpoint -----------------------------------------------------------------------


class _ReadWhenWritten(DefaultSavePlanner):
    """Plans with tensors that have no memory, and reads each when it is its turn."""

    def __init__(self, view: View, dtypes: Mapping[str, torch.dtype], step: Step) -> None:
        super().__init__()
        self._view, self._dtypes, self._step = view, dtypes, step

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name = write_item.index.fqn.removeprefix(MODEL)
        tensor = self._view.read(name).to(self._dtypes[name])
        self._step(tensor.numel() * tensor.element_size())
        return tensor


def _to_dcp(view: View, target: Path, dtype: torch.dtype | None, step: Step) -> None:
    infos = view.tensors()
    family = view.family if isinstance(view, HfView) else None
    dtypes = {
        name: stored_dtype(name, info.dtype, family, dtype) if family else dtype or info.dtype
        for name, info in infos.items()
    }
    final = free_name(target, step=0)
    partial = partial_of(final)
    fresh_folder(partial)
    planned = {f"{MODEL}{name}": info.to(dtypes[name]) for name, info in infos.items()}
    with dcp_errors(f"writing {target}"):
        dcp_save(
            planned,
            storage_writer=FileSystemWriter(partial),
            planner=_ReadWhenWritten(view, dtypes, step),
            no_dist=True,
        )
    write_durably(partial / "host.pt", host_bytes(optimizer=None, scheduler=None, names={}))
    write_durably(partial / "meta.json", meta_bytes(step=0, ranks=0))
    publish(partial, final)

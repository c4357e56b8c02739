"""Checkpoints of either format as native tensors by name, read one at a time, in one process."""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import attrs
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from ckpt_layout._dcp_errors import dcp_errors
from ckpt_layout._dcp_reader import Reader
from ckpt_layout._errors import LayoutError
from ckpt_layout._families import Family, Rule, native
from ckpt_layout._hf_folder import HfFolder, some
from ckpt_layout._latest import latest_folder
from ckpt_layout._pieces import Piece, layouts, overlaps
from ckpt_layout._ranges import full_runs
from ckpt_layout._safetensors_file import dtype_named

MODEL = "model/"


@attrs.frozen
class TensorInfo:
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class View(Protocol):
    """Native tensors by name."""

    def tensors(self) -> Mapping[str, TensorInfo]: ...
    def read(self, name: str) -> Tensor: ...


class DcpView:
    """The model's tensors of a checkpoint in torch.distributed.checkpoint's format."""

    def __init__(self, path: Path) -> None:
        folder = path if is_dcp(path) else latest_folder(path)
        if folder is None or not is_dcp(folder):
            raise LayoutError(f"{path}: holds no checkpoint: neither .metadata nor a file `latest` that names one")
        self.folder = folder
        self._reader = Reader(folder)
        stored = {
            key: item
            for key, item in self._reader.read_metadata().state_dict_metadata.items()
            if isinstance(item, TensorStorageMetadata)
        }
        prefix = MODEL if any(key.startswith(MODEL) for key in stored) else ""
        self._keys = {key.removeprefix(prefix): key for key in stored if key.startswith(prefix)}
        self._infos = {
            name: TensorInfo(tuple(stored[key].size), stored[key].properties.dtype) for name, key in self._keys.items()
        }
        self.others = len(stored) - len(self._keys)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str) -> Tensor:
        info, key = self._infos[name], self._keys[name]
        tensor = torch.empty(info.shape, dtype=info.dtype)
        with dcp_errors(f"reading {self.folder}"):
            dcp_load({key: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


class HfView:
    """A Hugging Face folder, put together as the family's native tensors."""

    def __init__(self, folder: HfFolder, family: Family) -> None:
        self.folder, self.family = folder, family
        self._pieces: dict[str, list[Piece]] = {}
        self._infos: dict[str, TensorInfo] = {}
        for name, shape in self._shapes().items():
            way = next((w for w in layouts(family, name, shape) if {p.key for p in w} <= folder.keys()), None)
            if way is None:
                wanted = {piece.key for piece in layouts(family, name, shape)[0]}
                raise LayoutError(f"{folder.path}: {name} is not complete: no {some(wanted - folder.keys())}")
            self._pieces[name] = way
            self._infos[name] = TensorInfo(shape, dtype_named(folder.dtype(way[0].key)))

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str) -> Tensor:
        info = self._infos[name]
        tensor = torch.empty(info.shape, dtype=info.dtype)
        for piece in self._pieces[name]:
            for overlap in overlaps(tensor, tuple(map(full_runs, info.shape)), piece):
                overlap.fill(self.folder.read(piece.key, overlap.disk, overlap.local))
        return tensor

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Native names and shapes, from the names and shapes on disk."""
        shapes: dict[str, tuple[int, ...]] = {}
        experts: dict[str, int] = defaultdict(int)
        for key in sorted(self.folder.keys()):
            if any(key.endswith(end) for end in self.family.ignore):
                continue
            matched = _matching(self.family, key)
            if not matched:
                shapes[native(key, self.family)] = self.folder.shape(key)
            for rule, name, expert in matched:
                if expert is not None:
                    experts[name] = max(experts[name], expert + 1)
                shapes[name] = _native_shape(key, rule, self.folder.shape(key), is_expert=expert is not None)
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


def is_dcp(path: Path) -> bool:
    return (path / ".metadata").is_file()


def is_hf(path: Path) -> bool:
    return any(path.glob("*.safetensors"))

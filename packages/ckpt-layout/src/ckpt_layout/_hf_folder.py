"""A Hugging Face folder: config, index and safetensors files, read by slices and written block by block.

Nothing in a folder is unpickled. Writing is for several ranks at once: headers first, then bytes at their offsets.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ckpt_layout._errors import LayoutError, some
from ckpt_layout._shards import raw_bytes

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_AT_ONCE = 2**26

# -- reading -----------------------------------------------------------------------------------------------


class HfFolder:
    """The tensors of a folder by key. Files are opened once, and only the bytes asked for are read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise LayoutError(f"{self.path}: is no folder")
        self._file_of = self._weight_map()
        self._files = {name: self._open(name) for name in sorted(set(self._file_of.values()))}
        self._check_index()
        self._stored = {key: place for name in self._files for key, place in _stored_in(self.path / name).items()}

    def config(self) -> dict[str, Any]:
        """config.json, or {} where there is none."""
        file = self.path / "config.json"
        return self._json(file) if file.is_file() else {}

    def keys(self) -> set[str]:
        return set(self._stored)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._stored[key].shape

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: place.shape for key, place in self._stored.items()}

    def dtype(self, key: str) -> torch.dtype:
        """Raises LayoutError for one that cannot be written here."""
        name = self._stored[key].dtype
        if name not in _DTYPES:
            raise LayoutError(f"a tensor of dtype {name}: only {', '.join(_DTYPES)} are converted")
        return _DTYPES[name]

    def read(self, key: str, block: tuple[slice, ...], out: Tensor | None = None) -> Tensor:
        """The part `block` of a tensor, in its dtype on disk, on the CPU.

        Where the part is one run of bytes in the file it is read without a mapping, so that no page of the file
        stays in this process; straight into `out` and `out` returned, if its dtype and memory allow it.
        """
        place = self._stored[key]
        if place.dtype in _DTYPES and sys.byteorder == "little" and _is_one_run(block, place.shape):
            return self._read_run(key, block, out)
        file = self._files[self._file_of[key]]
        try:
            return file.get_slice(key)[block] if block else file.get_tensor(key)
        except (SafetensorError, RuntimeError) as error:
            raise LayoutError(f"{self.path / self._file_of[key]}: {key} cannot be read: {error}") from error

    def _read_run(self, key: str, block: tuple[slice, ...], out: Tensor | None) -> Tensor:
        place, dtype = self._stored[key], self.dtype(key)
        shape = tuple(part.stop - part.start for part in block)
        wanted = ("cpu", dtype, shape, True)
        if out is None or (out.device.type, out.dtype, tuple(out.shape), out.is_contiguous()) != wanted:
            out = torch.empty(shape, dtype=dtype)
        inner = torch.Size(place.shape[1:]).numel() * dtype.itemsize
        file, data = self.path / self._file_of[key], raw_bytes(out)
        with file.open("rb", buffering=0) as stream:
            stream.seek(place.start + (block[0].start * inner if block else 0))
            while data:
                count = stream.readinto(data[:_AT_ONCE])
                if not count:
                    raise LayoutError(f"{file}: {key} cannot be read: the file ends in it")
                data = data[count:]
        return out

    def _weight_map(self) -> Mapping[str, str]:
        """File name by key, from the index; without an index, from the one file."""
        if not (self.path / _INDEX).is_file():
            if not (self.path / _SINGLE).is_file():
                raise LayoutError(f"{self.path}: has neither {_INDEX} nor {_SINGLE}; other formats are not read")
            return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        names = self._json(self.path / _INDEX).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise LayoutError(f"{self.path / _INDEX}: has no weight_map")
        for key, name in names.items():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise LayoutError(
                    f"{self.path / _INDEX}: weight_map[{key!r}] = {name!r}: must be a .safetensors file in this folder"
                )
        return names

    def _json(self, file: Path) -> dict[str, Any]:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise LayoutError(f"{file}: is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise LayoutError(f"{file}: must hold a JSON object")
        return content

    def _open(self, name: str) -> Any:
        file = self.path / name
        if not file.is_file():
            raise LayoutError(f"{file}: is missing, though {_INDEX} names it")
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise LayoutError(f"{file}: is no whole safetensors file: {error}") from error

    def _check_index(self) -> None:
        """The index and the files' own headers must list the same keys."""
        for name, file in self._files.items():
            inside = set(file.keys())
            listed = {key for key, home in self._file_of.items() if home == name}
            if listed != inside:
                raise LayoutError(
                    f"{self.path / name}: does not hold what {_INDEX} says; "
                    f"missing: {some(listed - inside)}; not listed: {some(inside - listed)}"
                )


@attrs.frozen
class _Stored:
    """Where a tensor lies in its file."""

    start: int
    shape: tuple[int, ...]
    dtype: str
    """As the file names it: "F32", "BF16", ..."""


def _stored_in(file: Path) -> dict[str, _Stored]:
    """From the header of a file that safetensors has opened, so that sizes and offsets are checked."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        table = json.loads(stream.read(length))
    table.pop("__metadata__", None)
    return {
        key: _Stored(8 + length + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"])
        for key, entry in table.items()
    }


def _is_one_run(block: tuple[slice, ...], shape: tuple[int, ...]) -> bool:
    return all(part == slice(0, size) for part, size in zip(block[1:], shape[1:], strict=True))


# -- writing -----------------------------------------------------------------------------------------------


def bytes_of(size: int | str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMGT]?I?B)?", str(size).strip().upper())
    count = int(found[1]) * _UNITS.get(found[2] or "B", 0) if found else 0
    if count < 1:
        raise LayoutError(f'max_shard_size = {size!r}: must be a number of bytes, or such as "5GB", "500MB", "2GiB"')
    return count


@attrs.frozen
class Entry:
    """A tensor that a file will hold."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@attrs.frozen
class FilePlan:
    """A file: its name, its header, and where each tensor's bytes start."""

    name: str
    entries: tuple[Entry, ...]
    header: bytes
    starts: dict[str, int]
    size: int


def _plan_file(name: str, entries: Sequence[Entry]) -> FilePlan:
    """Lay `entries` out one after the other, wide dtypes first, so that each is aligned to its own size."""
    ordered = tuple(sorted(entries, key=lambda entry: -entry.dtype.itemsize))
    ends = list(accumulate((entry.bytes for entry in ordered), initial=0))
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for entry, offsets in zip(ordered, pairwise(ends), strict=True):
        table[entry.key] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = {entry.key: len(header) + start for entry, start in zip(ordered, ends, strict=False)}
    return FilePlan(name, ordered, header, starts, size=len(header) + ends[-1])


def plan_files(entries: Iterable[Entry], limit: int) -> list[FilePlan]:
    """Fill files in this order, as long as the next tensor fits into `limit` bytes; a larger one has its own."""
    files: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if entry.dtype not in _NAMES:
            raise LayoutError(f"{entry.key}: {entry.dtype} has no place in these files: only {', '.join(_DTYPES)} have")
        if files[-1] and filled + entry.bytes > limit:
            files.append([])
            filled = 0
        files[-1].append(entry)
        filled += entry.bytes
    if len(files) == 1:
        return [_plan_file(_SINGLE, files[0])]
    return [
        _plan_file(f"model-{number:05d}-of-{len(files):05d}.safetensors", those)
        for number, those in enumerate(files, start=1)
    ]


def create(folder: Path, plan: FilePlan) -> None:
    """The file with its header and its full length; the data is what ranks write later."""
    with (folder / plan.name).open("wb") as file:
        file.write(plan.header)
        file.truncate(plan.size)


def write_block(file: FileIO, start: int, shape: Sequence[int], block: tuple[slice, ...], values: Tensor) -> None:
    """Write `values` as the part `block` of a tensor of `shape` whose bytes begin at `start`.

    One write per run of bytes that is consecutive in the file.
    """
    values = values.contiguous()
    if values.numel() == 0:
        return
    inner = torch.Size(shape[1:]).numel() * values.element_size()
    if not shape or tuple(values.shape[1:]) == tuple(shape[1:]):
        _write_all(file, start + (block[0].start * inner if block else 0), raw_bytes(values))
        return
    for row, index in enumerate(range(block[0].start, block[0].stop)):
        write_block(file, start + index * inner, shape[1:], block[1:], values[row])


def _write_all(file: FileIO, offset: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(file.fileno(), data, offset)
        data, offset = data[written:], offset + written


def write_index(partial: Path, plans: Sequence[FilePlan], config: Mapping[str, Any]) -> None:
    """What lies beside the files: the index, if there are several, and config.json."""
    if len(plans) > 1:
        total = sum(entry.bytes for plan in plans for entry in plan.entries)
        home = {entry.key: plan.name for plan in plans for entry in plan.entries}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(home.items()))}
        (partial / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if config:
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

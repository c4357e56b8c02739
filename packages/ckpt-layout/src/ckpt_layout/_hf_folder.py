"""Reading a Hugging Face folder: config, index, and slices of safetensors files. Nothing in it is unpickled."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ckpt_layout._errors import LayoutError
from ckpt_layout._replicated import raw_bytes
from ckpt_layout._safetensors_file import DTYPES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_AT_ONCE = 2**26


class HfFolder:
    """The tensors of a folder by key. Files are opened once, and only the bytes asked for are read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise LayoutError(f"{self.path}: is no folder")
        names = self._weight_map()
        self._files = {name: self._open(name) for name in sorted(set(names.values()))}
        self._file_of = names
        self._check_index()
        self._stored = {name: _stored_in(self.path / name) for name in self._files}

    def config(self) -> dict[str, Any]:
        """config.json, or {} where there is none."""
        file = self.path / "config.json"
        return self._json(file) if file.is_file() else {}

    def keys(self) -> set[str]:
        return set(self._file_of)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """As the file names it: "F32", "BF16", ..."""
        return str(self._slice(key).get_dtype())

    def read(self, key: str, block: tuple[slice, ...], out: Tensor | None = None) -> Tensor:
        """The part `block` of a tensor, in its dtype on disk, on the CPU.

        Where the part is one run of bytes in the file it is read without a mapping, so that no page of the file
        stays in this process; straight into `out` and `out` returned, if its dtype and memory allow it.
        """
        stored = self._stored[self._file_of[key]][key]
        if stored.dtype is not None and _is_one_run(block, stored.shape):
            return self._read_run(key, stored, stored.dtype, block, out)
        try:
            return self._slice(key)[block] if block else self._files[self._file_of[key]].get_tensor(key)
        except SafetensorError as error:
            raise LayoutError(f"{self.path / self._file_of[key]}: {key} cannot be read: {error}") from error

    def _read_run(
        self, key: str, stored: "_Stored", dtype: torch.dtype, block: tuple[slice, ...], out: Tensor | None
    ) -> Tensor:
        shape = tuple(part.stop - part.start for part in block)
        if not _takes(out, shape, dtype):
            out = torch.empty(shape, dtype=dtype)
        assert out is not None
        inner = torch.Size(stored.shape[1:]).numel() * dtype.itemsize
        position = stored.start + (block[0].start * inner if block else 0)
        file, data = self.path / self._file_of[key], raw_bytes(out)
        with file.open("rb", buffering=0) as stream:
            stream.seek(position)
            while data:
                count = stream.readinto(data[:_AT_ONCE])
                if not count:
                    raise LayoutError(f"{file}: {key} cannot be read: the file ends in it")
                data = data[count:]
        return out

    def _slice(self, key: str) -> Any:
        return self._files[self._file_of[key]].get_slice(key)

    def _weight_map(self) -> Mapping[str, str]:
        """File name by key, from the index; without an index, from the one file."""
        if not (self.path / INDEX).is_file():
            if not (self.path / SINGLE).is_file():
                raise LayoutError(f"{self.path}: has neither {INDEX} nor {SINGLE}; other formats are not read")
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        names = self._json(self.path / INDEX).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise LayoutError(f"{self.path / INDEX}: has no weight_map")
        for key, name in names.items():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise LayoutError(
                    f"{self.path / INDEX}: weight_map[{key!r}] = {name!r}: must be a .safetensors file in this folder"
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
            raise LayoutError(f"{file}: is missing, though {INDEX} names it")
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
                    f"{self.path / name}: does not hold what {INDEX} says; "
                    f"missing: {some(listed - inside)}; not listed: {some(inside - listed)}"
                )


@attrs.frozen
class _Stored:
    """Where a tensor lies in its file."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None: one that this machine does not read as it lies there."""


def _stored_in(file: Path) -> dict[str, _Stored]:
    """From the header of a file that safetensors has opened, so that sizes and offsets are checked."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        table = json.loads(stream.read(length))
    table.pop("__metadata__", None)
    return {
        key: _Stored(8 + length + entry["data_offsets"][0], tuple(entry["shape"]), _dtype_here(entry["dtype"]))
        for key, entry in table.items()
    }


def _dtype_here(name: str) -> torch.dtype | None:
    return DTYPES.get(name) if sys.byteorder == "little" else None


def _is_one_run(block: tuple[slice, ...], shape: tuple[int, ...]) -> bool:
    return all(part == slice(0, size) for part, size in zip(block[1:], shape[1:], strict=True))


def _takes(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return (
        out is not None
        and out.device.type == "cpu"
        and out.dtype == dtype
        and tuple(out.shape) == shape
        and out.is_contiguous()
    )


def some(names: set[str], most: int = 20) -> str:
    shown = ", ".join(sorted(names)[:most]) or "none"
    return shown if len(names) <= most else f"{shown}, and {len(names) - most} more"

"""Writing safetensors files piece by piece from several ranks: a header first, then bytes at their offsets."""

import json
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import attrs
import torch
from torch import Tensor

from ckpt_layout._errors import LayoutError
from ckpt_layout._replicated import raw_bytes

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

DTYPES = {name: dtype for dtype, name in _NAMES.items()}
"""dtypes by the names that files give them."""


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


def plan_file(name: str, entries: Sequence[Entry]) -> FilePlan:
    """Lay `entries` out one after the other, wide dtypes first, so that each is aligned to its own size."""
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, position = {}, 0
    for entry in ordered:
        end = position + entry.bytes
        table[entry.key] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        offsets[entry.key], position = position, end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return FilePlan(
        name,
        tuple(ordered),
        header,
        {key: len(header) + offset for key, offset in offsets.items()},
        len(header) + position,
    )


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


def dtype_named(name: str) -> torch.dtype:
    """The dtype that a file calls `name`.

    Raises:
        LayoutError: none that can be written here.
    """
    if name not in DTYPES:
        raise LayoutError(f"a tensor of dtype {name}: only {', '.join(DTYPES)} are converted")
    return DTYPES[name]

"""Files of token ids, memory-mapped as streams: Megatron's `.bin` with `.idx`, Modalities' `.pbin`, nanoGPT's `.bin`.

    Megatron   FILE.bin: ids; FILE.idx: magic, version, dtype, counts, then per sequence its length (int32) and place
               (int64), and per document its first sequence (int64). megatron.core.datasets.indexed_dataset, 0.16
    pbin       bytes of the ids (8 bytes), bytes of one (4), ids, and a pickled list of (place, length) in bytes.
               modalities.dataloader.create_packed_data, 0.5
    nanoGPT    uint16 ids and nothing else (karpathy/nanoGPT, data/*/prepare.py); where documents begin is not said

Which of them a file is, its content tells. All numbers are little-endian. Nothing in a file is executed.
"""

import io
import os
import pickle
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, overload

import attrs
import numpy as np

from nemotron_nano.data.streams import CorpusError, Stream

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the dtype, sequences, entries of the document list (one more than documents)."""

CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"), 2: np.dtype("i1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"), 5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}  # fmt: skip
"""Megatron's codes of integer dtypes."""

_PBIN = struct.Struct("<QI")
_PBIN_DTYPES = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_LLM_C = 20240520
"""What a `.bin` of llm.c begins with: a header of 256 int32 before its ids."""
_LLM_C_HEADER = 1024


def open_tokens(path: Path) -> Stream:
    """The tokens of a file of any of the formats; FILE, FILE.bin and FILE.idx all name Megatron's pair.

    Raises:
        CorpusError: there is no such file, or it is damaged: the message says which part of it.
    """
    data, index = _pair(path)
    if index is not None:
        return _megatron(data, index)
    size = data.stat().st_size
    if size == 0:
        raise CorpusError(f"{data}: is empty")
    with data.open("rb") as file:
        head = file.read(_PBIN.size)
        if _is_pbin(file, head, size):
            return _pbin(data, *_PBIN.unpack(head))
    if data.suffix == ".pbin":
        raise CorpusError(f"{data}: is no whole .pbin: its header and its length do not go together")
    if head[:8] == struct.pack("<II", _LLM_C, 1):
        return _bare(data, size, _LLM_C_HEADER)
    return _bare(data, size, 0)


def _pair(path: Path) -> tuple[Path, Path | None]:
    """The file with the ids, and Megatron's index if there is one."""
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    data, index = stem.with_name(f"{stem.name}.bin"), stem.with_name(f"{stem.name}.idx")
    if path.suffix not in (".bin", ".idx") and path.is_file():
        return path, None
    if not data.is_file():
        raise CorpusError(
            f"{path}: there is no such file" + ("" if path == data else f", and no {data.name} beside it")
        )
    return data, index if index.is_file() else None


def _mapped(path: Path, dtype: np.dtype[Any], count: int, offset: int = 0) -> np.ndarray[tuple[int], np.dtype[Any]]:
    """NumPy maps no empty array, and no array at an odd place."""
    if count == 0:
        return np.empty(0, dtype)
    raw = np.memmap(path, np.uint8, "r", shape=(offset + count * dtype.itemsize,))
    return np.frombuffer(raw, dtype, count, offset)


@attrs.frozen
class _DocumentStarts(Sequence[int]):
    """Offsets of documents, in tokens, looked up in Megatron's index."""

    sequences: np.ndarray[tuple[int], np.dtype[np.int64]]
    """[documents + 1]: the first sequence of each."""
    places: np.ndarray[tuple[int], np.dtype[np.int64]]
    """[sequences], in bytes."""
    item: int

    def __len__(self) -> int:
        return max(0, len(self.sequences) - 1)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return int(self.places[self.sequences[index]]) // self.item


def _megatron(data: Path, index: Path) -> Stream:
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise CorpusError(f"{index}: is no index of Megatron's: it does not begin with {MAGIC!r}")
    _, version, code, sequences, entries = HEADER.unpack(head)
    if version != 1 or code not in CODES:
        raise CorpusError(f"{index}: version {version}, dtype code {code}: version 1 with integer ids is read")
    wanted = HEADER.size + 12 * sequences + 8 * entries
    if size < wanted:
        raise CorpusError(f"{index}: is cut off: {sequences} sequences need {wanted} bytes, there are {size}")
    dtype = CODES[code]
    lengths = _mapped(index, np.dtype("<i4"), sequences, HEADER.size)
    places = _mapped(index, np.dtype("<i8"), sequences, HEADER.size + 4 * sequences)
    documents = _mapped(index, np.dtype("<i8"), entries, HEADER.size + 12 * sequences)
    held = data.stat().st_size
    end = int(places[-1]) + int(lengths[-1]) * dtype.itemsize if sequences else 0
    if end > held:
        raise CorpusError(f"{data}: is shorter than its index says: {end} bytes, there are {held}")
    if end == 0:
        raise CorpusError(f"{data}: holds no token")
    whole = places[0] == 0 and (entries == 0 or (documents[0] == 0 and documents[-1] == sequences))
    if not whole or not _are_consecutive(lengths, places, dtype.itemsize):
        raise CorpusError(f"{index}: its documents do not lie one behind the other from the start of {data.name}")
    # a last document without sequences begins where the file ends
    starts = _DocumentStarts(_begun(documents, sequences), places, dtype.itemsize)
    return Stream(str(data), _mapped(data, dtype, end // dtype.itemsize), starts)


def _are_consecutive(lengths: Any, places: Any, item: int, at_once: int = 1 << 22) -> bool:
    """Whether each sequence begins where the one before it ends; read in parts, as there may be a billion."""
    for first in range(0, len(lengths), at_once):
        part = slice(first, first + at_once)
        ends = places[part] + lengths[part].astype(np.int64) * item
        if (lengths[part] < 0).any() or (
            ends[: len(places) - first - 1] != places[first + 1 : first + 1 + at_once]
        ).any():
            return False
    return True


def _begun(documents: Any, sequences: int) -> Any:
    """Without documents at the end that have no sequence."""
    last = len(documents)
    while last > 1 and documents[last - 2] == sequences:
        last -= 1
    return documents[:last]


def _is_pbin(file: BinaryIO, head: bytes, size: int) -> bool:
    if len(head) < _PBIN.size:
        return False
    length, item = _PBIN.unpack(head)
    if item not in _PBIN_DTYPES or length % item or _PBIN.size + length >= size:
        return False
    file.seek(_PBIN.size + length)
    return file.read(1) == pickle.PROTO


class _Plain(pickle.Unpickler):
    """Builds lists, tuples and numbers; whatever could be called is refused where it is named."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and an index is numbers only")


def _pbin(path: Path, length: int, item: int) -> Stream:
    with path.open("rb") as file:
        file.seek(_PBIN.size + length)
        content = file.read()
    try:
        pairs = _Plain(io.BytesIO(content)).load()
    except Exception as error:  # what unpickling raises depends on where the file is damaged
        raise CorpusError(f"{path}: its index cannot be read: {error}") from error
    plain = isinstance(pairs, list) and all(
        isinstance(pair, tuple) and len(pair) == 2 and all(type(number) is int for number in pair) for pair in pairs
    )
    if not plain:
        raise CorpusError(f"{path}: its index is no list of pairs of whole numbers")
    place = 0
    for number, (start, size) in enumerate(pairs):
        if start != place or size < 0 or size % item:
            raise CorpusError(
                f"{path}: document {number} is said to lie at {start} with {size} bytes, expected at {place}"
            )
        place += size
    if place != length:
        raise CorpusError(f"{path}: its documents have {place} bytes, its ids {length}")
    if not length:
        raise CorpusError(f"{path}: holds no token")
    starts = np.fromiter((start // item for start, size in pairs if size), np.int64)
    return Stream(str(path), _mapped(path, _PBIN_DTYPES[item], length // item, _PBIN.size), starts)  # type: ignore[arg-type]  # an array is a sequence here


def _bare(path: Path, size: int, header: int) -> Stream:
    if (size - header) % 2 or size <= header:
        raise CorpusError(
            f"{path}: {size} bytes are no uint16 ids, and no other format was found in it (.idx missing?)"
        )
    return Stream(str(path), _mapped(path, np.dtype("<u2"), (size - header) // 2, header), ())


# -- writing -----------------------------------------------------------------------------------------------


def smallest_dtype(vocabulary: int) -> np.dtype[Any]:
    """As Megatron chooses it: uint16 where ids are below 65500, else int32."""
    return CODES[8] if vocabulary < 65500 else CODES[4]


def write_index(path: Path, dtype: np.dtype[Any], lengths: Sequence[int] | Any, at_once: int = 1 << 20) -> None:
    """Megatron's `.idx` of documents of one sequence each, whose lengths in tokens are int32.

    Args:
        lengths: [documents], most often memory-mapped; `at_once` of them are in memory.
    """
    code = next(code for code, known in CODES.items() if known == dtype)
    count = len(lengths)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, count, count + 1))
        for part in _parts(lengths, at_once):
            file.write(part.astype("<i4").tobytes())
        place = 0
        for part in _parts(lengths, at_once):
            ends = place + np.cumsum(part, dtype=np.int64) * dtype.itemsize
            file.write((ends - part * dtype.itemsize).astype("<i8").tobytes())
            place = int(ends[-1])
        for first in range(0, count + 1, at_once):
            file.write(np.arange(first, min(first + at_once, count + 1), dtype="<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _parts(lengths: Any, at_once: int) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    for first in range(0, len(lengths), at_once):
        yield np.asarray(lengths[first : first + at_once], dtype=np.int64)

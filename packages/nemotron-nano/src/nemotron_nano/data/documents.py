"""The documents of a corpus as others store it: JSON lines, parquet, folders of text, saved Hugging Face datasets.

A document is named by its source and number (a file and its line), and is either text or what is wrong with it. Sources
are read as streams: no more than one batch of documents is in memory, however long the corpus.
"""

import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import attrs

from nemotron_nano.data.streams import CorpusError

LONGEST_LINE = 2**28
"""Bytes of a line above which it is taken for damage, and not read as a whole."""

TEXT_SUFFIXES = (".txt", ".md", ".py")


class MissingReaderError(ImportError):
    """An extra that reads this format is not installed."""


@attrs.frozen
class Raw:
    """One document as it stands in its source; what it says is found by `text_of`, in another process maybe."""

    number: int
    """Line, from 1, in files of lines; row, from 0, in tables; 0 in a file of its own."""
    content: bytes | str | None
    """A line of JSON, or text. None: the source gave nothing."""
    problem: str = ""
    """Why there is nothing."""
    is_json: bool = False


class Source(Protocol):
    """A file, or a saved dataset."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes on disk, for how far reading has come."""
        ...

    def read(self, skip: int, position: Callable[[int], object]) -> Iterator[Raw]:
        """The documents behind the first `skip`; `position` is told the bytes read so far."""
        ...


@attrs.frozen
class _Lines:
    """JSON lines, plain or compressed."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def read(self, skip: int, position: Callable[[int], object]) -> Iterator[Raw]:
        with self.path.open("rb") as file, _decompressed(file, self.path) as lines:
            number = 0
            while line := self._next(lines, number):
                number += 1
                is_whole = line.endswith(b"\n") or len(line) < LONGEST_LINE
                rest = b"" if is_whole else line
                while rest and not rest.endswith(b"\n"):
                    rest = self._next(lines, number)
                if number > skip:
                    position(file.tell())
                    problem = "" if is_whole else f"is longer than {LONGEST_LINE} bytes"
                    yield Raw(number, line if is_whole and line.strip() else None, problem, is_json=True)

    def _next(self, lines: IO[bytes], number: int) -> bytes:
        try:
            return lines.readline(LONGEST_LINE)
        except Exception as error:  # what decompression raises depends on the format
            raise CorpusError(f"{self.path}: cannot be read behind line {number}: {error}") from error


@contextmanager
def _decompressed(file: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    if path.suffix == ".gz":
        with gzip.open(file) as plain:
            yield plain  # type: ignore[misc]  # a GzipFile reads bytes
    elif path.suffix in (".zst", ".zstd"):
        try:
            import zstandard
        except ImportError as error:
            raise MissingReaderError(f"{path} needs: pip install 'nemotron-nano[data]'") from error
        with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as stream:
            yield io.BufferedReader(stream)
    else:
        yield file


@attrs.frozen
class _Text:
    """A file that is one document."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def read(self, skip: int, position: Callable[[int], object]) -> Iterator[Raw]:
        if skip == 0:
            content = self.path.read_bytes()
            position(len(content))
            yield Raw(0, content)


@attrs.frozen
class _Table:
    """A parquet file, read in batches of rows."""

    path: Path
    field: str

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def read(self, skip: int, position: Callable[[int], object]) -> Iterator[Raw]:
        try:
            from pyarrow import ArrowInvalid
            from pyarrow.parquet import ParquetFile
        except ImportError as error:
            raise MissingReaderError(f"{self.path} needs: pip install 'nemotron-nano[parquet]'") from error
        try:
            file: Any = ParquetFile(self.path)
        except ArrowInvalid as error:
            raise CorpusError(f"{self.path}: is no parquet file: {error}") from error
        with file:
            if self.field not in file.schema_arrow.names:
                raise CorpusError(
                    f"{self.path}: has no column {self.field!r}; there are: {', '.join(file.schema_arrow.names)}"
                )
            rows, number = file.metadata.num_rows, 0
            for batch in file.iter_batches(batch_size=1024, columns=[self.field]):
                if number + len(batch) > skip:
                    for index, text in enumerate(batch.column(0).to_pylist(), start=number):
                        if index >= skip:
                            yield _row(index, text)
                number += len(batch)
                position(self.size * number // rows)


@attrs.frozen
class _Dataset:
    """What `datasets` saved with `save_to_disk`; its splits one behind the other."""

    path: Path
    field: str

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*.arrow"))

    def read(self, skip: int, position: Callable[[int], object]) -> Iterator[Raw]:
        try:
            from datasets import Dataset, load_from_disk
        except ImportError as error:
            raise MissingReaderError(f"{self.path} needs: pip install 'nemotron-nano[datasets]'") from error
        saved: Any = load_from_disk(str(self.path))
        parts = [saved] if isinstance(saved, Dataset) else list(saved.values())
        rows, number = sum(map(len, parts)), 0
        for part in parts:
            if self.field not in part.column_names:
                raise CorpusError(
                    f"{self.path}: has no column {self.field!r}; there are: {', '.join(part.column_names)}"
                )
            for first in range(max(0, skip - number), len(part), 1024):
                texts = part[first : first + 1024][self.field]
                for index, text in enumerate(texts, start=number + first):
                    yield _row(index, text)
                position(self.size * (number + first + len(texts)) // rows)
            number += len(part)


def _row(number: int, text: object) -> Raw:
    if isinstance(text, str):
        return Raw(number, text)
    return Raw(number, None, f"its text is {'missing' if text is None else type(text).__name__}")


def sources(inputs: Sequence[Path], field: str) -> list[Source]:
    """What the paths hold, in their order and folders in the order of names; a folder is text files, or data files.

    Raises:
        CorpusError: there is no such path, a file of no known format, or nothing to read.
    """
    found: list[Source] = []
    for path in inputs:
        if not path.exists():
            raise CorpusError(f"{path}: there is no such file or folder")
        if path.is_file():
            found.append(_source(path, field))
        elif (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            found.append(_Dataset(path, field))
        else:
            files = sorted(file for file in path.rglob("*") if file.is_file() and _is_known(file))
            if not files:
                raise CorpusError(f"{path}: holds no file of a known format ({', '.join(_KNOWN)})")
            found += [_source(file, field) for file in files]
    return found


_LINES = (".jsonl", ".json", ".ndjson")
_KNOWN = (
    *_LINES,
    *(f"{suffix}{packed}" for suffix in _LINES for packed in (".gz", ".zst")),
    ".parquet",
    *TEXT_SUFFIXES,
)


def _is_known(path: Path) -> bool:
    return path.name.endswith(_KNOWN)


def _source(path: Path, field: str) -> Source:
    if path.suffix == ".parquet":
        return _Table(path, field)
    if path.name.endswith(TEXT_SUFFIXES):
        return _Text(path)
    if _is_known(path):
        return _Lines(path)
    raise CorpusError(f"{path}: is of no known format ({', '.join(_KNOWN)})")


class BadDocument(ValueError):
    """A document without text: says why."""


def text_of(raw: Raw, field: str) -> str | None:
    """The text of a document; None where there is none to speak of, such as an empty line.

    Raises:
        BadDocument: it is damaged.
    """
    if raw.problem:
        raise BadDocument(raw.problem)
    if raw.content is None:
        return None
    try:
        if not raw.is_json:
            text = raw.content if isinstance(raw.content, str) else raw.content.decode()
            return text or None
        value = json.loads(raw.content)
    except UnicodeDecodeError as error:
        raise BadDocument(f"is not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise BadDocument(f"is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadDocument(f"is a {type(value).__name__}, not an object with the field {field!r}")
    for part in field.split("."):
        value = value.get(part, _ABSENT) if isinstance(value, dict) else _ABSENT
    if value is _ABSENT:
        raise BadDocument(f"has no field {field!r}")
    if not isinstance(value, str):
        raise BadDocument(f"its {field!r} is {'null' if value is None else type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadDocument(f"its {field!r} has half a surrogate pair at character {error.start}") from error
    return value or None


_ABSENT = object()

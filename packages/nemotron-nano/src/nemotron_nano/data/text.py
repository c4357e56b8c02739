"""Text as training data: a folder of files is a corpus of two byte streams, whose rows the ranks share out.

What a row holds depends on the seed and on its number in the whole run, never on how many ranks there are:
the global batch of a step is the same under every layout.
"""

import bisect
import hashlib
import math
import sysconfig
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from moe_core.plugins import Batch

VOCABULARY = 256
_IGNORED = -100
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


class CorpusError(ValueError):
    """A folder that does not hold what training needs."""


@attrs.frozen
class Split:
    """The documents of one side, joined."""

    text: bytes = attrs.field(repr=False)
    document_starts: tuple[int, ...] = attrs.field(repr=False)
    """Offset of each document's first byte, ascending."""

    @property
    def documents(self) -> int:
        return len(self.document_starts)


@attrs.frozen
class Corpus:
    """What was found in a folder, and a digest to tell it from what others found."""

    name: str
    training: Split
    validation: Split
    digest: str
    """First 12 hex digits of a SHA-256 over the relative paths and contents of all files."""


def python_stdlib() -> Corpus:
    """The Python standard library's own source files, without its tests, as found on this machine."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in folder.rglob("*.py") if _NOT_THE_LIBRARY.isdisjoint(path.relative_to(folder).parts)]
    version = sysconfig.get_python_version()
    return read_corpus(f"Python {version} standard library", folder, paths, validation_fraction=0.05)


def text_folder(folder: Path, suffixes: Sequence[str], validation_fraction: float) -> Corpus:
    """All files below `folder` that end in one of `suffixes`."""
    if not folder.is_dir():
        raise CorpusError(f"data.folder = {str(folder)!r}: must be a folder that exists")
    paths = [path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file()]
    return read_corpus(str(folder), folder, paths, validation_fraction)


def read_corpus(name: str, folder: Path, paths: Iterable[Path], validation_fraction: float) -> Corpus:
    """Split `paths` by file and join each side.

    Which side a file is on follows from a hash of its path relative to `folder` alone, so it stays there
    when other files come and go.
    """
    digest = hashlib.sha256()
    sides: dict[bool, list[bytes]] = {True: [], False: []}
    for relative, path in sorted((path.relative_to(folder).as_posix(), path) for path in paths):
        content = path.read_bytes()
        digest.update(relative.encode() + b"\0" + len(content).to_bytes(8, "big") + content)
        if content:
            sides[_is_validation(relative, validation_fraction)].append(content)
    for side, files in sides.items():
        if not files:
            raise CorpusError(
                f"{name}: no file for {'validation' if side else 'training'} among {sum(map(len, sides.values()))} "
                "non-empty files; give more files, or another data.validation_fraction"
            )
    return Corpus(name, _join(sides[False]), _join(sides[True]), digest.hexdigest()[:12])


def _is_validation(relative: str, fraction: float) -> bool:
    share = int.from_bytes(hashlib.sha256(relative.encode()).digest()[:8], "big") / 2**64
    return share < fraction


def _join(documents: list[bytes]) -> Split:
    starts, offset = [], 0
    for document in documents:
        starts.append(offset)
        offset += len(document)
    return Split(b"".join(documents), tuple(starts))


class TextData:
    """`kinds.Data` over a corpus of bytes."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        sequence_length: int,
        global_batch_size: int,
        microbatches: int,
        validation_sequences: int,
        isolate_documents: bool,
        seed: int,
        dp_rank: int,
        dp_size: int,
        device: torch.device,
    ) -> None:
        self.corpus = corpus
        self._training = _Rows(corpus.training, sequence_length, isolate_documents, device)
        self._validation = _Rows(corpus.validation, sequence_length, isolate_documents, device)
        self._rows_per_microbatch = global_batch_size // (dp_size * microbatches)
        self._global_batch_size, self._microbatches = global_batch_size, microbatches
        self._validation_count = min(validation_sequences, len(self._validation))
        self._seed, self._dp_rank, self._dp_size = seed, dp_rank, dp_size
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def train_batches(self, step: int) -> Sequence[Batch]:
        mine = self._global_batch_size // self._dp_size
        first = step * self._global_batch_size + self._dp_rank * mine
        rows = [self._shuffled(number) for number in range(first, first + mine)]
        size = self._rows_per_microbatch
        return [self._training.batch(rows[i : i + size]) for i in range(0, mine, size)]

    def validation_batches(self) -> Sequence[Batch]:
        size = self._rows_per_microbatch
        numbers: list[int | None] = list(self._validation_rows())
        share = math.ceil(math.ceil(len(numbers) / self._dp_size) / size) * size
        numbers += [None] * (share * self._dp_size - len(numbers))
        mine = numbers[self._dp_rank * share : (self._dp_rank + 1) * share]
        return [self._validation.batch(mine[i : i + size]) for i in range(0, share, size)]

    def describe(self) -> Mapping[str, Any]:
        training, validation = self.corpus.training, self.corpus.validation
        return {
            "corpus": self.corpus.name,
            "digest": self.corpus.digest,
            "bytes_per_token": 1.0,
            "training_files": training.documents,
            "training_bytes": len(training.text),
            "validation_files": validation.documents,
            "validation_bytes": len(validation.text),
            "byte_entropy_bits": self.validation_byte_entropy(),
        }

    def validation_byte_entropy(self) -> float:
        """Bits per byte of the best model that ignores context, on the bytes that validation predicts."""
        counts: Counter[int] = Counter()
        for number in self._validation_rows():
            counts.update(self._validation.predicted(number))
        total = sum(counts.values())
        return -sum(n / total * math.log2(n / total) for n in counts.values())

    def _validation_rows(self) -> list[int]:
        """Spread evenly over the validation text."""
        return [i * len(self._validation) // self._validation_count for i in range(self._validation_count)]

    def _shuffled(self, number: int) -> int:
        """Row `number` of the run: the rows of an epoch in an order of that epoch's own."""
        epoch, position = divmod(number, len(self._training))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self._training), generator=generator)
        return int(self._order[position])


class _Rows:
    """A split as rows of `length` tokens and the byte after them."""

    def __init__(self, split: Split, length: int, isolate_documents: bool, device: torch.device) -> None:
        self._count = (len(split.text) - 1) // length
        if self._count < 1:
            raise CorpusError(
                f"the text has {len(split.text)} bytes, fewer than one row of data.sequence_length = {length} + 1"
            )
        self._split, self._length, self._device = split, length, device
        self._isolate = isolate_documents

    def __len__(self) -> int:
        return self._count

    def predicted(self, number: int) -> bytes:
        start = number * self._length
        return self._split.text[start + 1 : start + 1 + self._length]

    def batch(self, numbers: Sequence[int | None]) -> Batch:
        """These rows; None is a row whose labels are all ignored."""
        windows = [self._window(number or 0) for number in numbers]
        text = torch.stack(windows)
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].clone()
        documents = None
        if self._isolate:
            extended = torch.stack([self._document_ids(number or 0) for number in numbers])
            labels[extended[:, 1:] != extended[:, :-1]] = _IGNORED
            documents = extended[:, :-1].contiguous().to(self._device)
        labels[[number is None for number in numbers]] = _IGNORED
        return Batch(tokens.to(self._device), labels.to(self._device), documents)

    def _window(self, number: int) -> Tensor:
        start = number * self._length
        window = bytearray(self._split.text[start : start + self._length + 1])
        return torch.frombuffer(window, dtype=torch.uint8).long()

    def _document_ids(self, number: int) -> Tensor:
        start = number * self._length
        starts = self._split.document_starts
        ids = [bisect.bisect_right(starts, start + offset) for offset in range(self._length + 1)]
        return torch.tensor(ids)

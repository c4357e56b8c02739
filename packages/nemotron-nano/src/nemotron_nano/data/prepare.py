"""From documents to a file of token ids: tokenised by several processes, written in order, resumed where it was.

OUT.bin, OUT.idx            Megatron's indexed format: the ids, and where each document lies
OUT.json                    counts, and which tokenizer it was
OUT.tokenizer.json          a copy of it, unless it is "bytes"
OUT.bad.txt                 which documents were left out, and why; only if there are any
.OUT.*.partial              of a preparation that has not ended
"""

import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np

from nemotron_nano.data.documents import BadDocument, Raw, Source, sources, text_of
from nemotron_nano.data.streams import CorpusError
from nemotron_nano.data.token_files import open_tokens, smallest_dtype, write_index
from nemotron_nano.data.tokenizer import BYTES, JsonTokenizer, Tokenizer, load_tokenizer

_DOCUMENTS, _BYTES = 512, 1 << 20
"""Of a batch, at most."""

_AHEAD = 3
"""Batches for each process that are read before their turn to be written."""

COMMIT_SECONDS = 10.0
"""How much work a kill may undo."""

NO_END = "none"
"""In place of a token: documents are not ended by any."""


@attrs.frozen
class Work:
    """What to tokenise, and how."""

    inputs: tuple[Path, ...]
    tokenizer: str
    """ "bytes", a tokenizer.json, or a folder with one."""
    end: str | None = None
    """Text of the token after each document; None: the tokenizer's own; "none": none."""
    field: str = "text"
    """Of a JSON object, dotted for one inside of another, or a column."""
    on_bad_line: Literal["skip", "stop"] = "stop"
    workers: int = 1

    def load(self) -> Tokenizer:
        """Raises CorpusError: the tokenizer has no token known to end documents, and none was named."""
        tokenizer = load_tokenizer(self.tokenizer, None if self.end == NO_END else self.end)
        if tokenizer.end is None and self.end is None and self.tokenizer != BYTES:
            raise CorpusError(
                f"{self.tokenizer}: has no token that is known to end a document; name one with --end TOKEN, or say "
                f"--end {NO_END}"
            )
        return tokenizer


@attrs.frozen
class Progress:
    """How far a preparation has come; what is stored between two tries."""

    digest: str
    """Of the work and its inputs."""
    source: int = 0
    """Which of the sources is read."""
    read: int = 0
    """Its documents that are done, in its own numbers."""
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    bad: int = 0


@attrs.frozen
class Batch:
    """Documents in order, of one source or several."""

    documents: tuple[tuple[str, Raw], ...]
    """Each with the name of its source."""
    source: int
    """The last of them, ..."""
    read: int
    """... and how many of its documents are done with this batch."""


@attrs.frozen
class Encoded:
    """What became of a batch."""

    ids: bytes
    lengths: tuple[int, ...]
    text_bytes: int
    bad: tuple[str, ...]
    """Which documents are damaged, and why."""


def prepare(
    out: Path,
    work: Work,
    *,
    position: Callable[[int], object] = lambda done: None,
    commit_seconds: float = COMMIT_SECONDS,
) -> Progress:
    """Write `out`.bin and `out`.idx; goes on behind what an interrupted call with the same arguments has done.

    Memory does not grow with the corpus: each process has a few batches.

    Args:
        position: told the bytes of the inputs that are done.

    Raises:
        CorpusError: `out` exists; an input, the field or the tokenizer does not fit; with "stop", the first document
            that is damaged (file and line); no document at all.
    """
    files = _Files(out)
    if files.bin.exists() or files.index.exists():
        raise CorpusError(f"{files.bin}: exists; give another name, remove it, or check it with --verify")
    tokenizer, found = work.load(), sources(work.inputs, work.field)
    dtype = smallest_dtype(tokenizer.vocabulary)
    progress = files.resume(_digest(work, tokenizer, found), dtype.itemsize)
    with files.open() as (ids, lengths, bad):
        last_commit = time.monotonic()
        try:
            for batch, encoded in _encoded(work, tokenizer, _batches(found, progress, position)):
                if encoded.bad and work.on_bad_line == "stop":
                    raise CorpusError(f"{encoded.bad[0]}; mend it, or leave such out with --on-bad-line skip")
                bad.write("".join(f"{told}\n" for told in encoded.bad).encode())
                ids.write(encoded.ids)
                lengths.write(np.array(encoded.lengths, "<i4").tobytes())
                progress = _further(progress, batch, encoded, dtype.itemsize)
                if time.monotonic() - last_commit > commit_seconds:
                    files.commit(progress, (ids, lengths, bad))
                    last_commit = time.monotonic()
        finally:
            files.commit(progress, (ids, lengths, bad))
    if not progress.documents:
        raise CorpusError(f"{', '.join(map(str, work.inputs))}: holds no text; {progress.bad} documents are damaged")
    files.publish(progress, tokenizer, dtype)
    return progress


def verify(out: Path, work: Work, *, position: Callable[[int], object] = lambda done: None) -> int:
    """Tokenise the inputs again and compare every document; returns how many there are.

    Raises:
        CorpusError: one differs (file and line), or there are more or fewer.
    """
    tokenizer, found = work.load(), sources(work.inputs, work.field)
    stream, dtype, document, offset = open_tokens(out), smallest_dtype(tokenizer.vocabulary), 0, 0
    for batch, encoded in _encoded(
        attrs.evolve(work, on_bad_line="skip"), tokenizer, _batches(found, Progress(""), position)
    ):
        count = sum(encoded.lengths)
        same = np.array_equal(stream.tokens[offset : offset + count], np.frombuffer(encoded.ids, dtype))
        starts = [stream.starts[i] for i in range(document, min(document + len(encoded.lengths), len(stream.starts)))]
        if not same or starts != np.cumsum((offset, *encoded.lengths))[:-1].tolist():
            (first, one), (last, other) = batch.documents[0], batch.documents[-1]
            raise CorpusError(
                f"{stream.name}: documents {document} to {document + len(encoded.lengths) - 1} are not those of "
                f"{first}:{one.number} to {last}:{other.number}"
            )
        document, offset = document + len(encoded.lengths), offset + count
    if (document, offset) != (len(stream.starts), len(stream)):
        raise CorpusError(f"{stream.name}: has {len(stream.starts)} documents, the inputs {document}")
    return document


def _further(progress: Progress, batch: Batch, encoded: Encoded, item: int) -> Progress:
    return attrs.evolve(
        progress,
        source=batch.source,
        read=batch.read,
        documents=progress.documents + len(encoded.lengths),
        tokens=progress.tokens + len(encoded.ids) // item,
        text_bytes=progress.text_bytes + encoded.text_bytes,
        bad=progress.bad + len(encoded.bad),
    )


def _digest(work: Work, tokenizer: Tokenizer, found: Iterable[Source]) -> str:
    inputs = [(source.name, source.size) for source in found]
    told = (inputs, tokenizer.digest, tokenizer.end, work.field, work.on_bad_line)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def total_size(work: Work) -> int:
    """Bytes of all inputs."""
    return sum(source.size for source in sources(work.inputs, work.field))


# -- batches, by several processes -------------------------------------------------------------------------


def _batches(found: Sequence[Source], done: Progress, position: Callable[[int], object]) -> Iterator[Batch]:
    before = sum(source.size for source in found[: done.source])
    documents: list[tuple[str, Raw]] = []
    index, read, size = done.source, done.read, 0
    for index, source in enumerate(found[done.source :], start=done.source):
        start = before

        def here(count: int, start: int = start) -> None:
            position(start + count)

        read = done.read if index == done.source else 0
        for raw in source.read(read, here):
            documents.append((source.name, raw))
            read, size = read + 1, size + len(raw.content or "")
            if len(documents) == _DOCUMENTS or size >= _BYTES:
                yield Batch(tuple(documents), index, read)
                documents, size = [], 0
        before += source.size
        position(before)
    if documents:
        yield Batch(tuple(documents), index, read)


def _encoded(work: Work, tokenizer: Tokenizer, batches: Iterator[Batch]) -> Iterator[tuple[Batch, Encoded]]:
    """Each batch with what became of it, in order."""
    if work.workers == 1:
        for batch in batches:
            yield batch, _encode(batch, tokenizer, work.field)
        return
    # spawned: a fork of a process in which tokenizers has threads hangs
    with ProcessPoolExecutor(work.workers, get_context("spawn"), _start_worker, (work,)) as pool:
        waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
        try:
            for batch in batches:
                waiting.append((batch, pool.submit(_encode_here, batch)))
                if len(waiting) == work.workers * _AHEAD:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        except BrokenProcessPool as error:
            raise CorpusError(
                f"a process that tokenised was killed; run the same command again to go on: {error}"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


_worker: tuple[Tokenizer, str] | None = None
"""In a process that tokenises."""


def _start_worker(work: Work) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each has a core of its own
    _worker = (work.load(), work.field)


def _encode_here(batch: Batch) -> Encoded:
    assert _worker is not None
    return _encode(batch, *_worker)


def _encode(batch: Batch, tokenizer: Tokenizer, field: str) -> Encoded:
    texts: list[str] = []
    bad: list[str] = []
    for source, raw in batch.documents:
        try:
            if (text := text_of(raw, field)) is not None:
                texts.append(text)
        except BadDocument as error:
            bad.append(f"{source}:{raw.number}: {error}")
    ended = () if tokenizer.end is None else (tokenizer.end,)
    encoded = [np.array((*ids, *ended), smallest_dtype(tokenizer.vocabulary)) for ids in tokenizer.encode(texts)]
    encoded = [ids for ids in encoded if len(ids)]
    size = sum(len(text.encode()) for text in texts)
    return Encoded(b"".join(ids.tobytes() for ids in encoded), tuple(map(len, encoded)), size, tuple(bad))


# -- files -------------------------------------------------------------------------------------------------


class _Files:
    """The files of one preparation."""

    def __init__(self, out: Path) -> None:
        out = out.with_suffix("") if out.suffix in (".bin", ".idx") else out
        self.bin, self.index, self.record, self.bad, self.tokenizer = (
            out.with_name(f"{out.name}.{end}") for end in ("bin", "idx", "json", "bad.txt", "tokenizer.json")
        )
        self._parts = [out.with_name(f".{out.name}.{end}.partial") for end in ("bin", "lengths", "bad")]
        self._progress = out.with_name(f".{out.name}.progress.partial")

    def resume(self, digest: str, item: int) -> Progress:
        """What an earlier try has done of the same work; nothing is left of other work."""
        self.bin.parent.mkdir(parents=True, exist_ok=True)
        try:
            found = json.loads(self._progress.read_text(encoding="utf-8"))
            progress, bad_size = Progress(**found["progress"]), int(found["bad_size"])
        except (OSError, ValueError, TypeError, KeyError):
            progress, bad_size = Progress(""), 0
        sizes = (progress.tokens * item, progress.documents * 4, bad_size)
        if progress.digest != digest or any(_size(part) < size for part, size in zip(self._parts, sizes, strict=True)):
            progress, sizes = Progress(digest), (0, 0, 0)
        for part, size in zip(self._parts, sizes, strict=True):
            with part.open("ab") as file:
                file.truncate(size)
        return progress

    @contextmanager
    def open(self) -> Iterator[list[Any]]:
        files = [part.open("ab") for part in self._parts]
        try:
            yield files
        finally:
            for file in files:
                file.close()

    def commit(self, progress: Progress, files: Sequence[Any]) -> None:
        """All that was written is on the disk, and so is how much it is."""
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        aside = self._progress.with_name(f"{self._progress.name}.new")
        aside.write_text(
            json.dumps({"progress": attrs.asdict(progress), "bad_size": files[2].tell()}), encoding="utf-8"
        )
        aside.replace(self._progress)

    def publish(self, progress: Progress, tokenizer: Tokenizer, dtype: Any) -> None:
        ids, lengths, bad = self._parts
        if isinstance(tokenizer, JsonTokenizer):
            shutil.copyfile(tokenizer.path, self.tokenizer)
        told = {
            "documents": progress.documents,
            "tokens": progress.tokens,
            "text_bytes": progress.text_bytes,
            "bad_documents": progress.bad,
            "tokenizer": {"digest": tokenizer.digest, "vocabulary": tokenizer.vocabulary, "end": tokenizer.end},
        }
        self.record.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        if progress.bad:
            bad.replace(self.bad)
        ids.replace(self.bin)
        write_index(self.index, dtype, np.memmap(lengths, "<i4", "r"))  # last: with it the pair is whole
        for part in (*self._parts, self._progress):
            part.unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

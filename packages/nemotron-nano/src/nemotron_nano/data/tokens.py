"""Corpora of token ids for training: opened, weighed, split, and checked against tokenizer and model."""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from nemotron_nano.data.rows import Corpora, check_ids
from nemotron_nano.data.streams import CorpusError, Stream
from nemotron_nano.data.token_files import open_tokens
from nemotron_nano.data.tokenizer import BYTES, MissingTokenizersError, Tokenizer, load_tokenizer

_AT_ONCE = 1 << 24
"""Tokens that are looked at at once."""

MOST_CHECKED = 1 << 30
"""Tokens of a rank's share of the corpora that are looked at before the first step; those of later rows are looked at
when their turn comes."""

_log = logging.getLogger(__name__)


@attrs.frozen
class File:
    """A file of token ids."""

    path: str
    weight: float | None = None


def open_corpora(
    files: Sequence[File], validation: Sequence[File], fraction: float, tokenizer: str | None
) -> tuple[Corpora, int | None]:
    """The corpora, and the size of their vocabulary as far as a tokenizer or the record of `prepare` says it.

    Args:
        validation: files that are set apart; none: the last `fraction` of the documents of each of `files`.
        tokenizer: None: the one that lies beside the first file.

    Raises:
        CorpusError: a file is not there or damaged; some files have weights and others none; the tokenizer is
            not the one that a file was made with.
    """
    weights = [file.weight for file in files]
    if None in weights and any(weight is not None for weight in weights):
        raise CorpusError("data.files: must have a weight each, or none: the others' shares would be a guess")
    streams = [open_tokens(Path(file.path)) for file in files]
    if validation:
        training, held_out = streams, [open_tokens(Path(file.path)) for file in validation]
    else:
        training, held_out = (
            list(sides) for sides in zip(*(stream.split(fraction) for stream in streams), strict=True)
        )
    loaded = _tokenizer(tokenizer, files[0])
    records = {file.path: record_beside(Path(file.path)) for file in (*files, *validation)}
    if loaded is not None:
        _check_tokenizer(loaded, records)
    known = [loaded.vocabulary] if loaded is not None else []
    known += [record["tokenizer"]["vocabulary"] for record in records.values() if record]
    corpora = Corpora(
        training=training,
        validation=held_out,
        weights=None if None in weights else [float(weight or 0.0) for weight in weights],
        about={
            "corpus": ", ".join(file.path for file in files),
            "digest": _digest(streams),
            **_counts(training, held_out),
        },
        bytes_of=None if loaded is None else lambda ids: len(loaded.decode(ids.tolist())),
        tokenizer=getattr(loaded, "path", None),
    )
    return corpora, max(known, default=None)


def _counts(training: Sequence[Stream], validation: Sequence[Stream]) -> dict[str, int]:
    counts = {}
    for side, streams in (("training", training), ("validation", validation)):
        counts[f"{side}_documents"] = sum(len(stream.starts) for stream in streams)
        counts[f"{side}_tokens"] = sum(map(len, streams))
    return counts


def _digest(streams: Sequence[Stream]) -> str:
    """Tells corpora apart by their sizes, first and last tokens: a full one would read terabytes."""
    hashed = hashlib.sha256()
    for stream in streams:
        hashed.update(f"{len(stream)} {len(stream.starts)} ".encode())
        hashed.update(stream.tokens[:4096].tobytes() + stream.tokens[-4096:].tobytes())
    return hashed.hexdigest()[:12]


def record_beside(path: Path) -> dict[str, Any]:
    """What `prepare` noted of a file; {} where it was made by others."""
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    record = stem.with_name(f"{stem.name}.json")
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        return found if isinstance(found["tokenizer"]["vocabulary"], int) else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _tokenizer(given: str | None, file: File) -> Tokenizer | None:
    """None where none is known, or what reads it is missing: training needs ids only."""
    if given is not None:
        return load_tokenizer(given)
    path = Path(file.path)
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    copy = stem.with_name(f"{stem.name}.tokenizer.json")
    if not copy.is_file():
        return load_tokenizer(BYTES) if record_beside(path).get("tokenizer", {}).get("digest") == BYTES else None
    try:
        return load_tokenizer(str(copy))
    except MissingTokenizersError as error:
        _log.warning("%s; bits per byte are not known without it", error)
        return None


def _check_tokenizer(tokenizer: Tokenizer, records: dict[str, dict[str, Any]]) -> None:
    for path, record in records.items():
        if record and record["tokenizer"].get("digest") != tokenizer.digest:
            raise CorpusError(
                f"{path}: was made with another tokenizer (digest {record['tokenizer'].get('digest')}, not "
                f"{tokenizer.digest}): prepare it again, or name its own in data.tokenizer"
            )


def check_all_ids(streams: Sequence[Stream], vocabulary: int, rank: int, ranks: int) -> None:
    """Look at this rank's share of all tokens, but at no more than `MOST_CHECKED`.

    Raises:
        CorpusError: an id is none of the model's; says which, in which document.
    """
    looked = 0
    for stream in streams:
        for block in range(rank * _AT_ONCE, len(stream), ranks * _AT_ONCE):
            if looked >= MOST_CHECKED:
                return
            ids = stream.tokens[block : block + _AT_ONCE]
            check_ids(stream, block, ids, vocabulary)
            looked += len(ids)

"""Text as tokens, a byte a token: a folder of files as two streams, which the files are shared out to. No torch."""

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs
import numpy as np

from nemotron_nano.data.streams import CorpusError, Stream

_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@attrs.frozen
class TextCorpus:
    """What was found in a folder, and a digest to tell it from what others found."""

    name: str
    training: Stream
    validation: Stream
    digest: str
    """First 12 hex digits of a SHA-256 over the relative paths and contents of all files."""


def python_stdlib() -> TextCorpus:
    """The Python standard library's own source files, without its tests, as found on this machine."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in folder.rglob("*.py") if _NOT_THE_LIBRARY.isdisjoint(path.relative_to(folder).parts)]
    version = sysconfig.get_python_version()
    return read_corpus(f"Python {version} standard library", folder, paths, validation_fraction=0.05)


def text_folder(folder: Path, suffixes: Sequence[str], validation_fraction: float) -> TextCorpus:
    """All files below `folder` that end in one of `suffixes`."""
    if not folder.is_dir():
        raise CorpusError(f"data.folder = {str(folder)!r}: must be a folder that exists")
    paths = [path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file()]
    return read_corpus(str(folder), folder, paths, validation_fraction)


def read_corpus(name: str, folder: Path, paths: Iterable[Path], validation_fraction: float) -> TextCorpus:
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
    return TextCorpus(name, _join(name, sides[False]), _join(name, sides[True]), digest.hexdigest()[:12])


def _is_validation(relative: str, fraction: float) -> bool:
    share = int.from_bytes(hashlib.sha256(relative.encode()).digest()[:8], "big") / 2**64
    return share < fraction


def _join(name: str, documents: list[bytes]) -> Stream:
    starts = np.cumsum([0, *map(len, documents)])[:-1].tolist()
    return Stream(name, np.frombuffer(b"".join(documents), np.uint8), starts)

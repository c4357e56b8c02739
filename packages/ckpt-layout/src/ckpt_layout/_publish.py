"""The files of a checkpoint on their way to being the newest: written aside, renamed, pointed at, old ones removed."""

import os
import shutil
from pathlib import Path

from ckpt_layout._latest import attempt_of, complete, step_of


def fresh_folder(partial: Path) -> None:
    """An empty folder; what a save that did not finish left there is removed."""
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def write_durably(file: Path, content: bytes) -> None:
    """Write and wait until it is on the disk."""
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def free_name(directory: Path, step: int) -> Path:
    """Where the next checkpoint of `step` goes: a name that none has, so that saving again replaces nothing."""
    before = [attempt_of(folder) for folder in complete(directory) if step_of(folder) == step]
    return directory / (f"step-{step:08d}" + (f".{max(before) + 1}" if before else ""))


def publish(partial: Path, final: Path) -> None:
    """Rename, then point `latest` at it; each is one atomic step, and a checkpoint that `latest` names is whole."""
    partial.replace(final)
    pointer = final.with_name(".latest.partial")
    write_durably(pointer, f"{final.name}\n".encode())
    _sync_folder(final.parent)
    os.replace(pointer, final.with_name("latest"))
    _sync_folder(final.parent)


def remove_others(newest: Path, keep_last: int | None) -> None:
    """Remove other checkpoints of the newest's step, and all but the `keep_last` that were written last."""
    others = [folder for folder in complete(newest.parent) if folder != newest]
    for folder in others:
        if step_of(folder) == step_of(newest):
            _remove(folder)
    if keep_last is None:
        return
    others = [folder for folder in others if step_of(folder) != step_of(newest)]
    others.sort(key=lambda folder: (folder / "meta.json").stat().st_mtime_ns)
    for folder in others[: max(0, len(others) - (keep_last - 1))]:
        _remove(folder)


def _remove(folder: Path) -> None:
    """First out of sight, so that nobody finds half of it."""
    gone = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(gone, ignore_errors=True)
    folder.replace(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """A rename is on the disk when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Folders that appear when they are whole, and the checkpoints of a run as such folders; needs no torch.

<directory>/latest                 the name of the newest complete checkpoint
<directory>/step-00000010/         a complete checkpoint; after a second save of the step, step-00000010.1, and so on
<directory>/.step-*.partial        one that is being written, or was when a rank died
"""

import os
import re
import shutil
from pathlib import Path

from ckpt_layout._errors import LayoutError

STEP_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def partial_of(final: Path) -> Path:
    """Where a folder is written, beside its place, until it is whole.

    Raises:
        LayoutError: the root of the file system, which has no place beside it.
    """
    final = final if final.name else final.absolute()
    if not final.name:
        raise LayoutError(f"{final}: is no folder that can be made; give one inside of it")
    return final.with_name(f".{final.name}.partial")


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


def refuse_occupied(folder: Path, but_for: Path | None = None) -> None:
    """Raises LayoutError where something lies in `folder`, `but_for` this."""
    if folder.exists() and (not folder.is_dir() or any(inside != but_for for inside in folder.iterdir())):
        raise LayoutError(f"{folder}: exists and is not empty; give another folder, or remove it first")


# -- which checkpoints there are ---------------------------------------------------------------------------


def latest_step(directory: Path) -> int | None:
    """The step of the newest complete checkpoint in `directory`; None if there is none.

    Raises:
        LayoutError: `latest` names no checkpoint.
    """
    folder = latest_folder(directory)
    return None if folder is None else step_of(folder)


def latest_folder(directory: Path) -> Path | None:
    """As `latest_step`, but the folder."""
    pointer = directory / "latest"
    if not pointer.is_file():
        return None
    name = pointer.read_text(encoding="utf-8").strip()
    if STEP_FOLDER.fullmatch(name) is None or not (directory / name / "meta.json").is_file():
        raise LayoutError(f"{pointer}: names {name!r}, which is no checkpoint; there are: {listed(directory)}")
    return directory / name


def folder_of(directory: Path, step: int) -> Path:
    """The complete checkpoint of `step`: the one that `latest` names, else the one written last.

    Raises:
        LayoutError: there is none.
    """
    found = [folder for folder in complete(directory) if step_of(folder) == step]
    if not found:
        raise LayoutError(f"{directory}: has no checkpoint of step {step}; there are: {listed(directory)}")
    pointer = directory / "latest"
    name = pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else ""
    return max(found, key=lambda folder: (folder.name == name, attempt_of(folder)))


def complete(directory: Path) -> list[Path]:
    folders = directory.iterdir() if directory.is_dir() else ()
    return [folder for folder in folders if STEP_FOLDER.fullmatch(folder.name) and (folder / "meta.json").is_file()]


def step_of(folder: Path) -> int:
    return int(_match(folder)[1])


def attempt_of(folder: Path) -> int:
    return int(_match(folder)[2] or 0)


def _match(folder: Path) -> re.Match[str]:
    match = STEP_FOLDER.fullmatch(folder.name)
    assert match is not None
    return match


def listed(directory: Path) -> str:
    """The names of the checkpoints in `directory`, for messages."""
    return ", ".join(sorted(folder.name for folder in complete(directory))) or "none"


# -- a checkpoint on its way to being the newest -----------------------------------------------------------


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

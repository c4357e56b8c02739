"""Which checkpoints a folder has, and which is the newest; needs no torch.

<directory>/latest                 the name of the newest complete checkpoint
<directory>/step-00000010/         a complete checkpoint; after a second save of the step, step-00000010.1, and so on
<directory>/.step-*.partial        one that is being written, or was when a rank died
"""

import re
from pathlib import Path

from ckpt_layout._errors import LayoutError

STEP_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


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

"""Which checkpoint is the newest; needs no torch."""

import re
from pathlib import Path

from ckpt_layout._errors import LayoutError

STEP_FOLDER = re.compile(r"step-(\d{8,})")


def latest_step(directory: Path) -> int | None:
    """The step of the newest complete checkpoint in `directory`; None if there is none.

    Raises:
        LayoutError: `latest` names no checkpoint.
    """
    pointer = directory / "latest"
    if not pointer.is_file():
        return None
    name = pointer.read_text(encoding="utf-8").strip()
    match = STEP_FOLDER.fullmatch(name)
    if match is None or not (directory / name / "meta.json").is_file():
        raise LayoutError(f"{pointer}: names {name!r}, which is no checkpoint; there are: {listed(directory)}")
    return int(match[1])


def listed(directory: Path) -> str:
    """The names of the checkpoints in `directory`, for messages."""
    folders = directory.iterdir() if directory.is_dir() else ()
    return ", ".join(sorted(folder.name for folder in folders if STEP_FOLDER.fullmatch(folder.name))) or "none"

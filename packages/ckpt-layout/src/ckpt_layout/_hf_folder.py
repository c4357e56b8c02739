"""Reading a Hugging Face folder: config, index, and slices of safetensors files. Nothing in it is unpickled."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ckpt_layout._errors import LayoutError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class HfFolder:
    """The tensors of a folder by key. Files are opened once, and only the bytes asked for are read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise LayoutError(f"{self.path}: is no folder")
        names = self._weight_map()
        self._files = {name: self._open(name) for name in sorted(set(names.values()))}
        self._file_of = names
        self._check_index()

    def config(self) -> dict[str, Any]:
        """config.json, or {} where there is none."""
        file = self.path / "config.json"
        return self._json(file) if file.is_file() else {}

    def keys(self) -> set[str]:
        return set(self._file_of)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """As the file names it: "F32", "BF16", ..."""
        return str(self._slice(key).get_dtype())

    def read(self, key: str, block: tuple[slice, ...]) -> Tensor:
        """The part `block` of a tensor, in its dtype on disk, on the CPU."""
        try:
            return self._slice(key)[block] if block else self._files[self._file_of[key]].get_tensor(key)
        except SafetensorError as error:
            raise LayoutError(f"{self.path / self._file_of[key]}: {key} cannot be read: {error}") from error

    def _slice(self, key: str) -> Any:
        return self._files[self._file_of[key]].get_slice(key)

    def _weight_map(self) -> Mapping[str, str]:
        """File name by key, from the index; without an index, from the one file."""
        if not (self.path / INDEX).is_file():
            if not (self.path / SINGLE).is_file():
                raise LayoutError(f"{self.path}: has neither {INDEX} nor {SINGLE}; other formats are not read")
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        names = self._json(self.path / INDEX).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise LayoutError(f"{self.path / INDEX}: has no weight_map")
        for key, name in names.items():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise LayoutError(
                    f"{self.path / INDEX}: weight_map[{key!r}] = {name!r}: must be a .safetensors file in this folder"
                )
        return names

    def _json(self, file: Path) -> dict[str, Any]:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise LayoutError(f"{file}: is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise LayoutError(f"{file}: must hold a JSON object")
        return content

    def _open(self, name: str) -> Any:
        file = self.path / name
        if not file.is_file():
            raise LayoutError(f"{file}: is missing, though {INDEX} names it")
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise LayoutError(f"{file}: is no whole safetensors file: {error}") from error

    def _check_index(self) -> None:
        """The index and the files' own headers must list the same keys."""
        for name, file in self._files.items():
            inside = set(file.keys())
            listed = {key for key, home in self._file_of.items() if home == name}
            if listed != inside:
                raise LayoutError(
                    f"{self.path / name}: does not hold what {INDEX} says; "
                    f"missing: {some(listed - inside)}; not listed: {some(inside - listed)}"
                )


def some(names: set[str], most: int = 20) -> str:
    shown = ", ".join(sorted(names)[:most]) or "none"
    return shown if len(names) <= most else f"{shown}, and {len(names) - most} more"

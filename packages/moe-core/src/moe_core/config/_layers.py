"""Files and `key.path=value` words, laid over each other; remembers which of them set each value, and where."""

import codecs
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moe_core.config._positions import KeyPath, key_positions
from moe_core.plugins import Problem
from moe_core.plugins.kinds import ARRAYS

Sources = dict[KeyPath, str]
"""Key path -> file:line:column, or the word, that set it last. Items of an array go by their number."""

Setter = Callable[[KeyPath], str]
"""What stands in `Sources` for a key path that a file, or a word, sets."""

_DEEPEST = 100
"""Tables and arrays in each other."""

_MARKS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),  # first, since UTF-16's mark begins one of them
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}


def read_layers(paths: Iterable[Path], words: Iterable[str]) -> tuple[dict[str, Any], Sources, list[Problem]]:
    """The merged table of all files and words, who set what, and what could not be read."""
    merged: dict[str, Any] = {}
    sources: Sources = {}
    problems: list[Problem] = []
    for path in paths:
        read = _read(path)
        if isinstance(read, Problem):
            problems.append(read)
        else:
            _merge(merged, read[0], (), read[1], sources)
    for word in words:
        problem = _apply(merged, word, sources)
        if problem is not None:
            problems.append(problem)
    return merged, sources, problems


def _read(path: Path) -> tuple[dict[str, Any], Setter] | Problem:
    """What a file says, and where each key stands in it. A mark of UTF-8 at its beginning is passed over."""
    try:
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
        reason = getattr(error, "strerror", None) or error
        return Problem(str(path), f"can't be read: {reason}", hint="give the path of a TOML file")
    if encoding := _other_encoding(data):
        return Problem(str(path), f"is in {encoding}, and TOML is UTF-8", hint="save the file as UTF-8")
    try:
        text = data.decode()
        table = tomllib.loads(text)
    except UnicodeDecodeError as error:
        before = data[: error.start].decode(errors="replace")
        place = f"{path}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        return Problem(place, f"is not UTF-8: byte 0x{data[error.start]:02x}", hint="save the file as UTF-8")
    except RecursionError:
        return Problem(str(path), "is nested too deeply to be read")
    except ValueError as error:  # of Python itself, where a number has thousands of digits
        told = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", str(error))
        if told is None:
            return Problem(str(path), f"is not TOML: {error}")
        return Problem(f"{path}:{told[2]}:{told[3]}", f"is not TOML: {told[1]}")
    if _is_deep(table):
        return Problem(str(path), "is nested too deeply to be read")
    positions = key_positions(text)
    return table, lambda key: ":".join(map(str, (path, *positions[key])))


def _is_deep(value: Any) -> bool:
    """Whether tables and arrays lie in each other more often than any config has them; without recursion."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return False
    return True


def _other_encoding(data: bytes) -> str | None:
    """UTF-32 or UTF-16, by the mark or by where the zeros of plain letters stand."""
    for encoding, marks in _MARKS.items():
        if data.startswith(marks):
            return encoding
    zeros = [sum(byte == 0 for byte in data[phase:4096:4]) for phase in range(4)]
    often = [count > len(data[:4096]) // 8 for count in zeros]
    return {3: "UTF-32", 2: "UTF-16"}.get(sum(often)) if data else None


def source_of(path: KeyPath, sources: Sources) -> str:
    """Who set the value at `path`, or the nearest table around it; "" for a default."""
    for length in range(len(path), 0, -1):
        if path[:length] in sources:
            return sources[path[:length]]
    return ""


def _merge(into: dict[str, Any], table: dict[str, Any], path: KeyPath, setter: Setter, sources: Sources) -> None:
    """Tables merge; anything else, arrays of tables included, replaces whole."""
    for key, value in table.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, here, setter, sources)
        else:
            _forget(here, sources)
            into[key] = value
            _record(value, here, setter, sources)


def _record(value: Any, path: KeyPath, setter: Setter, sources: Sources) -> None:
    sources[path] = setter(path)
    if isinstance(value, dict):
        for key, item in value.items():
            _record(item, (*path, key), setter, sources)
    elif isinstance(value, list):
        for position, item in enumerate(value):
            _record(item, (*path, str(position)), setter, sources)


def _forget(path: KeyPath, sources: Sources) -> None:
    for key in [key for key in sources if key[: len(path)] == path]:
        del sources[key]


def _apply(merged: dict[str, Any], word: str, sources: Sources) -> Problem | None:
    """Lay one `key.path=value` over `merged`; a problem if it names no place."""
    dotted, equals, text = word.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys) or len(keys) > _DEEPEST:
        return Problem(word, 'is not "key.path=value"', source="command line", hint="for example mesh.ep=2")
    label = f"command line {word!r}"
    if keys[0] in ARRAYS and keys[0] not in merged:
        # a word may address the tables that stand for an array where the files have none
        merged[keys[0]] = [{"type": name} for name in ARRAYS[keys[0]]]
    table: Any = merged
    path: KeyPath = ()
    for key in keys[:-1]:
        if isinstance(table, list):
            position = _position(table, key)
            if position is None:
                return Problem(dotted, f"no single table of this array has the type {key!r}", source=label,
                               hint=f"types: {', '.join(_types(table)) or 'none'}")  # fmt: skip
            path, table = (*path, str(position)), table[position]
        else:
            path = (*path, key)
            if key not in table:
                table[key], sources[path] = {}, label
            table = table[key]
        if not isinstance(table, (dict, list)):
            return Problem(dotted, f"{'.'.join(path)} is a value, not a table", source=label)
    if isinstance(table, list):
        return Problem(dotted, "names a table of an array, not a key in it", source=label)
    value = _parse(text)
    _merge(table, {keys[-1]: value}, path, lambda _: label, sources)
    return None


def _types(tables: list[Any]) -> list[str]:
    return [str(table.get("type")) for table in tables if isinstance(table, dict)]


def _position(tables: list[Any], name: str) -> int | None:
    hits = [i for i, table in enumerate(tables) if isinstance(table, dict) and table.get("type") == name]
    return hits[0] if len(hits) == 1 else None


def _parse(text: str) -> Any:
    """As TOML where it is one TOML value, else as a bare string: `model.preset=tiny` needs no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # a further line sets a key of its own
    return text if len(parsed) > 1 or _is_deep(parsed) else parsed["value"]

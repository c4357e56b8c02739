"""Files and `key.path=value` words, laid over each other; remembers which of them set each value."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_core.plugins import Problem
from moe_core.plugins.kinds import ARRAYS

Sources = dict[tuple[str, ...], str]
"""Key path -> the file or word that set it last. Items of an array go by their position."""


def read_layers(paths: Iterable[Path], words: Iterable[str]) -> tuple[dict[str, Any], Sources, list[Problem]]:
    """The merged table of all files and words, who set what, and what could not be read."""
    merged: dict[str, Any] = {}
    sources: Sources = {}
    problems: list[Problem] = []
    for path in paths:
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            problems.append(Problem(str(path), f"can't be read: {error.strerror}", hint="give the path of a TOML file"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            problems.append(Problem(str(path), f"is not TOML: {error}"))
        else:
            _merge(merged, table, (), str(path), sources)
    for word in words:
        problem = _apply(merged, word, sources)
        if problem is not None:
            problems.append(problem)
    return merged, sources, problems


def source_of(path: tuple[str, ...], sources: Sources) -> str:
    """Who set the value at `path`, or the nearest table around it; "" for a default."""
    for length in range(len(path), 0, -1):
        if path[:length] in sources:
            return sources[path[:length]]
    return ""


def _merge(into: dict[str, Any], table: dict[str, Any], path: tuple[str, ...], source: str, sources: Sources) -> None:
    """Tables merge; anything else, arrays of tables included, replaces whole."""
    for key, value in table.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, here, source, sources)
        else:
            _forget(here, sources)
            into[key] = value
            _record(value, here, source, sources)


def _record(value: Any, path: tuple[str, ...], source: str, sources: Sources) -> None:
    sources[path] = source
    if isinstance(value, dict):
        for key, item in value.items():
            _record(item, (*path, key), source, sources)
    elif isinstance(value, list):
        for position, item in enumerate(value):
            _record(item, (*path, str(position)), source, sources)


def _forget(path: tuple[str, ...], sources: Sources) -> None:
    for key in [key for key in sources if key[: len(path)] == path]:
        del sources[key]


def _apply(merged: dict[str, Any], word: str, sources: Sources) -> Problem | None:
    """Lay one `key.path=value` over `merged`; a problem if it names no place."""
    dotted, equals, text = word.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys):
        return Problem(word, 'is not "key.path=value"', source="command line", hint="for example mesh.ep=2")
    label = f"command line {word!r}"
    if keys[0] in ARRAYS and keys[0] not in merged:
        # a word may address the tables that stand for an array where the files have none
        merged[keys[0]] = [{"type": name} for name in ARRAYS[keys[0]]]
    table: Any = merged
    path: tuple[str, ...] = ()
    for key in keys[:-1]:
        if isinstance(table, list):
            position = _position(table, key)
            if position is None:
                return Problem(dotted, f"no single table of this array has the type {key!r}", source=label,
                               hint=f"types: {', '.join(_types(table)) or 'none'}")  # fmt: skip
            path, table = (*path, str(position)), table[position]
        else:
            path, table = (*path, key), table.setdefault(key, {})
        if not isinstance(table, (dict, list)):
            return Problem(dotted, f"{'.'.join(path)} is a value, not a table", source=label)
    if isinstance(table, list):
        return Problem(dotted, "names a table of an array, not a key in it", source=label)
    value = _parse(text)
    _merge(table, {keys[-1]: value}, path, label, sources)
    return None


def _types(tables: list[Any]) -> list[str]:
    return [str(table.get("type")) for table in tables if isinstance(table, dict)]


def _position(tables: list[Any], name: str) -> int | None:
    hits = [i for i, table in enumerate(tables) if isinstance(table, dict) and table.get("type") == name]
    return hits[0] if len(hits) == 1 else None


def _parse(text: str) -> Any:
    """As TOML where it is TOML, else as a bare string: `model.preset=tiny` needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text

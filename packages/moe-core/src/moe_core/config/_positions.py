"""Where each key of a TOML text stands, so that a problem can point at it."""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

KeyPath = tuple[str, ...]
Position = tuple[int, int]
"""Line and column, from 1."""

_CLOSING = ("]", "}", '"""', "'''")
"""What the last line of a statement of several lines has one of."""


def key_positions(text: str) -> dict[KeyPath, Position]:
    """Key path -> where it is set, for a text that `tomllib` reads; items of an array go by their number.

    TOML has no statement of several keys on one line, and each of its statements, alone, is TOML: a header, or a key
    with its value. So the parser itself finds where a statement ends, and which keys it sets.
    """
    positions: dict[KeyPath, Position] = {}
    table: KeyPath = ()
    sizes: dict[KeyPath, int] = {}
    for line, statement, parsed in _statements(text.replace("\r\n", "\n")):
        if statement.lstrip().startswith("["):
            table = _table(parsed, sizes)
            start = (line, len(statement) - len(statement.lstrip()) + 1)
            for length in range(1, len(table) + 1):
                positions.setdefault(table[:length], start)
        else:
            for path, place in _keys(parsed, table, line, statement):
                positions.setdefault(path, place)
    return positions


def _statements(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Of each the number of its first line, its text, and what it is parsed to; comments and empty lines are none."""
    lines = text.split("\n")
    start = 0
    while start < len(lines):
        end = start + 1
        if lines[start].strip() and not lines[start].lstrip().startswith("#"):
            while (parsed := _parsed("\n".join(lines[start:end]))) is None:
                end += 1
                while not any(closing in lines[end - 1] for closing in _CLOSING):
                    end += 1  # no statement of several lines ends here, and parsing each time would be slow
            yield start + 1, "\n".join(lines[start:end]), parsed
        start = end


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None  # it goes on in the next line


def _table(header: dict[str, Any], sizes: dict[KeyPath, int]) -> KeyPath:
    """The path of a parsed `[a.b]` or `[[a.b]]`; a name of an array stands for its last item. Counts the items."""
    path: KeyPath = ()
    below: Any = header
    while below:
        ((key, below),) = below.items()
        path = (*path, key)
        if isinstance(below, list):
            (below,) = below
            sizes[path] = sizes.get(path, 0) + 1
        if path in sizes:
            path = (*path, str(sizes[path] - 1))
    return path


def _keys(value: Any, path: KeyPath, line: int, statement: str) -> Iterator[tuple[KeyPath, Position]]:
    """The keys that a statement beginning in `line` sets, inline tables included, and items of its arrays."""
    first = (line, len(statement) - len(statement.lstrip()) + 1)
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key), _found(key, line, statement) or first
            yield from _keys(item, (*path, key), line, statement)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield (*path, str(number)), first
            yield from _keys(item, (*path, str(number)), line, statement)


def _found(key: str, line: int, statement: str) -> Position | None:
    """Where the text has `key` before an equals sign or a dot; None where that is not one place."""
    matches = list(re.finditer(rf"""(?<![\w"'-])["']?{re.escape(key)}["']?[ \t]*[=.]""", statement))
    if len(matches) != 1:
        return None
    before = statement[: matches[0].start()]
    return line + before.count("\n"), len(before) - before.rfind("\n")

"""Where each key of a TOML text stands, so that a problem can point at it; and dotted paths that name keys."""

import re
import tomllib
from bisect import bisect_right
from collections.abc import Iterable

KeyPath = tuple[str, ...]
Position = tuple[int, int]
"""Line and column, from 1."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"{3,5}' r"|'''(?:[^']|'(?!''))*'{3,5}" r'|"(?:[^"\\\n]|\\.)*"' r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}\n#]+")
"""A number, a date, true or false."""


def dotted(path: Iterable[str]) -> str:
    """The path as TOML writes it: `run."a.b".c`."""
    return ".".join(key if _BARE.fullmatch(key) else f'"{key}"' for key in path)


def undotted(key: str) -> KeyPath:
    """The path that `dotted` made this of."""
    return tuple(quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|([^."]+)', key))


def key_positions(text: str) -> dict[KeyPath, Position]:
    """Key path -> where it is first set, for a text that `tomllib` reads; items of an array go by their number."""
    return _Scanner(text).scan()


class _Scanner:
    """Reads keys, and passes over values: the text is known to be TOML."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]
        self._positions: dict[KeyPath, Position] = {}
        self._sizes: dict[KeyPath, int] = {}
        """Items of each array of tables so far."""

    def scan(self) -> dict[KeyPath, Position]:
        table: KeyPath = ()
        while self._skip() < len(self._text):
            table = self._header() if self._text[self._at] == "[" else self._pair(table)
        return self._positions

    def _skip(self, what: re.Pattern[str] = _BLANK) -> int:
        """Behind what stands here; the new place."""
        if (match := what.match(self._text, self._at)) is not None:
            self._at = match.end()
        return self._at

    def _note(self, path: KeyPath, place: int) -> None:
        line = bisect_right(self._lines, place)
        self._positions.setdefault(path, (line, place - self._lines[line - 1] + 1))

    def _header(self) -> KeyPath:
        """Of `[a.b]` or `[[a.b]]` the path; a name of an array stands for its last item."""
        start, brackets = self._at, 2 if self._text.startswith("[[", self._at) else 1
        self._at += brackets
        keys = [key for key, _ in self._keys()]
        path: KeyPath = ()
        for number, key in enumerate(keys, start=1):
            path = (*path, key)
            self._note(path, start)
            if brackets == 2 and number == len(keys):
                self._sizes[path] = self._sizes.get(path, 0) + 1
            if path in self._sizes:
                path = (*path, str(self._sizes[path] - 1))
                self._note(path, start)
        self._at += brackets
        return path

    def _pair(self, table: KeyPath) -> KeyPath:
        """Passes over `key = value` in `table`, which it returns."""
        path = table
        for key, place in self._keys():
            path = (*path, key)
            self._note(path, place)
        self._at += 1  # the equals sign
        self._value(path)
        return table

    def _keys(self) -> list[tuple[str, int]]:
        """The parts of the dotted key that stands here, each with its place."""
        keys = []
        while True:
            place = self._skip()
            quoted = self._text[place] in "\"'"
            word = self._text[place : self._skip(_STRING if quoted else _BARE)]
            keys.append((next(iter(tomllib.loads(f"{word} = 0"))) if quoted else word, place))
            if self._text[self._skip()] != ".":
                return keys
            self._at += 1

    def _value(self, path: KeyPath) -> None:
        opening = self._text[self._skip()]
        if opening not in "[{":
            self._skip(_STRING if opening in "\"'" else _SCALAR)
            return
        self._at += 1
        number = 0
        while self._text[self._skip()] not in "]}":
            if opening == "{":
                self._pair(path)
            else:
                self._note((*path, str(number)), self._at)
                self._value((*path, str(number)))
            number += 1
            if self._text[self._skip()] == ",":
                self._at += 1
        self._at += 1

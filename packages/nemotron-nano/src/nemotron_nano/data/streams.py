"""A corpus as runs of token ids, whatever it was read from. NumPy, no torch."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, overload

import attrs
import numpy as np

Tokens = np.ndarray[tuple[int], np.dtype[np.integer[Any]]]


class CorpusError(ValueError):
    """A file or folder that does not hold what training needs."""


@attrs.frozen
class Shifted(Sequence[int]):
    """`base[first:last] - shift`, without a copy of what may have a billion items in a file."""

    base: Sequence[int] = attrs.field(repr=False)
    first: int
    last: int
    shift: int

    def __len__(self) -> int:
        return self.last - self.first

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return int(self.base[self.first + index]) - self.shift


@attrs.frozen(eq=False)
class Stream:
    """Documents one behind the other."""

    name: str
    """For messages: the file, or what the folder is called."""
    tokens: Tokens = attrs.field(repr=False)
    """[N] of any integer dtype, most often in a memory-mapped file."""
    starts: Sequence[int] = attrs.field(repr=False)
    """Where each document begins, ascending; empty where that is not known."""
    first_document: int = 0
    """The number, in the file, of the first one here."""

    def __len__(self) -> int:
        return len(self.tokens)

    def documents_of(self, first: int, last: int) -> list[int]:
        """For each token of `first:last`, the number of its document, counted from 1."""
        document = bisect_right(self.starts, first)
        numbers: list[int] = []
        while len(numbers) < last - first:
            end = self.starts[document] if document < len(self.starts) else last
            numbers += [document] * (min(end, last) - first - len(numbers))
            document += 1
        return numbers

    def where(self, offset: int) -> str:
        """The document that has the token at `offset`, for a message."""
        if not len(self.starts):
            return f"{self.name}, token {offset}"
        return f"{self.name}, document {self.first_document + bisect_right(self.starts, offset) - 1}"

    def split(self, fraction: float) -> tuple["Stream", "Stream"]:
        """The documents before, and the last `fraction` of them, at least one on each side.

        Raises:
            CorpusError: there are fewer than two documents, or where they begin is not known.
        """
        count = len(self.starts)
        if count < 2:
            raise CorpusError(
                f"{self.name}: has {count or 'no known'} documents, of which none can be set apart for validation; "
                "name other files in data.validation_files"
            )
        cut = min(count - 1, max(1, round(count * (1 - fraction))))
        offset = self.starts[cut]
        before = Stream(self.name, self.tokens[:offset], Shifted(self.starts, 0, cut, 0), self.first_document)
        after = Shifted(self.starts, cut, count, offset)
        return before, Stream(self.name, self.tokens[offset:], after, self.first_document + cut)

"""Which row comes when: shuffles and mixtures of corpora as functions of the row's number in the run.

Nothing is stored but the seed, so any row is found at once, under any number of ranks, and a run that resumes goes on
where it was.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

_BLOCK = 64
"""Rows in which the shares of a mixture are kept, to one row."""

_ROUNDS = 6
_MASK = 2**64 - 1


def shuffled(position: int, size: int, key: int) -> int:
    """Where `position` goes under a permutation of range(size) that `key` chooses; no table is made of it.

    A Feistel network over the next power of four, walked until it comes back into the range (Black and Rogaway, 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mixed(right + (number << 48) ^ key) & mask)
        position = left << half | right
        if position < size:
            return position


def _mixed(number: int) -> int:
    """All bits of the result depend on all of `number` (the finaliser of SplitMix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31


def _key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = _mixed(key ^ part & _MASK)
    return key


class Mixture:
    """Rows drawn from several corpora in given shares, each corpus read once before it is read again.

    Args:
        sizes: the number of rows of each.
        weights: their shares, to any sum; None: in proportion to the sizes.

    After any multiple of 64 rows of the run, each corpus has its share of them to less than one row.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None, seed: int) -> None:
        shares = list(sizes if weights is None else weights)
        total = sum(shares)
        self._sizes, self._seed = sizes, seed
        self._ends = [end / total for end in accumulate(shares)][:-1]

    def row(self, number: int) -> tuple[int, int]:
        """(corpus, row of it) that stands at place `number` of the run."""
        if len(self._sizes) == 1:
            return 0, self._nth(0, number)
        block, position = divmod(number, _BLOCK)
        position = shuffled(position, _BLOCK, _key(self._seed, -1, block))
        before, after = self._counts(block), self._counts(block + 1)
        for corpus, (drawn, then) in enumerate(zip(before, after, strict=True)):
            if position < then - drawn:
                return corpus, self._nth(corpus, drawn + position)
            position -= then - drawn
        raise AssertionError("the counts of a block add up to it")

    def _counts(self, blocks: int) -> list[int]:
        """How many rows of each corpus the first `blocks` blocks have."""
        ends = [0, *(int(blocks * _BLOCK * end) for end in self._ends), blocks * _BLOCK]
        return [end - start for start, end in pairwise(ends)]

    def _nth(self, corpus: int, number: int) -> int:
        epoch, position = divmod(number, self._sizes[corpus])
        return shuffled(position, self._sizes[corpus], _key(self._seed, corpus, epoch))

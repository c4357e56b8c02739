"""Which row comes when: permutations without a table, and shares of several corpora."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron_nano.data.sampling import Mixture, shuffled


@given(size=st.integers(1, 600), key=st.integers(0, 2**64 - 1))
def test_a_shuffle_is_a_permutation(size, key):
    assert sorted(shuffled(position, size, key) for position in range(size)) == list(range(size))


def test_shuffles_look_random():
    """First places are spread evenly over the range, neighbours are not kept, keys differ."""
    size = 1000
    firsts = Counter(shuffled(0, size, key) // 100 for key in range(2000))
    assert all(140 < firsts[decile] < 260 for decile in range(10))
    order = [shuffled(position, size, 7) for position in range(size)]
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 10
    assert order != [shuffled(position, size, 8) for position in range(size)]


def test_a_billion_documents_are_shuffled_without_a_table():
    size = 10**9
    places = [shuffled(position, size, 3) for position in range(5000)]
    assert len(set(places)) == 5000
    assert all(0 <= place < size for place in places)
    assert abs(sum(places) / 5000 - size / 2) < size * 0.02


SIZES, WEIGHTS = [1000, 50, 7], [0.7, 0.299, 0.001]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_corpus_has_its_share_of_every_stretch(seed):
    mixture = Mixture(SIZES, WEIGHTS, seed)
    corpora = [mixture.row(number)[0] for number in range(64 * 400)]
    for start in (0, 64 * 13, 5000):
        for rows in (64 * 20, 10_000, 20_000):
            counts = Counter(corpora[start : start + rows])
            for corpus, weight in enumerate(WEIGHTS):
                assert abs(counts[corpus] / rows - weight) < 0.01
    counts = Counter(corpora[: 64 * 400])
    assert all(abs(counts[corpus] - 64 * 400 * weight) < 1 for corpus, weight in enumerate(WEIGHTS))


@pytest.mark.parametrize(("sizes", "weights"), [(SIZES, WEIGHTS), ([100], None), ([5, 9], None), ([70, 30], [1, 3])])
def test_a_corpus_is_read_once_before_it_is_read_again(sizes, weights):
    mixture = Mixture(sizes, weights, seed=4)
    drawn = {corpus: [] for corpus in range(len(sizes))}
    for number in range(64 * 60):
        corpus, row = mixture.row(number)
        drawn[corpus].append(row)
    for corpus, size in enumerate(sizes):
        # within a block of 64 the order is shuffled too, so that the end of one reading may stand behind the next
        counts = Counter(drawn[corpus])
        readings = len(drawn[corpus]) / size
        assert all(readings - 2 < counts[row] < readings + 2 for row in range(size))
        if len(sizes) == 1:
            assert sorted(drawn[0][:size]) == sorted(drawn[0][size : 2 * size]) == list(range(size))


def test_any_row_is_found_without_those_before_it():
    one, other = Mixture(SIZES, WEIGHTS, 5), Mixture(SIZES, WEIGHTS, 5)
    assert other.row(10**12) == one.row(10**12)
    assert [one.row(n) for n in (7, 3, 7)] == [other.row(7), other.row(3), other.row(7)]

"""Files of token ids as others write them, and damaged ones."""

import os
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron_nano.data import token_files
from nemotron_nano.data.streams import CorpusError
from nemotron_nano.data.token_files import open_tokens, write_index

DOCUMENTS = [[5, 6, 7], [1], [], [65000, 2, 3, 4], [9, 9]]
CODES = {"u1": 1, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}


def megatron(path, documents, dtype="<u2", sequences_of=lambda document: [document]):
    """As megatron.core.datasets.indexed_dataset's builder: sequences, and documents that end behind them."""
    data, index = (path.with_name(f"{path.name.removesuffix('.bin')}{end}") for end in (".bin", ".idx"))
    item = np.dtype(dtype).itemsize
    sequences, ends = [], [0]
    for document in documents:
        sequences += sequences_of(document)
        ends.append(len(sequences))
    lengths = [len(sequence) for sequence in sequences]
    places = [sum(lengths[:i]) * item for i in range(len(lengths))]
    data.write_bytes(b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences))
    index.write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(ends))
        + struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(places)}q", *places)
        + struct.pack(f"<{len(ends)}q", *ends)
    )  # fmt: skip
    return data


def pbin(path, documents, item=2, index=None):
    """As modalities.dataloader.create_packed_data.PackedDataGenerator."""
    data = b"".join(token.to_bytes(item, "little") for document in documents for token in document)
    if index is None:
        lengths = [len(document) * item for document in documents]
        index = [(sum(lengths[:i]), length) for i, length in enumerate(lengths)]
    content = index if isinstance(index, bytes) else pickle.dumps(index)
    path.write_bytes(len(data).to_bytes(8, "little") + item.to_bytes(4, "little") + data + content)
    return path


def check(stream, documents):
    flat = [token for document in documents for token in document]
    assert stream.tokens.tolist() == flat
    assert len(stream) == len(flat)
    numbers = stream.documents_of(0, len(flat))
    found = [[t for t, n in zip(flat, numbers, strict=True) if n == number] for number in dict.fromkeys(numbers)]
    assert found == [document for document in documents if document]


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8"])
@pytest.mark.parametrize("suffix", [".bin", ".idx", ""])
def test_megatrons_pair_by_any_of_its_names(tmp_path, dtype, suffix):
    for name in ("corpus", "corpus.v1"):
        megatron(tmp_path / name, DOCUMENTS, dtype)
        check(open_tokens(tmp_path / f"{name}{suffix}"), DOCUMENTS)


def test_documents_of_several_sequences_and_empty_ones_at_the_end(tmp_path):
    halves = lambda document: [document[:2], document[2:]] if document else []  # noqa: E731
    check(open_tokens(megatron(tmp_path / "halves", [*DOCUMENTS, [], []], sequences_of=halves)), DOCUMENTS)


@given(documents=st.lists(st.lists(st.integers(0, 70000), max_size=5), min_size=1), at_once=st.integers(1, 4))
def test_what_is_written_is_read(tmp_path_factory, documents, at_once):
    path = tmp_path_factory.mktemp("written") / "x.bin"
    if not any(documents):
        documents.append([1])
    path.write_bytes(np.array([token for document in documents for token in document], "<i4").tobytes())
    write_index(path.with_suffix(".idx"), np.dtype("<i4"), [len(document) for document in documents], at_once)
    check(open_tokens(path), documents)
    own = path.with_suffix(".idx").read_bytes()
    megatron(path, documents, "<i4")
    assert path.with_suffix(".idx").read_bytes() == own  # byte for byte


@pytest.mark.parametrize(("item", "largest"), [(1, 255), (2, 65000), (4, 100_000)])
def test_modalities_files(tmp_path, item, largest):
    documents = [[token % (largest + 1) for token in document] for document in [*DOCUMENTS, [largest]]]
    check(open_tokens(pbin(tmp_path / "corpus.pbin", documents, item)), documents)
    check(open_tokens(pbin(tmp_path / "of_any_name.bin", documents, item)), documents)


def test_bare_ids(tmp_path):
    path = tmp_path / "train.bin"
    np.array([1, 2, 65535], "<u2").tofile(path)  # as nanoGPT's prepare.py
    stream = open_tokens(path)
    assert (stream.tokens.tolist(), len(stream.starts)) == ([1, 2, 65535], 0)
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 3
    path.write_bytes(header.tobytes() + np.array([1, 2, 3], "<u2").tobytes())  # as llm.c's
    assert open_tokens(path).tokens.tolist() == [1, 2, 3]


def test_a_corpus_of_more_ids_than_32_bits_count_takes_no_memory(tmp_path):
    count = 2**31 + 10
    path = tmp_path / "sparse.bin"
    with path.open("wb") as file:
        file.truncate(2 * count)
        file.seek(2 * (count - 3))
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    write_index(path.with_suffix(".idx"), np.dtype("<u2"), [2**30, 2**30, 7, 3])
    stream = open_tokens(path)
    assert len(stream) == count
    assert stream.tokens[-3:].tolist() == [7, 8, 9]
    assert stream.documents_of(count - 4, count) == [3, 4, 4, 4]
    training, validation = stream.split(0.25)
    assert (len(training), validation.tokens.tolist()) == (count - 3, [7, 8, 9])
    assert validation.where(1).endswith("document 3")


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def truncate(path, by):
    path.write_bytes(path.read_bytes()[:-by])


def replaced(path, offset, value):
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(data)


def of_megatron(harm):
    """A pair of files, and what is done to its index."""

    def make(folder):
        data = megatron(folder / "a", DOCUMENTS)
        harm(data.with_suffix(".idx"))
        return data

    return make


def of_modalities(index=None, by=0):
    def make(folder):
        path = pbin(folder / "x.pbin", DOCUMENTS, index=index(folder) if callable(index) else index)
        if by:
            truncate(path, by)
        return path

    return make


def short_ids(folder):
    data = megatron(folder / "a", DOCUMENTS)
    truncate(data, 2)
    return data


def odd_ids(folder):
    (folder / "odd.bin").write_bytes(b"abc")
    return folder / "odd.bin"


NO_NUMBERS = "is no list of pairs of whole numbers"
HARMS = {
    "nothing": (lambda folder: folder / "absent.bin", "there is no such file"),
    "empty": (lambda folder: empty(folder / "empty.bin"), "is empty"),
    "an index cut off": (of_megatron(lambda index: truncate(index, 3)), "is cut off: 5 sequences need"),
    "an index of a few bytes": (of_megatron(lambda index: index.write_bytes(b"MMI")), "is no index of Megatron's"),
    "another magic": (of_megatron(lambda index: replaced(index, 0, b"TNTIDX")), "is no index of Megatron's"),
    "another version": (of_megatron(lambda index: replaced(index, 9, b"\x02")), "version 2, dtype code 8"),
    "floats": (of_megatron(lambda index: replaced(index, 17, b"\x07")), "version 1, dtype code 7"),
    "a gap": (of_megatron(lambda index: replaced(index, 38, b"\x03")), "do not lie one behind the other"),
    "ids cut off": (short_ids, "is shorter than its index says: 20 bytes, there are 18"),
    "no token": (lambda folder: megatron(folder / "a", [[], []]), "holds no token"),
    "an odd size": (odd_ids, "3 bytes are no uint16 ids"),
    "pbin: code": (of_modalities(lambda folder: [Bomb(folder / "harm")]), "it names posix.mkdir, and an index is"),
    "pbin: words": (of_modalities([("a", 2)]), NO_NUMBERS),
    "pbin: booleans": (of_modalities([(False, 20)]), NO_NUMBERS),
    "pbin: a dict": (of_modalities({0: 2}), NO_NUMBERS),
    "pbin: a gap": (of_modalities([(0, 6), (8, 2)]), "document 1 is said to lie at 8 with 2 bytes, expected at 6"),
    "pbin: too few": (of_modalities([(0, 6)]), "its documents have 6 bytes, its ids 20"),
    "pbin: cut off": (of_modalities(by=4), "its index cannot be read"),
    "pbin: no index": (of_modalities(b""), "is no whole .pbin"),
}


def empty(path):
    path.touch()
    return path


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_file_is_refused_with_what_is_wrong_and_nothing_in_it_is_run(tmp_path, harm):
    make, words = HARMS[harm]
    with pytest.raises(CorpusError) as caught:
        open_tokens(make(tmp_path))
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "harm").exists()


def test_the_check_of_places_goes_over_its_own_borders(tmp_path):
    lengths = np.array([3, 1, 0, 4, 2], "<i4")
    places = np.array([0, 6, 8, 8, 16])
    for at_once in range(1, 7):
        assert token_files._are_consecutive(lengths, places, 2, at_once)
        for harmed in range(1, 5):
            wrong = places.copy()
            wrong[harmed] += 2
            assert not token_files._are_consecutive(lengths, wrong, 2, at_once)

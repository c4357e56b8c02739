"""Text as batches: split by file, the same global batch under every layout, nothing counted twice."""

import math
from collections import Counter

import pytest
import torch

from nemotron_nano.data.components import _of_bytes
from nemotron_nano.data.rows import RowData
from nemotron_nano.data.streams import CorpusError
from nemotron_nano.data.text import python_stdlib, read_corpus, text_folder


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(3)
    for number in range(40):
        content = torch.randint(32, 127, (17 + 13 * number,), generator=generator)
        path = tmp_path / f"d{number % 3}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(content.tolist()))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"not text")
    return tmp_path


def _data(corpus, dp_rank=0, dp_size=1, **changes):
    options = {
        "sequence_length": 16,
        "global_batch_size": 8,
        "microbatches": 1,
        "validation_sequences": 10,
        "isolate_documents": False,
        "seed": 5,
    }
    return RowData(
        _of_bytes(corpus), **{**options, **changes}, dp_rank=dp_rank, dp_size=dp_size, device=torch.device("cpu")
    )


def text_of(stream):
    return stream.tokens.tobytes()


def test_files_keep_their_side_when_others_come_and_go(folder):
    before = text_folder(folder, (".txt",), 0.3)
    (folder / "d0" / "another.txt").write_text("one more document")
    after = text_folder(folder, (".txt",), 0.3)
    assert before.digest != after.digest
    grown = (
        len(text_of(after.training))
        + len(text_of(after.validation))
        - len(text_of(before.training))
        - len(text_of(before.validation))
    )
    assert grown == len("one more document")
    unchanged = text_of(before.validation) == text_of(after.validation) or text_of(before.training) == text_of(
        after.training
    )
    assert unchanged


def test_only_the_asked_suffixes_are_read_and_every_byte_of_them_once(folder):
    corpus = text_folder(folder, (".txt",), 0.3)
    total = sum(path.stat().st_size for path in folder.rglob("*.txt"))
    assert len(text_of(corpus.training)) + len(text_of(corpus.validation)) == total
    assert len(corpus.training.starts) + len(corpus.validation.starts) == 40


def test_the_digest_sees_names_and_contents(folder):
    digest = text_folder(folder, (".txt",), 0.3).digest
    assert text_folder(folder, (".txt",), 0.3).digest == digest
    path = folder / "d0" / "0.txt"
    path.write_bytes(path.read_bytes()[::-1])
    assert text_folder(folder, (".txt",), 0.3).digest != digest


def test_the_standard_library_is_there_without_its_tests():
    corpus = python_stdlib()
    assert b"class JSONDecoder" in text_of(corpus.training) + text_of(corpus.validation)
    assert len(text_of(corpus.training)) > 5_000_000
    share = len(text_of(corpus.validation)) / len(text_of(corpus.training))
    assert 0.01 < share < 0.12
    assert python_stdlib().digest == corpus.digest


def test_labels_are_the_bytes_after_the_tokens(folder):
    corpus = text_folder(folder, (".txt",), 0.3)
    (batch,) = _data(corpus).train_batches(3)
    assert batch.tokens.shape == batch.labels.shape == (8, 16)
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        assert bytes([*tokens, labels[-1]]) in text_of(corpus.training)


@pytest.mark.parametrize(("dp_size", "microbatches"), [(2, 1), (4, 1), (2, 2), (1, 4)])
def test_the_global_batch_is_the_same_under_every_layout(folder, dp_size, microbatches):
    corpus = text_folder(folder, (".txt",), 0.3)
    for step in (0, 1, 40):
        (whole,) = _data(corpus).train_batches(step)
        parts = [
            batch.tokens
            for rank in range(dp_size)
            for batch in _data(corpus, rank, dp_size, microbatches=microbatches).train_batches(step)
        ]
        assert len(parts) == dp_size * microbatches
        assert torch.equal(torch.cat(parts), whole.tokens)


def test_an_epoch_reads_every_row_once_and_the_next_in_another_order(folder):
    corpus = text_folder(folder, (".txt",), 0.3)
    rows = (len(text_of(corpus.training)) - 1) // 16
    data = _data(corpus, global_batch_size=1)
    first = [bytes(data.train_batches(step)[0].tokens[0].tolist()) for step in range(rows)]
    second = [bytes(data.train_batches(step)[0].tokens[0].tolist()) for step in range(rows, 2 * rows)]
    assert (
        Counter(first)
        == Counter(second)
        == Counter(text_of(corpus.training)[i * 16 : i * 16 + 16] for i in range(rows))
    )
    assert first != second


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
def test_validation_has_as_many_batches_on_every_rank_and_each_row_once(folder, dp_size):
    corpus = text_folder(folder, (".txt",), 0.3)
    ranks = [_data(corpus, rank, dp_size, global_batch_size=dp_size * 4) for rank in range(dp_size)]
    shares = [data.validation_batches() for data in ranks]
    assert len({len(share) for share in shares}) == 1
    labels = torch.cat([batch.labels for share in shares for batch in share])
    padding = (labels == -100).all(1)
    text = text_of(corpus.validation)
    rows = (len(text) - 1) // 16
    numbers = [i * rows // 10 for i in range(10)]
    assert labels[~padding].tolist() == [list(text[number * 16 + 1 : number * 16 + 17]) for number in numbers]
    kept = labels[~padding]
    # the entropy is that of exactly these bytes
    counts = Counter(kept.flatten().tolist())
    entropy = -sum(n / kept.numel() * math.log2(n / kept.numel()) for n in counts.values())
    assert ranks[0].describe()["byte_entropy_bits"] == pytest.approx(entropy)


def test_isolated_documents_are_numbered_and_nothing_is_predicted_across(folder):
    corpus = text_folder(folder, (".txt",), 0.3)
    (batch,) = _data(corpus, isolate_documents=True).train_batches(0)
    starts = set(corpus.training.starts)
    for tokens, labels, documents in zip(*(part.tolist() for part in batch), strict=True):
        offset = text_of(corpus.training).find(bytes(tokens))
        for position, document in enumerate(documents):
            expected = sum(1 for start in starts if start <= offset + position)
            assert document == expected
            assert (labels[position] == -100) == (offset + position + 1 in starts)


def test_a_folder_that_gives_no_validation_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(CorpusError, match="no file for"):
        text_folder(tmp_path, (".txt",), 0.5)
    with pytest.raises(CorpusError, match="must be a folder"):
        text_folder(tmp_path / "absent", (".txt",), 0.5)


def test_a_text_shorter_than_a_row_is_refused(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text("ab")
    corpus = read_corpus("short", tmp_path, tmp_path.glob("*.txt"), 0.3)
    with pytest.raises(CorpusError, match="fewer than one row"):
        _data(corpus, sequence_length=100)

"""Text to files of token ids: every format, in order, whatever the number of processes; damage named; resumed."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import attrs
import numpy as np
import pytest

from nemotron_nano.cli import main
from nemotron_nano.data import documents
from nemotron_nano.data import prepare as prepare_module
from nemotron_nano.data.prepare import Work, prepare, verify
from nemotron_nano.data.streams import CorpusError
from nemotron_nano.data.token_files import open_tokens
from nemotron_nano.data.tokenizer import load_tokenizer

TEXTS = [
    "def add(a, b):\n    return a + b\n", "Überall Füße: 日本語 🙂", "", "a", "line\u2028separator\tand \"quotes\"",
    *(f"number {n} " * (n % 7 + 1) for n in range(300)),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level BPE in a folder of its own, with an end token that only its config names."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<pad>", "<fin>"], initial_alphabet=alphabet)
    rust.train_from_iterator(TEXTS, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<fin>"}')
    return folder


def jsonl(path, texts=TEXTS, field="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(texts)))
    return path


def expected(tokenizer, texts=TEXTS):
    loaded = load_tokenizer(str(tokenizer))
    return [[*loaded.encode([text])[0], loaded.end] for text in texts if text]


def found(path):
    stream = open_tokens(path)
    starts = [*stream.starts, len(stream)]
    return [stream.tokens[a:b].tolist() for a, b in pairwise(starts)]


def as_gzip(tmp_path):
    path = tmp_path / "corpus.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.write(jsonl(tmp_path / "plain").read_bytes())
    return path


def as_zstandard(tmp_path):
    import zstandard

    content = jsonl(tmp_path / "plain").read_bytes()
    half = len(content) // 2  # two frames, as compressed parts that were joined have
    packed = b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:]))
    (tmp_path / "corpus.jsonl.zst").write_bytes(packed)
    return tmp_path / "corpus.jsonl.zst"


def as_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), tmp_path / "c.parquet", row_group_size=37)
    return tmp_path / "c.parquet"


def as_dataset(tmp_path):
    import datasets

    splits = {"train": TEXTS[:200], "test": TEXTS[200:]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()})
    saved.save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def as_folder(tmp_path):
    for number, text in enumerate(TEXTS):
        path = tmp_path / "folder" / f"{number // 100}" / f"{number:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "folder" / "picture.png").write_bytes(b"\xff")
    return tmp_path / "folder"


def as_lines(tmp_path):
    return jsonl(tmp_path / "corpus.jsonl")


@pytest.mark.parametrize("make", [as_lines, as_gzip, as_zstandard, as_parquet, as_dataset, as_folder])
def test_every_format_gives_the_ids_of_its_documents_in_order(tmp_path, tokenizer, make):
    work = Work((make(tmp_path),), str(tokenizer))
    done = prepare(tmp_path / "out", work)
    assert found(tmp_path / "out") == expected(tokenizer)
    assert done.documents == len(TEXTS) - 1
    assert done.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert verify(tmp_path / "out", work) == done.documents
    kept = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(("out", ".out")))
    assert kept == ["out.bin", "out.idx", "out.json", "out.tokenizer.json"]
    record = json.loads((tmp_path / "out.json").read_text())
    assert (record["documents"], record["tokenizer"]["end"]) == (done.documents, 1)


def test_bytes_need_no_tokenizer_and_have_no_end(tmp_path):
    prepare(tmp_path / "out", Work((jsonl(tmp_path / "c.jsonl"),), "bytes"))
    assert found(tmp_path / "out") == [list(text.encode()) for text in TEXTS if text]
    assert not (tmp_path / "out.tokenizer.json").exists()


def test_several_processes_write_the_same_files(tmp_path, tokenizer):
    inputs = tuple(jsonl(tmp_path / f"{n}.jsonl", TEXTS * 6) for n in range(3))
    for workers in (1, 2):
        work = Work(inputs, str(tokenizer), workers=workers)
        prepare(tmp_path / f"out{workers}", work)
    for end in ("bin", "idx", "json"):
        assert (tmp_path / f"out1.{end}").read_bytes() == (tmp_path / f"out2.{end}").read_bytes()
    assert verify(tmp_path / "out1", work) == 3 * 6 * (len(TEXTS) - 1)


def test_the_end_of_a_document_is_asked_for_where_it_is_not_known(tmp_path, tokenizer):
    path = jsonl(tmp_path / "c.jsonl", ["a"])
    alone = tmp_path / "alone.json"
    alone.write_bytes((tokenizer / "tokenizer.json").read_bytes())
    with pytest.raises(CorpusError, match="no token that is known to end a document; name one with --end TOKEN"):
        prepare(tmp_path / "out", Work((path,), str(alone)))
    with pytest.raises(CorpusError, match="has no token '<end>' to end documents with"):
        prepare(tmp_path / "out", Work((path,), str(alone), end="<end>"))
    prepare(tmp_path / "named", Work((path,), str(alone), end="<pad>"))
    prepare(tmp_path / "none", Work((path,), str(alone), end="none"))
    (ids,) = load_tokenizer(str(alone)).encode(["a"])
    assert (found(tmp_path / "named"), found(tmp_path / "none")) == ([[*ids, 0]], [[*ids]])
    with pytest.raises(CorpusError, match="'bytes' has no token '</s>'"):
        prepare(tmp_path / "out", Work((path,), "bytes", end="</s>"))


BAD = {
    b"{": "is no JSON: ",
    b'{"text": "\xff"}': "is not UTF-8 at byte 10",
    b'{"body": "x"}': "has no field 'text'",
    b'{"text": null}': "its 'text' is null, not text",
    b'{"text": 3}': "its 'text' is int, not text",
    b'["text"]': "is a list, not an object with the field 'text'",
    b'{"text": "\\ud800"}': "its 'text' has half a surrogate pair at character 0",
    b"[" * 100_000: "is no JSON: ",
    b'{"text": "' + b"y" * 500 + b'"}': "is longer than 200 bytes",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:12].decode(errors="replace"))
@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_document_stops_or_is_left_out_and_is_always_named(tmp_path, line, workers, monkeypatch):
    if len(line) == 512 or line.startswith(b"[["):
        monkeypatch.setattr(documents, "LONGEST_LINE", 200 if b"y" in line else 2**28)
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}')
    work = Work((path,), "bytes", workers=workers)
    with pytest.raises(CorpusError) as caught:
        prepare(tmp_path / "out", work)
    assert f"{path}:3: {BAD[line]}" in str(caught.value)
    assert "--on-bad-line skip" in str(caught.value)
    done = prepare(tmp_path / "out", attrs.evolve(work, on_bad_line="skip"))
    assert (done.documents, done.bad) == (2, 1)
    assert found(tmp_path / "out") == [list(b"one"), list(b"two")]
    assert (tmp_path / "out.bad.txt").read_text().startswith(f"{path}:3: {BAD[line]}")
    assert verify(tmp_path / "out", work) == 2


def test_a_giant_line_within_the_limit_is_a_document(tmp_path):
    text = "word " * 3_000_000
    prepare(tmp_path / "out", Work((jsonl(tmp_path / "c.jsonl", ["a", text, "b"]),), "bytes"))
    assert [len(document) for document in found(tmp_path / "out")] == [1, len(text), 1]


def test_what_holds_nothing_or_is_not_there(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "thing.xyz").touch()
    for name, words in (
        ("empty.jsonl", "holds no text; 0 documents are damaged"),
        ("nothing", "holds no file of a known format (.jsonl"),
        ("thing.xyz", "is of no known format (.jsonl"),
        ("absent", "there is no such file or folder"),
    ):
        with pytest.raises(CorpusError) as caught:
            prepare(tmp_path / "out", Work((tmp_path / name,), "bytes"))
        assert words in str(caught.value)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 9)[:-9])
    with pytest.raises(CorpusError, match=r"c\.jsonl\.gz: cannot be read behind line 9: "):
        prepare(tmp_path / "out", Work((tmp_path / "c.jsonl.gz",), "bytes"))
    with pytest.raises(CorpusError, match="there is no such tokenizer"):
        prepare(tmp_path / "out", Work((jsonl(tmp_path / "c.jsonl"),), str(tmp_path / "tokenizer.json")))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"is no tokenizer\.json"):
        prepare(tmp_path / "out", Work((jsonl(tmp_path / "c.jsonl"),), str(tmp_path / "tokenizer.json")))


def test_a_column_that_is_not_there(tmp_path):
    with pytest.raises(CorpusError, match=r"has no column 'body'; there are: id, text"):
        prepare(tmp_path / "out", Work((as_parquet(tmp_path),), "bytes", field="body"))


def test_a_field_inside_of_another(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"meta": {"text": "deep"}}\n')
    prepare(tmp_path / "out", Work((path,), "bytes", field="meta.text"))
    assert found(tmp_path / "out") == [list(b"deep")]


@pytest.mark.parametrize("make", [as_lines, as_gzip, as_parquet, as_folder])
def test_an_interrupted_preparation_goes_on_where_it_was(tmp_path, tokenizer, make, monkeypatch):
    monkeypatch.setattr(prepare_module, "_DOCUMENTS", 20)
    work = Work((make(tmp_path), jsonl(tmp_path / "more.jsonl", TEXTS[:50])), str(tokenizer))
    encode, calls = prepare_module._encode, []

    def counted(*arguments):
        calls.append(len(calls))
        if len(calls) in stops:
            raise InterruptedError
        return encode(*arguments)

    monkeypatch.setattr(prepare_module, "_encode", counted)
    stops = ()
    whole = prepare(tmp_path / "whole", work)
    batches = len(calls)
    calls.clear()
    stops = (6, 11)
    for done in (5 * 20, 9 * 20):
        with pytest.raises(InterruptedError):
            prepare(tmp_path / "out", work)
        progress = json.loads((tmp_path / ".out.progress.partial").read_text())["progress"]
        assert done - 2 <= progress["documents"] <= done  # one of the first texts is empty
    assert prepare(tmp_path / "out", work) == whole
    assert len(calls) == batches + 2  # two were begun twice
    for end in ("bin", "idx"):
        assert (tmp_path / f"out.{end}").read_bytes() == (tmp_path / f"whole.{end}").read_bytes()


def test_other_work_under_the_same_name_starts_again(tmp_path):
    first, second = jsonl(tmp_path / "a.jsonl", ["one"] * 2000), jsonl(tmp_path / "b.jsonl", ["two"])

    def stop(done):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        prepare(tmp_path / "out", Work((first,), "bytes"), position=stop)
    prepare(tmp_path / "out", Work((second,), "bytes"))
    assert found(tmp_path / "out") == [list(b"two")]


def test_a_killed_preparation_goes_on(tmp_path, tokenizer):
    """As typed, with two processes and kill -9 in the middle."""
    texts = [f"{n} " + "some words to be tokenised " * 40 for n in range(20_000)]
    path = jsonl(tmp_path / "c.jsonl", texts)
    words = ["prepare", str(tmp_path / "out"), str(path), "--tokenizer", str(tokenizer), "--workers", "2"]
    code = "import sys; from nemotron_nano.data import prepare; from nemotron_nano.cli import command; "
    code += "prepare.prepare.__kwdefaults__['commit_seconds'] = 0.0; command()"
    with subprocess.Popen([sys.executable, "-c", code, *words], start_new_session=True) as process:
        progress = tmp_path / ".out.progress.partial"
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline:
            if progress.exists() and json.loads(progress.read_text())["progress"]["documents"] > 1000:
                break
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    before = json.loads(progress.read_text())["progress"]["documents"]
    assert 1000 < before < len(texts)
    assert main(words) == 0
    stream = open_tokens(tmp_path / "out")
    assert len(stream.starts) == len(texts)
    loaded = load_tokenizer(str(tokenizer))
    for number in (0, before - 1, before, len(texts) - 1):
        end = stream.starts[number + 1] if number + 1 < len(texts) else len(stream)
        ids = stream.tokens[stream.starts[number] : end - 1].tolist()
        assert loaded.decode(ids).decode() == texts[number]


def test_the_command_says_what_it_wrote_and_what_it_left_out(tmp_path, capsys):
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "one"}\n{\n')
    words = ["prepare", str(tmp_path / "out"), str(path), "--tokenizer", "bytes"]
    assert main(words) == 2
    assert f"{path}:2: is no JSON" in capsys.readouterr().err
    assert main([*words, "--on-bad-line", "skip", "--verify"]) == 0
    out, err = capsys.readouterr()
    assert f"{tmp_path}/out.bin: 1 documents, 3 tokens of 3 bytes of text\n" in out
    assert f"{tmp_path}/out.bin: all 1 documents are those of the inputs\n" in out
    assert f"1 damaged documents were left out; they are listed in {tmp_path}/out.bad.txt" in err
    assert main(words) == 2
    assert "exists; give another name" in capsys.readouterr().err
    path.write_text('{"text": "two"}\n')
    assert main([*words, "--verify"]) == 2  # nothing is written again
    assert f"documents 0 to 0 are not those of {path}:1 to {path}:1" in capsys.readouterr().err


def test_a_document_without_any_id_is_none(tmp_path, tokenizer):
    work = Work((jsonl(tmp_path / "c.jsonl", ["a", "", "b"]),), str(tokenizer))
    prepare(tmp_path / "out", work)
    assert len(found(tmp_path / "out")) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    peaks = []
    for count in (2_000, 40_000):
        path = jsonl(tmp_path / f"{count}.jsonl", ["some words " * 100] * count)
        code = (
            "from pathlib import Path; from nemotron_nano.data.prepare import Work, prepare; "
            f"prepare(Path({str(tmp_path / str(count))!r}), Work((Path({str(path)!r}),), 'bytes')); "
            "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] < peaks[0] + 5, peaks  # MiB, of 44 MB of text


def test_ids_are_small_where_the_vocabulary_is(tmp_path, tokenizer):
    prepare(tmp_path / "out", Work((jsonl(tmp_path / "c.jsonl"),), str(tokenizer)))
    assert open_tokens(tmp_path / "out").tokens.dtype == np.uint16

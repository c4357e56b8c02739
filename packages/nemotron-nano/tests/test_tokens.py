"""The data component `tokens`: ids of others' files as batches, checked against tokenizer and model before a step."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
import torch

from moe_core import load_config
from moe_core.plugins import ConfigError
from moe_core.testing import RankFailed, run_ranks
from nemotron_nano.data.components import TokenFileConfig
from nemotron_nano.data.prepare import Work, prepare
from nemotron_nano.data.rows import RowData
from nemotron_nano.data.token_files import write_index
from nemotron_nano.data.tokens import File, open_corpora

TEXTS = [f"the document number {n} has {n % 5} words " + "more " * (n % 5) for n in range(200)]


def corpus(path, documents):
    path.with_suffix(".bin").write_bytes(np.array([t for d in documents for t in d], "<u2").tobytes())
    write_index(path.with_suffix(".idx"), np.dtype("<u2"), [len(document) for document in documents])
    return str(path)


def prepared(folder, name="own"):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare(folder / name, Work((folder / f"{name}.jsonl",), "bytes"))
    return str(folder / name)


def toml_array(items):
    return json.dumps(items)


def build(words, world_size=1):
    """The data component of a config, with a mesh and a tiny model."""
    from nemotron_nano.train.assemble import assemble

    fixed = ["model.pattern=*", "tracker=[]", 'transform=[{type="fsdp"}]', "data.sequence_length=16"]
    return assemble(load_config((), [*fixed, "data.type=tokens", *words]), device_type="cpu").data


def batches_of_a_step(words, step):
    data = build(words)
    (batch,) = data.train_batches(step)
    return batch.tokens, batch.labels, batch.document_ids, [b.labels for b in data.validation_batches()]


def test_batches_are_the_ids_of_the_files_whatever_the_number_of_ranks(tmp_path):
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, 256, (n % 30 + 1,), generator=generator).tolist() for n in range(300)]
    words = [f"data.files={toml_array([corpus(tmp_path / 'c', documents)])}", "data.global_batch_size=4"]
    words += ["data.validation_fraction=0.2", "data.isolate_documents=true", "data.validation_sequences=7"]
    for step in (0, 50):
        whole = run_ranks(batches_of_a_step, 1, words, step)[0]
        parts = run_ranks(batches_of_a_step, 2, words, step)
        for index in range(3):
            assert torch.equal(torch.cat([part[index] for part in parts]), whole[index])
        counted = [sum((labels != -100).sum() for labels in side) for side in (whole[3], parts[0][3] + parts[1][3])]
        assert counted[0] == counted[1] > 0
        tokens, labels, numbers, _ = whole
        flat, begins = [t for d in documents[:240] for t in d], set(np.cumsum([len(d) for d in documents]).tolist())
        for row, wanted, ids in zip(tokens.tolist(), labels.tolist(), numbers.tolist(), strict=True):
            (place,) = [i for i in range(0, len(flat) - 16, 16) if flat[i : i + 16] == row]
            after = range(place + 1, place + 17)
            assert wanted == [-100 if offset in begins else flat[offset] for offset in after]
            assert [b - a for a, b in pairwise(ids)] == [int(offset in begins) for offset in after[:-1]]


def test_weights_are_shares_of_the_rows(tmp_path):
    one = corpus(tmp_path / "one", [[1] * 40] * 30)
    two = corpus(tmp_path / "two", [[2] * 40] * 300)
    files = f"data.files=[{{path={json.dumps(one)}, weight=3}}, {{path={json.dumps(two)}, weight=1}}]"

    def counts():
        data = build([files, "data.global_batch_size=64"])
        rows = torch.cat([data.train_batches(step)[0].tokens[:, 0] for step in range(20)])
        return rows.bincount().tolist()

    assert run_ranks(counts, 1) == [[0, 960, 320]]
    dumped = load_config((), ["data.type=tokens", files]).to_toml()
    assert load_config((), ["data.type=tokens", files])["data"].config.files[0] == TokenFileConfig(one, 3.0)
    assert "weight = 3.0" in dumped


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("data.files=[]", "must name at least one file"),
        ('data.files="x"', "must be an array"),
        ("data.files=[3]", "must be a string, not an integer"),
        ('data.files=[{path="x", wieght=1}]', "is not a key of this table (did you mean 'weight'?)"),
        ('data.files=[{path="x", weight=0}]', "must be > 0.0"),
    ],
)
def test_a_wrong_list_of_files_is_said_with_its_place(word, rule):
    with pytest.raises(ConfigError, match=re.escape(rule)):
        load_config((), ["data.type=tokens", word])


def refusal(words, world_size=2):
    with pytest.raises(RankFailed) as caught:
        run_ranks(build, world_size, words)
    return str(caught.value)


def test_what_does_not_fit_is_refused_on_all_ranks_before_a_step(tmp_path):
    absent = f"data.files={toml_array([str(tmp_path / 'absent')])}"
    assert "there is no such file, and no absent.bin beside it" in refusal([absent])
    far = corpus(tmp_path / "far", [[1] * 30, [5] * 30 + [256], [7] * 30] * 2)
    told = refusal([f"data.files={toml_array([far])}", "data.validation_fraction=0.3"])
    assert "far.bin, document 1: has the token id 256, and the model's vocabulary is 0 to 255" in told
    tiny = corpus(tmp_path / "tiny", [[1], [2], [3]])
    assert "has 2 tokens, fewer than one row of data.sequence_length = 16 + 1" in refusal(
        [f"data.files={toml_array([tiny])}", "data.validation_fraction=0.3"]
    )
    one = corpus(tmp_path / "one", [[1] * 50])
    assert "has 1 documents, of which none can be set apart" in refusal([f"data.files={toml_array([one])}"])
    half = f"data.files=[{{path={json.dumps(one)}, weight=1}}, {json.dumps(far)}]"
    assert "data.files: must have a weight each, or none" in refusal([half])
    bare = tmp_path / "bare.bin"
    np.ones(100, "<u2").tofile(bare)
    files = [f"data.files={toml_array([str(bare)])}", f"data.validation_files={toml_array([one])}"]
    assert "does not say where documents begin" in refusal([*files, "data.isolate_documents=true"])
    (data,) = run_ranks(lambda: build(files).describe(), 1)
    assert (data["training_documents"], data["validation_tokens"]) == (0, 50)


def test_the_tokenizer_must_be_that_of_the_files_and_fit_the_model(tmp_path):
    files = f"data.files={toml_array([prepared(tmp_path)])}"
    run_ranks(build, 1, [files])
    record = tmp_path / "own.json"
    told = json.loads(record.read_text())
    record.write_text(json.dumps({**told, "tokenizer": {**told["tokenizer"], "vocabulary": 300}}))
    assert "model.vocab_size = 256: must be at least 300, the tokenizer's" in refusal([files], 1)
    record.write_text(json.dumps({**told, "tokenizer": {**told["tokenizer"], "digest": "abc"}}))
    assert "was made with another tokenizer (digest abc, not bytes)" in refusal([files, "data.tokenizer=bytes"], 1)


def test_bits_per_byte_are_of_the_text_that_the_ids_stand_for(tmp_path):
    corpora, vocabulary = open_corpora([File(prepared(tmp_path))], (), 0.1, None)
    options = {"global_batch_size": 2, "microbatches": 1, "isolate_documents": False, "seed": 0}
    data = RowData(
        corpora, sequence_length=16, validation_sequences=5, dp_rank=0, dp_size=1, device=torch.device("cpu"), **options
    )
    assert vocabulary == 256
    assert data.describe()["bytes_per_token"] == 1.0
    assert data.files == {}

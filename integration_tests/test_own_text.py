"""From a folder of JSON lines and a tokenizer to a trained model that transformers reads, as typed."""

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from importlib.resources import files
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "packages" / "nemotron-nano" / "README.md").read_text(encoding="utf-8")
QUICK = (
    "data.sequence_length=64",
    "data.global_batch_size=4",
    "data.validation_sequences=6",
    "trainer.checkpoint_every=3",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Python's own sources as JSON lines, and the tokenizer of 131,072 tokens that mistral-common ships."""
    from transformers.integrations.mistral import convert_tekken_tokenizer

    folder = tmp_path_factory.mktemp("own")
    library = Path(sysconfig.get_paths()["stdlib"])
    (folder / "corpus").mkdir()
    texts = [path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py"))[:60]]
    for part in range(2):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[part::2]]
        (folder / "corpus" / f"{part}.jsonl").write_text("".join(lines))
    convert_tekken_tokenizer(str(files("mistral_common") / "data" / "tekken_240911.json")).save_pretrained(folder)
    return folder


def nemotron(*words, cwd):
    command = [sys.executable, "-m", "nemotron_nano", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def commands():
    """The README's, one after the other."""
    section = README.partition("\n## Your own text\n")[2].partition("\n## ")[0]
    config, typed = (section.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("toml", "sh"))
    lines = [shlex.split(line) for line in typed.splitlines()]
    assert [line[1] for line in lines] == ["prepare", "train", "report", "generate", "export"]
    return config, [line[1:] for line in lines]


def test_own_text_becomes_a_model_that_transformers_reads(folder):
    config, (prepare, train, report, generate, export) = commands()
    (folder / "own.toml").write_text(config)
    told = nemotron(*prepare, cwd=folder)
    assert "own.bin: 60 documents, " in told
    assert "own.bin: all 60 documents are those of the inputs" in told
    nemotron(*train, *QUICK, "run.steps=3", cwd=folder)
    output = nemotron(*train, *QUICK, "run.steps=6", "--resume", cwd=folder)
    assert "resumed after step 3" in output
    nemotron(*report, cwd=folder)
    text = nemotron(*generate, "--max-new-tokens", 12, "--temperature", 0, cwd=folder)
    assert text.startswith("def ")
    nemotron(*export, cwd=folder)
    run = folder / "runs" / "own"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [record for record in records if record["event"] == "evaluated"][-1]
    assert 2 < evaluated["bits_per_token"] / evaluated["bits_per_byte"] < 6  # bytes of a token
    assert all(0 < record["data_seconds"] < record["seconds"] for record in records if record["event"] == "step_end")
    tokenizer = (folder / "tokenizer.json").read_bytes()
    assert (run / "tokenizer.json").read_bytes() == tokenizer
    assert (run / "checkpoints" / "step-00000006" / "tokenizer.json").read_bytes() == tokenizer

    import transformers

    from ckpt_layout import load_hf
    from nemotron_nano import NemotronNano, NemotronNanoConfig

    exported = run / "hf"
    config = json.loads((exported / "config.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))  # as the config says; it clamps dt at time_step_min otherwise
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    assert (config["eos_token_id"], theirs.eos_token, model.generation_config.eos_token_id) == (2, "</s>", 2)
    ids = theirs("def f(x):\n    return x", return_tensors="pt", add_special_tokens=False)["input_ids"]
    ours = NemotronNano(NemotronNanoConfig.from_hf(config))
    load_hf(ours, exported)
    with torch.no_grad():
        mine, logits = ours.eval()(ids), model(ids, use_cache=False).logits
    assert (mine - logits).norm() < 1e-5 * logits.norm()
    greedy = model.generate(theirs("def ", return_tensors="pt").input_ids, max_new_tokens=12, do_sample=False)
    assert theirs.decode(greedy[0], skip_special_tokens=True).startswith(text.rstrip("\n"))

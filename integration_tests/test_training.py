"""The main job through its command: train, compare degrees, resume, export, generate."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
STEPS = 20
MAX_NORM = 0.5
QUICK = (
    "data.sequence_length=128",
    "data.global_batch_size=8",
    "data.validation_sequences=8",
    "scheduler.decay_steps=20",
    f"clipper.max_norm={MAX_NORM}",
)


def nemotron(*words, cwd):
    command = [sys.executable, "-m", "nemotron_nano", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=cwd, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def train(cwd, name, *words, steps=STEPS):
    words = (*QUICK, f"run.steps={steps}", f"run.name={name}", *words)
    return nemotron("train", ROOT / "configs" / "demo.toml", "--nproc", 2, *words, cwd=cwd)


def records(cwd, name, event="step_end"):
    lines = (cwd / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, device_type):
    """The demo's first steps with ep = 1 and ep = 2, and the second one resumed from halfway."""
    folder = tmp_path_factory.mktemp("training")
    device = f"run.device_type={device_type}"
    train(folder, "one", "mesh.ep=1", device)
    train(folder, "two", f"trainer.checkpoint_every={STEPS // 2}", device)
    halves = shutil.copytree(folder / "runs" / "two", folder / "runs" / "halves")
    shutil.rmtree(halves / "checkpoints" / f"step-{STEPS:08d}")
    (halves / "checkpoints" / "latest").write_text(f"step-{STEPS // 2:08d}")
    output = train(folder, "halves", "--resume", device)
    assert f"resumed after step {STEPS // 2}" in output
    return folder


def test_losses_and_norms_of_ep_1_and_ep_2_agree_while_clipping_is_active(runs):
    one, two = records(runs, "one"), records(runs, "two")
    assert [record["step"] for record in one] == [record["step"] for record in two] == list(range(1, STEPS + 1))
    assert sum(record["grad_norm"] > MAX_NORM for record in one) >= STEPS / 2, "clipping is not active"
    for a, b in zip(one, two, strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-4
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)


def test_it_learns(runs):
    losses = [record["loss"] for record in records(runs, "two")]
    assert losses[0] > math.log(2) * 6
    assert losses[-1] < losses[0] - 2


def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(runs):
    whole, halves = records(runs, "two"), records(runs, "halves")
    for a, b in zip(whole, halves, strict=True):
        assert (a["step"], a["loss"], a["grad_norm"], a["expert_load"]) == (
            b["step"], b["loss"], b["grad_norm"], b["expert_load"],
        )  # fmt: skip
    (a,), (*_, b) = records(runs, "two", "evaluated"), records(runs, "halves", "evaluated")
    assert a["loss"] == b["loss"]


def test_validation_is_reported_in_bits_beside_the_entropy_of_bytes(runs):
    (evaluated,) = records(runs, "two", "evaluated")
    assert evaluated["bits_per_byte"] == pytest.approx(evaluated["loss"] / math.log(2))
    assert 4 < evaluated["byte_entropy_bits"] < 5.5


def test_every_expert_load_sums_to_tokens_times_k(runs):
    for record in records(runs, "two"):
        assert len(record["expert_load"]) == 2
        for counts in record["expert_load"].values():
            assert len(counts) == 16
            assert sum(counts) == record["tokens"] * 2


def test_a_plain_torchrun_trains_the_same(runs, device_type):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*QUICK, "run.name=torchrun", "run.steps=2", f"run.device_type={device_type}"]
    command = [*torchrun, "-m", "nemotron_nano", "train", str(ROOT / "configs" / "demo.toml"), *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=runs)
    assert result.returncode == 0, result.stderr
    for a, b in zip(records(runs, "two"), records(runs, "torchrun"), strict=False):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])


def test_an_earlier_run_is_not_written_over(runs):
    command = [sys.executable, "-m", "nemotron_nano", "train", str(ROOT / "configs" / "demo.toml"), "run.name=two"]
    result = subprocess.run([*command, "--nproc", "2"], capture_output=True, text=True, timeout=60, cwd=runs)
    assert result.returncode == 2
    assert "--resume" in result.stderr


def test_generation_continues_the_prompt_alike_every_time(runs):
    words = ("generate", "runs/two", "--prompt", "import ", "--max-new-tokens", 30)
    text = nemotron(*words, cwd=runs)
    assert text.startswith("import ")
    assert len(text) > 20
    assert nemotron(*words, cwd=runs) == text


def test_the_report_draws_both_runs(runs):
    output = nemotron("report", "runs/two", "runs/one", cwd=runs)
    assert "bits/byte" in output
    for name in ("loss.png", "expert_load.png"):
        assert (runs / "runs" / "two" / name).read_bytes().startswith(b"\x89PNG")


def test_the_export_is_what_transformers_computes(runs):
    """Every key is used, none is missing, and the logits of 48 tokens are equal within 1e-4."""
    from transformers import NemotronHForCausalLM

    from nemotron_nano.trained import trained_model

    nemotron("export", "runs/two", cwd=runs)
    hub = runs / "runs" / "two" / "hf"
    theirs, loading = NemotronHForCausalLM.from_pretrained(hub, output_loading_info=True, dtype=torch.float32)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    for layer in theirs.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            # the oracle clamps dt otherwise; the model does not
            layer.mixer.time_step_limit = (0.0, math.inf)
    tokens = torch.tensor([list(b"def main(argv=None):\n    parser = argparse.Argum"[:48])])
    assert tokens.shape == (1, 48)
    with torch.no_grad():
        expected = theirs.eval()(tokens, use_cache=False).logits
    # the working directory is where the run's config says that its folder is
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.chdir(runs)
        with trained_model(Path("runs/two")) as ours:
            logits = ours(tokens)
            biases = {name: value for name, value in ours.state_dict().items() if name.endswith("router.bias")}
    assert (logits - expected).abs().max() < 1e-4
    assert any(bias.abs().max() > 0 for bias in biases.values()), "the export of the router bias is not tested"

"""What the headers of the configs and the README say in numbers is what the configs give."""

from pathlib import Path

import pytest

from ep_mesh import MeshConfig
from moe_core import load_config
from nemotron_nano import count_parameters, presets
from nemotron_nano.planner._footprint import footprint_of_layer
from nemotron_nano.planner._inputs import read_workload

PACKAGE = Path(__file__).parents[1]
CONFIGS = PACKAGE.parents[1] / "configs"
GIB = 2**30


def text_of(path: Path) -> str:
    """As one line, so that a sentence may be broken anywhere."""
    return " ".join(path.read_text(encoding="utf-8").replace("\n#", "\n").split())


@pytest.fixture(scope="module", params=["fineweb_nano", "fineweb_nano_compiled"])
def config_and_text(request):
    path = CONFIGS / f"{request.param}.toml"
    return load_config([str(path)]), text_of(path)


def test_parameters_with_either_vocabulary(config_and_text):
    config, text = config_and_text
    total, active = count_parameters(config["model"].config.resolve())
    assert f"counted on the model: {total:,} in all, {active:,} of them active for a token" in text
    other = load_config((), ["model.preset=nano-30b-a3b", "model.vocab_size=128256"])["model"].config.resolve()
    counts = "{:,} and {:,}".format(*count_parameters(other))
    assert f"model.vocab_size = {other.vocab_size}, they are {counts}." in text


def test_what_differs_from_the_demo(config_and_text):
    config, text = config_and_text
    full = config["model"].config.resolve()
    tiny = load_config([str(CONFIGS / "demo.toml")])["model"].config.resolve()
    assert (
        f"{full.num_layers} layers of width {full.hidden_size} for {tiny.num_layers} of width {tiny.hidden_size}; "
        f"{full.num_experts} experts top-{full.top_k} for {tiny.num_experts} top-{tiny.top_k}; "
        f"{full.vocab_size:,} rows of vocabulary for {tiny.vocab_size}" in text
    )
    assert f"Nemotron-3 Nano 30B-A3B, all {full.num_layers} layers" in text


def test_shares_of_a_gpu(config_and_text):
    config, text = config_and_text
    full, data, ep = config["model"].config.resolve(), config["data"].config, config["mesh"].config.ep
    rows = data.global_batch_size // 8
    tokens = rows * data.sequence_length
    assert f"ep = {ep} # {full.num_experts // ep} whole experts of each layer on a GPU" in text
    assert f"{rows} rows a GPU: {tokens:,} tokens in a microbatch" in text
    assert f"rows of {data.sequence_length:,} tokens" in text
    loss = config["loss"].config
    chunk = getattr(loss, "chunk_tokens", None) or loss.inner.config.chunk_tokens
    logits = [count * full.vocab_size * 4 / GIB for count in (chunk, tokens)]
    assert f"# {logits[0]:g} GiB of fp32 logits at a time; all {tokens:,} tokens would be {logits[1]:g} GiB" in text
    assert f"until the last: {count_parameters(full).total * 4 / 1e9:.0f} GB at ep = 1" in text
    # weight, gradient and two moments
    assert f"stored, with AdamW's moments, in fp32: {4 * 4} bytes a parameter" in text


def test_what_a_mamba_layer_keeps(config_and_text):
    _, text = config_and_text
    words = ["transform=[{type='fsdp', param_dtype='bfloat16'}]", "data.sequence_length=8192", "data.microbatches=1"]
    work = read_workload(load_config((), ["model.preset=nano-30b-a3b", "data.global_batch_size=1", *words]))
    kept = footprint_of_layer(work, MeshConfig().resolve(1), work.model.pattern.index("M")).kept
    assert f"kept, a Mamba layer alone would hold {kept / GIB:.1f} GiB for {work.sequence_length:,} tokens" in text


def test_share_of_the_experts():
    text = text_of(CONFIGS / "fineweb_nano_compiled.toml")
    full = presets["nano-30b-a3b"]
    experts = full.pattern.count("E") * full.num_experts * 2 * full.hidden_size * full.expert_hidden_size
    assert f"whose experts have {experts / count_parameters(full).total:.0%} of the weights" in text


def test_sizes_of_the_presets():
    text = text_of(PACKAGE / "src" / "nemotron_nano" / "model_config.py")
    sizes = [f"{count_parameters(presets[name]).total / 1e6:.1f}M" for name in ("tiny", "small")]
    assert "`tiny` ({} parameters) and `small` ({})".format(*sizes) in text
    assert f"the first {presets['nano-16l'].num_layers} layers" in text

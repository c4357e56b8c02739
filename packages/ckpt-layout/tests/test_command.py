"""The command `ckpt-layout`: one process, no process group, every format."""

import json
from importlib.metadata import version

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt_layout import families, load_checkpoint, load_hf, save_checkpoint, save_hf
from ckpt_layout._cli import main
from ckpt_layout._convert import convert
from ckpt_layout._inspect import open_view
from ckpt_layout._layout import native, on_disk

E, F, D = 5, 3, 4
LAYER = "model.layers.1"


def model(dtype=torch.float32, seed=1):
    """What a small glm4_moe has: gated experts, a router with an fp32 bias, a norm."""
    shapes = {
        "model.embed_tokens.weight": (7, D),
        f"{LAYER}.mlp.experts.gate_up_proj": (E, 2 * F, D),
        f"{LAYER}.mlp.experts.down_proj": (E, D, F),
        f"{LAYER}.mlp.gate.weight": (E, D),
        f"{LAYER}.mlp.gate.e_score_correction_bias": (E,),
        "model.norm.weight": (D,),
    }
    generator = torch.Generator().manual_seed(seed)
    root = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        kept = dtype if "gate." not in name else torch.float32
        module.register_parameter(last, nn.Parameter(torch.randn(shape, generator=generator).to(kept)))
    return root


CONFIG = {"model_type": "glm4_moe", "n_routed_experts": E}


@pytest.fixture
def folder(tmp_path):
    save_hf(model(torch.bfloat16), tmp_path / "hf", config=CONFIG, max_shard_size="200B")
    return tmp_path / "hf"


def assert_equal(mine, want):
    assert set(mine) == set(want)
    for name, value in want.items():
        assert mine[name].dtype == value.dtype, name
        assert torch.equal(mine[name], value), name


def read(folder):
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def test_ranges(capsys):
    assert main(["ranges", "--experts", "60", "--ranks", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["0", "8", "0:8"]
    assert lines[8].split() == ["7", "4", "56:60"]
    assert main(["ranges", "--experts", "5", "--ranks", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[4].split() == ["3", "0", "none"]
    assert main(["ranges", "--experts", "5", "--ranks", "0"]) == 2
    assert "world_size = 0: must be at least 1" in capsys.readouterr().err


def test_convert_says_that_it_leaves_the_optimizer_behind(capsys):
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    assert "optimizer state is not carried along" in capsys.readouterr().out


def test_inspect_names_family_experts_dtypes_and_sizes(folder, capsys):
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    count = 7 * D + E * 2 * F * D + E * D * F + D
    assert "family glm4_moe" in out
    assert f"bfloat16: 4 tensors, {2 * count} B" in out
    assert f"float32: 2 tensors, {4 * (E * D + E)} B" in out
    assert f"{LAYER}.mlp.experts.gate_up_proj: experts 0:5 of (6, 4), none missing" in out


def test_missing_experts_are_named_even_the_last_ones(folder, capsys):
    tensors = read(folder)
    gone = [key for key in tensors if ".experts.1." in key or ".experts.4." in key]
    for file in folder.glob("model*"):
        file.unlink()
    save_file({key: value for key, value in tensors.items() if key not in gone}, folder / "model.safetensors")
    want = f"{LAYER}.mlp.experts.*.up_proj.weight: 3 of 5 experts; missing: 1, 4"
    assert main(["inspect", str(folder)]) == 0
    assert want in capsys.readouterr().out
    assert main(["verify", str(folder)]) == 1
    assert want in capsys.readouterr().out
    assert main(["convert", str(folder), str(folder.parent / "out"), "--to", "dcp"]) == 2
    assert "is not complete" in capsys.readouterr().err
    assert not (folder.parent / "out").exists()


def test_verify(folder, tmp_path, capsys):
    assert main(["verify", str(folder)]) == 0
    mine = model()
    save_checkpoint(tmp_path / "run", 3, model=mine, optimizer=torch.optim.AdamW(mine.parameters()))
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert "whole" in capsys.readouterr().out
    for damaged in ((tmp_path / "run").glob("step*/*.distcp"), folder.glob("model-00002*")):
        file = next(damaged)
        file.write_bytes(file.read_bytes()[:-20])
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert "cannot be read" in capsys.readouterr().out
    assert main(["verify", str(folder)]) == 1
    assert "no whole safetensors file" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "nothing")]) == 1
    assert "is no folder" in capsys.readouterr().out


def test_verify_finds_what_is_not_finite(tmp_path, capsys):
    broken = model()
    with torch.no_grad():
        broken.model.norm.weight[2] = float("inf")
    save_hf(broken, tmp_path / "hf", config=CONFIG)
    assert main(["verify", str(tmp_path / "hf")]) == 1
    assert capsys.readouterr().out == "model.norm.weight: holds values that are not finite\n"


def test_tensors_that_a_file_has_in_one_are_converted_apart_and_together(tmp_path, capsys):
    """kimi_k25's wqkv: inspected, verified, to dcp, back, equal byte for byte."""
    root, config = nn.Module(), {"model_type": "kimi_k25", "vision_config": {"num_attention_heads": 2}}
    module = root
    for part in ("model", "vision_tower", "layers", "0", "attn"):
        module.add_module(part, nn.Module())
        module = getattr(module, part)
    for name in "qkv":
        module.add_module(f"{name}_proj", nn.Linear(3, 8))
    save_hf(root, tmp_path / "hf", config=config)
    assert main(["inspect", str(tmp_path / "hf")]) == 0
    assert "6 native tensors" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "hf")]) == 0
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    other = nn.Module()
    other.add_module("model", root.model)
    want = {name: value.clone() for name, value in root.state_dict().items()}
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    load_checkpoint(tmp_path / "dcp", model=other)
    assert_equal(dict(other.state_dict()), want)
    told = ["--family", "kimi_k25", "--config", str(tmp_path / "hf" / "config.json")]
    assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / "back"), "--to", "hf", *told]) == 0
    assert_equal(read(tmp_path / "back"), read(tmp_path / "hf"))


def test_diff_across_formats_and_by_expert(tmp_path, capsys):
    one, two = model(), model()
    save_hf(one, tmp_path / "hf", config=CONFIG)
    save_checkpoint(tmp_path / "run", 1, model=two)
    assert main(["diff", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == "equal, bit by bit\n"
    with torch.no_grad():
        getattr(two.model.layers, "1").mlp.experts.down_proj[3, 1, 2] += 0.5
        getattr(two.model.layers, "1").mlp.gate.e_score_correction_bias[2] += 0.002
    save_checkpoint(tmp_path / "run", 2, model=two)
    assert main(["diff", str(tmp_path / "hf"), str(tmp_path / "run")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{LAYER}.mlp.experts.down_proj: max difference 0.5; by expert 3: 0.5",
        f"{LAYER}.mlp.gate.e_score_correction_bias: max difference 0.002",
    ]
    two.extra = nn.Parameter(torch.zeros(1))
    two.model.norm.weight = nn.Parameter(torch.zeros(D + 1))
    save_checkpoint(tmp_path / "run", 3, model=two)
    assert main(["diff", str(tmp_path / "hf"), str(tmp_path / "run")]) == 1
    out = capsys.readouterr().out
    assert f"extra: only in {tmp_path / 'run'}" in out
    assert "model.norm.weight: (4,) and (5,)" in out


def test_a_nan_on_one_side_is_a_difference(tmp_path, capsys):
    one, two = model(), model()
    with torch.no_grad():
        two.model.norm.weight[0] = float("nan")
    save_hf(one, tmp_path / "a", config=CONFIG)
    save_hf(two, tmp_path / "b", config=CONFIG)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "model.norm.weight: max difference inf" in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "b"), str(tmp_path / "b")]) == 0


def test_every_format_to_every_other_and_back(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    want = read(folder)
    state = dict(model(torch.bfloat16).state_dict())

    def to(source, target, form, *more):
        assert main(["convert", str(tmp_path / source), str(tmp_path / target), "--to", form, *more]) == 0
        assert not list(tmp_path.glob(".*"))

    to("hf", "stacked", "stacked")
    assert f"{LAYER}.mlp.experts.gate_up_proj" in read(tmp_path / "stacked")
    assert_equal(read(tmp_path / "stacked"), state)
    to("stacked", "dcp", "dcp")
    other = model(torch.bfloat16, seed=2)
    assert load_checkpoint(tmp_path / "dcp", model=other) == {"step": 0}
    assert_equal(dict(other.state_dict()), state)
    (tmp_path / "config").write_text(json.dumps(CONFIG))
    to("dcp", "back", "hf", "--config", str(tmp_path / "config"), "--family", "glm4_moe", "--max-shard-size", "200B")
    assert_equal(read(tmp_path / "back"), want)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == CONFIG
    index = "model.safetensors.index.json"
    mine, theirs = (json.loads((tmp_path / name / index).read_text()) for name in ("back", "hf"))
    assert mine["weight_map"].keys() == theirs["weight_map"].keys()
    assert mine["metadata"] == theirs["metadata"]
    load_hf(again := model(torch.bfloat16, seed=3), tmp_path / "back")
    assert_equal(dict(again.state_dict()), state)
    to("hf", "copy", "hf")
    assert (tmp_path / "copy" / "tokenizer.json").exists()
    assert_equal(read(tmp_path / "copy"), want)


def test_dtype_leaves_what_must_stay_fp32(tmp_path):
    save_hf(model(), tmp_path / "hf", config=CONFIG)
    for form in ("hf", "dcp"):
        arguments = ["convert", str(tmp_path / "hf"), f"{tmp_path}/{form}16", "--to", form, "--dtype", "bfloat16"]
        assert main(arguments) == 0
        infos = open_view(tmp_path / f"{form}16", "glm4_moe").tensors()
        fp32 = {name for name, info in infos.items() if info.dtype == torch.float32}
        assert fp32 == {f"{LAYER}.mlp.gate.weight", f"{LAYER}.mlp.gate.e_score_correction_bias"}


def test_an_interrupted_conversion_goes_on_where_it_was(folder, tmp_path):
    class Ended(Exception):
        pass

    done = []

    def step(count):
        done.append(count)
        if len(done) == 3:
            raise Ended

    with pytest.raises(Ended):
        convert(folder, tmp_path / "out", "hf", max_shard_size="100B", step=step)
    assert not (tmp_path / "out").exists()
    partial = tmp_path / ".out.partial"
    files = json.loads((partial / "progress.json").read_text())["files"]
    assert len(files) == 3
    before = {name: (partial / name).stat().st_mtime_ns for name in files}
    convert(folder, tmp_path / "out", "hf", max_shard_size="100B")
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in files} == before
    assert_equal(read(tmp_path / "out"), read(folder))
    assert not (tmp_path / "out" / "progress.json").exists()


def test_another_source_or_a_damaged_record_starts_again(folder, tmp_path):
    def step(count):
        raise RuntimeError

    for number, harm in enumerate(("another folder", "another file", "a damaged record", "no record")):
        out, source = tmp_path / f"out{number}", tmp_path / f"source{number}"
        save_hf(model(torch.bfloat16, seed=7), source, config=CONFIG, max_shard_size="200B")
        with pytest.raises(RuntimeError):
            convert(source, out, "hf", max_shard_size="100B", step=step)
        record = tmp_path / f".out{number}.partial" / "progress.json"
        if harm == "another folder":
            source = folder
        elif harm == "another file":
            for file in folder.iterdir():
                (source / file.name).write_bytes(file.read_bytes())
        else:
            record.write_text("[]" if harm == "a damaged record" else "{")
        convert(source, out, "hf", max_shard_size="100B")
        assert_equal(read(out), read(source))


def test_an_interrupted_conversion_to_dcp_starts_again(folder, tmp_path):
    def step(count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "out", "dcp", step=step)
    assert [file.name for file in (tmp_path / "out").iterdir()] == [".step-00000000.partial"]
    convert(folder, tmp_path / "out", "dcp")
    assert main(["diff", str(folder), str(tmp_path / "out"), "--family", "glm4_moe"]) == 0


def test_dtypes_without_a_place_in_the_files_are_named(tmp_path):
    odd = nn.Module()
    odd.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"phase: torch\.complex64 has no place in these files: only F64, "):
        save_hf(odd, tmp_path / "out", family="glm4_moe")
    assert list(tmp_path.iterdir()) == []


def test_the_root_is_no_folder_to_write(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="/: is no folder that can be made"):
        save_hf(model(), "/", config=CONFIG)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match="exists and is not empty"):
        save_hf(model(), ".", config=CONFIG)


def test_another_plan_starts_again(folder, tmp_path):
    def step(count):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        convert(folder, tmp_path / "out", "hf", max_shard_size="100B", step=step)
    convert(folder, tmp_path / "out", "stacked", max_shard_size="100B")
    assert_equal(read(tmp_path / "out"), dict(model(torch.bfloat16).state_dict()))


def test_an_occupied_target_is_left_alone(folder, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("do not lose")
    assert main(["convert", str(folder), str(tmp_path / "out"), "--to", "hf"]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_source_without_a_family_needs_one(tmp_path, capsys):
    save_checkpoint(tmp_path / "run", 1, model=model())
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "hf"]) == 2
    assert "model_type = None is of no known family" in capsys.readouterr().err


NATIVE = {
    "nemotron_h": ["backbone.layers.0.mixer.ssm.A_log", "backbone.layers.1.mixer.router.bias", "lm_head.weight"],
    "deepseek_v4": [
        "model.norm.weight", "lm_head.weight", "model.layers.0.input_layernorm.weight",
        *(f"model.layers.0.self_attn.{name}.weight" for name in (
            "kv_norm", "q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "q_a_norm", "compressor.kv_norm",
            "compressor.gate_proj", "compressor.indexer.kv_norm", "compressor.indexer.q_b_proj",
            "compressor.indexer.scorer.weights_proj", "compressor.indexer.gate_proj",
        )),
        "model.layers.0.self_attn.compressor.position_bias", "model.layers.0.attn_hc.fn", "model.layers.0.ffn_hc.base",
        "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.e_score_correction_bias",
    ],
    "kimi_linear": ["model.layers.0.self_attn.forget_gate.A_log", "model.layers.0.mlp.gate.weight"],
    "kimi_k25": ["model.language_model.norm.weight", "lm_head.weight"],
    "minimax_m2": ["model.layers.0.mlp.e_score_correction_bias"],
    "ernie4_5_moe": ["model.layers.0.mlp.gate.moe_statics.e_score_correction_bias"],
    "granitemoe": ["model.layers.0.block_sparse_moe.router.weight", "m.block_sparse_moe.experts.down_proj"],
    "glm5_next": ["model.layers.0.self_attn.forget_gate.dt_bias", "model.layers.0.attn_hc.scale"],
}  # fmt: skip


def test_names_come_back_from_disk():
    for row, names in NATIVE.items():
        family = families()[row]
        for name in names:
            assert native(on_disk(name, family), family) == name


def test_the_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"ckpt-layout {version('ckpt-layout')}\n"

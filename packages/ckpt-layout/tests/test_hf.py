"""`load_hf` and `save_hf` against files that safetensors itself wrote and reads, on one rank and under layouts."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt_layout import Family, Rule, families, load_hf, save_hf
from moe_core.testing import run_ranks

E, F, D, V, HEADS = 5, 3, 4, 11, 2


def tiny(experts=E):
    """A module tree with the native names of nemotron_h: one Mamba layer's fp32 island, one MoE layer."""

    def module(**children):
        made = nn.Module()
        for name, child in children.items():
            if isinstance(child, nn.Parameter):
                made.register_parameter(name, child)
            elif isinstance(child, torch.Tensor):
                made.register_buffer(name, child)
            else:
                made.add_module(name, child)
        return made

    def parameter(*shape, dtype=torch.float32):
        return nn.Parameter(torch.full(shape, float("nan"), dtype=dtype))

    ssm = module(A_log=parameter(HEADS), D=parameter(HEADS), dt_bias=parameter(HEADS))
    router = module(weight=parameter(experts, D), bias=torch.full((experts,), float("nan")))
    router.register_buffer("tokens_per_expert", torch.zeros(experts, dtype=torch.int64), persistent=False)
    stacks = module(up_proj=parameter(experts, F, D), down_proj=parameter(experts, D, F))
    shared = module(up_proj=module(weight=parameter(2 * F, D)), down_proj=module(weight=parameter(D, 2 * F)))
    mamba = module(norm=module(weight=parameter(D)), mixer=module(ssm=ssm, in_proj=module(weight=parameter(7, D))))
    moe = module(norm=module(weight=parameter(D)), mixer=module(router=router, experts=stacks, shared_experts=shared))
    backbone = module(
        embeddings=module(weight=parameter(V, D)),
        layers=nn.ModuleList([mamba, moe]),
        norm_f=module(weight=parameter(D)),
    )
    return module(backbone=backbone, lm_head=module(weight=parameter(V, D)))


def disk_tensors(experts=E, seed=1):
    """What a folder of this model holds, written down by hand."""
    g = torch.Generator().manual_seed(seed)

    def values(*shape):
        return torch.randn(*shape, generator=g)

    moe = "backbone.layers.1.mixer."
    tensors = {
        "backbone.embeddings.weight": values(V, D),
        "backbone.layers.0.norm.weight": values(D),
        "backbone.layers.0.mixer.A_log": values(HEADS),
        "backbone.layers.0.mixer.D": values(HEADS),
        "backbone.layers.0.mixer.dt_bias": values(HEADS),
        "backbone.layers.0.mixer.in_proj.weight": values(7, D),
        "backbone.layers.1.norm.weight": values(D),
        f"{moe}gate.weight": values(experts, D),
        f"{moe}gate.e_score_correction_bias": values(experts),
        f"{moe}shared_experts.up_proj.weight": values(2 * F, D),
        f"{moe}shared_experts.down_proj.weight": values(D, 2 * F),
        "backbone.norm_f.weight": values(D),
        "lm_head.weight": values(V, D),
    }
    for expert in range(experts):
        tensors[f"{moe}experts.{expert}.up_proj.weight"] = values(F, D)
        tensors[f"{moe}experts.{expert}.down_proj.weight"] = values(D, F)
    return tensors


def expected_state(tensors, experts=E):
    moe = "backbone.layers.1.mixer."
    state = {key: value for key, value in tensors.items() if ".experts." not in key}
    for old, new in (
        ("0.mixer.A_log", "0.mixer.ssm.A_log"),
        ("0.mixer.D", "0.mixer.ssm.D"),
        ("0.mixer.dt_bias", "0.mixer.ssm.dt_bias"),
        ("1.mixer.gate.weight", "1.mixer.router.weight"),
        ("1.mixer.gate.e_score_correction_bias", "1.mixer.router.bias"),
    ):
        state[f"backbone.layers.{new}"] = state.pop(f"backbone.layers.{old}")
    for name in ("up_proj", "down_proj"):
        state[f"{moe}experts.{name}"] = torch.stack(
            [tensors[f"{moe}experts.{e}.{name}.weight"] for e in range(experts)]
        )
    return state


def write_folder(folder, tensors, files=3, model_type="nemotron_h"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    keys = sorted(tensors)
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        mine = {key: tensors[key] for key in keys[number::files]}
        save_file(mine, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(mine, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read_folder(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


def assert_equal(mine, want):
    assert set(mine) == set(want)
    for key, value in want.items():
        assert mine[key].dtype == value.dtype, key
        assert torch.equal(mine[key], value), key


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "hf", disk_tensors())


def test_every_tensor_is_filled_with_its_value(folder):
    model = tiny()
    load_hf(model, folder)
    assert_equal(dict(model.state_dict()), expected_state(disk_tensors()))


def test_stacked_files_are_read_as_well(tmp_path):
    tensors = disk_tensors()
    want = expected_state(tensors)
    stacked = {key: value for key, value in tensors.items() if ".experts." not in key}
    stacked.update({key: value for key, value in want.items() if ".experts." in key})
    model = tiny()
    load_hf(model, write_folder(tmp_path / "stacked", stacked, files=1))
    assert_equal(dict(model.state_dict()), want)


def test_a_single_file_needs_no_index(tmp_path):
    (tmp_path / "one").mkdir()
    save_file(disk_tensors(), tmp_path / "one" / "model.safetensors")
    model = tiny()
    load_hf(model, tmp_path / "one", family="nemotron_h")
    assert_equal(dict(model.state_dict()), expected_state(disk_tensors()))


def test_values_take_the_dtype_of_the_model(folder):
    model = tiny()
    model.lm_head.to(torch.bfloat16)
    load_hf(model, folder)
    assert torch.equal(model.lm_head.weight, disk_tensors()["lm_head.weight"].bfloat16())
    assert model.backbone.layers[1].mixer.router.bias.dtype == torch.float32


def test_experts_of_another_dtype_are_filled_with_values_not_only_counted(folder):
    """A cast makes a copy, and a loader that fills the copy leaves the weights as they were."""
    model = tiny()
    model.backbone.layers[1].mixer.experts.to(torch.bfloat16)
    load_hf(model, folder)
    want = expected_state(disk_tensors())
    for name in ("up_proj", "down_proj"):
        stack = getattr(model.backbone.layers[1].mixer.experts, name)
        assert torch.equal(stack, want[f"backbone.layers.1.mixer.experts.{name}"].bfloat16())


def test_the_index_decides_and_not_the_names_of_the_files(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    odd = ("b", "model-00009-of-00002.part", "model")
    names = {f"model-{i + 1:05d}-of-00003.safetensors": f"{odd[i]}.safetensors" for i in range(3)}
    for old, new in names.items():
        (folder / old).rename(folder / new)
    index["weight_map"] = {key: names[name] for key, name in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = tiny()
    load_hf(model, folder)
    assert_equal(dict(model.state_dict()), expected_state(disk_tensors()))


def test_what_was_saved_is_what_the_folder_held(folder, tmp_path):
    model = tiny()
    load_hf(model, folder)
    save_hf(model, tmp_path / "out", family="nemotron_h")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert_equal(read_folder(tmp_path / "out"), disk_tensors())


def test_files_and_index_are_as_transformers_splits_them(folder, tmp_path):
    model = tiny()
    load_hf(model, folder)
    config = {"model_type": "nemotron_h", "vocab_size": V}
    save_hf(model, tmp_path / "out", max_shard_size="300B", config=config)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = disk_tensors()
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    assert set(index["weight_map"]) == set(tensors)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    for name in files:
        inside = load_file(tmp_path / "out" / name)
        assert {index["weight_map"][key] for key in inside} == {name}
        assert len(inside) == 1 or sum(t.numel() * 4 for t in inside.values()) <= 300
    assert_equal(read_folder(tmp_path / "out"), tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    again = tiny()
    load_hf(again, tmp_path / "out")
    assert_equal(dict(again.state_dict()), dict(model.state_dict()))


def test_dtype_leaves_what_must_stay_fp32(folder, tmp_path):
    model = tiny()
    load_hf(model, folder)
    save_hf(model, tmp_path / "out", family="nemotron_h", dtype=torch.bfloat16)
    kept = ("A_log", ".D", "dt_bias", "gate.weight", "e_score_correction_bias")
    want = {k: v if k.endswith(kept) else v.bfloat16() for k, v in disk_tensors().items()}
    assert_equal(read_folder(tmp_path / "out"), want)


def test_tensors_are_aligned_to_their_own_size(tmp_path):
    model = nn.Module()
    model.register_buffer("narrow", torch.randn(3).bfloat16())
    model.register_buffer("wide", torch.randn(2))
    save_hf(model, tmp_path / "out", family="nemotron_h")
    assert_equal(read_folder(tmp_path / "out"), dict(model.state_dict()))
    header = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    table = json.loads(header[8 : 8 + length])
    assert length % 8 == 0
    assert table["wide"]["data_offsets"] == [0, 8]
    assert table["narrow"]["data_offsets"] == [8, 14]


def test_tied_weights_are_written_once_and_filled_from_one_key(tmp_path):
    tensors = disk_tensors()
    del tensors["lm_head.weight"]
    folder = write_folder(tmp_path / "tied", tensors)
    model = tiny()
    model.lm_head.weight = model.backbone.embeddings.weight
    load_hf(model, folder)
    assert torch.equal(model.lm_head.weight, tensors["backbone.embeddings.weight"])
    save_hf(model, tmp_path / "out", family="nemotron_h")
    assert_equal(read_folder(tmp_path / "out"), tensors)
    with pytest.raises(ValueError, match=r"tensors that nothing fills: lm_head.weight \(no lm_head.weight\)"):
        load_hf(tiny(), folder)


def test_keys_that_are_missing_or_left_over_are_listed_and_nothing_is_changed(tmp_path):
    tensors = disk_tensors()
    del tensors["backbone.layers.1.mixer.experts.3.up_proj.weight"]
    tensors["backbone.layers.1.mixer.experts.5.up_proj.weight"] = torch.zeros(F, D)
    tensors["mtp.weight"] = torch.zeros(2)
    model = tiny()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked below
        load_hf(model, write_folder(tmp_path / "odd", tensors))
    message = str(caught.value)
    assert "backbone.layers.1.mixer.experts.up_proj (no backbone.layers.1.mixer.experts.3.up_proj.weight)" in message
    assert "keys that nothing uses: backbone.layers.1.mixer.experts.5.up_proj.weight, mtp.weight" in message
    assert model.lm_head.weight.isnan().all()


def test_a_shape_that_differs_is_named(tmp_path):
    tensors = disk_tensors()
    tensors["lm_head.weight"] = torch.zeros(V + 1, D)
    with pytest.raises(ValueError, match=r"lm_head.weight is \(12, 4\), lm_head.weight needs \(11, 4\)"):
        load_hf(tiny(), write_folder(tmp_path / "odd", tensors))


def truncate(folder):
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-7])


def huge_header(folder):
    file = next(folder.glob("*.safetensors"))
    file.write_bytes((2**60).to_bytes(8, "little") + file.read_bytes()[8:])


def edit_index(change):
    def edit(folder):
        file = folder / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        change(index["weight_map"])
        file.write_text(json.dumps(index))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "is no whole safetensors file"),
        (huge_header, "is no whole safetensors file"),
        (edit_index(lambda names: names.update({"lm_head.weight": "../evil.safetensors"})), "in this folder"),
        (edit_index(lambda names: names.update({"lm_head.weight": "other.safetensors"})), "is missing"),
        (edit_index(lambda names: names.pop("lm_head.weight")), "not listed: lm_head.weight"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "is no JSON"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "has neither"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2"}'), "of no known family"),
    ],
)
def test_a_damaged_folder_is_named(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_hf(tiny(), folder)


def test_a_model_without_memory_is_refused(folder):
    with pytest.raises(ValueError, match=r"on the meta device: .*to_empty"):
        load_hf(tiny().to("meta"), folder)


@pytest.mark.parametrize("size", ["5XB", "0", "-1GB", 0, "GB"])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(ValueError, match="max_shard_size"):
        save_hf(tiny(), tmp_path / "out", family="nemotron_h", max_shard_size=size)


def test_an_occupied_folder_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("do not lose")
    with pytest.raises(ValueError, match="exists and is not empty"):
        save_hf(tiny(), tmp_path / "out", family="nemotron_h")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_a_family_of_ones_own_with_parts_and_a_transpose(tmp_path):
    family = Family(
        name="mine",
        model_types=("mine",),
        rules=(
            Rule("experts.gate_up_proj", ("moe.{e}.gate", "moe.{e}.up"), transpose=True),
            Rule("experts.down_proj", "moe.all_down", transpose=True),
        ),
    )
    model = nn.Module()
    model.experts = nn.Module()
    gate, up, down = torch.randn(E, F, D), torch.randn(E, F, D), torch.randn(E, D, F)
    model.experts.gate_up_proj = nn.Parameter(torch.cat([gate, up], dim=1))
    model.experts.down_proj = nn.Parameter(down)
    save_hf(model, tmp_path / "out", family=family)
    want = {"moe.all_down": down.transpose(1, 2).contiguous()}
    for e in range(E):
        want |= {f"moe.{e}.gate": gate[e].T.contiguous(), f"moe.{e}.up": up[e].T.contiguous()}
    assert_equal(read_folder(tmp_path / "out"), want)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    load_hf(model, tmp_path / "out", family=family)
    assert_equal(dict(model.state_dict()), state)


def test_families_of_plugins_are_known_when_a_registry_is_given():
    from moe_core.plugins import load_registry

    assert set(families(load_registry())) >= {"nemotron_h", "mixtral", "qwen3_moe", "deepseek_v3"}


# -- under layouts -----------------------------------------------------------------------------------------


def sharded(layout, experts=E):
    """The tiny model under a layout: "fsdp" over all ranks, "hsdp", or "ep" (2) carved out of FSDP."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard

    model, ranks = tiny(experts), dist.get_world_size()
    if layout == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard")))
    if layout == "fsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    assert layout == "ep"
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp_shard_mod_ep", "ep"))
    stacks = model.backbone.layers[1].mixer.experts
    for name, parameter in list(stacks.named_parameters()):
        local = parameter.detach().chunk(2)[mesh.get_local_rank("ep")].clone()
        stacks.register_parameter(
            name,
            nn.Parameter(
                DTensor.from_local(local, mesh["ep"], (Shard(0),), shape=parameter.shape, stride=parameter.stride())
            ),
        )
    fully_shard(stacks, mesh=mesh["dp_shard_mod_ep"])
    return fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), ignored_params=set(stacks.parameters()))


def round_trip(layout, source, target, experts=E):
    """Load, report the full values, the bytes that were read, and save again."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    import ckpt_layout._hf_folder as hf_folder
    from ckpt_layout import load_hf, save_hf

    model = sharded(layout, experts)
    read = hf_folder.HfFolder.read
    numbers = []

    def counting(self, key, block, out=None):
        values = read(self, key, block, out)
        numbers.append(values.numel())
        return values

    hf_folder.HfFolder.read = counting
    try:
        load_hf(model, source)
    finally:
        hf_folder.HfFolder.read = read
    held = sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in model.state_dict().values())
    save_hf(model, target, family="nemotron_h", max_shard_size=400)
    if dist.get_world_size() == 4 and layout == "ep":  # one rank per region: torch can put it together
        full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    else:
        full = None
    return sum(numbers), held, full


@pytest.mark.parametrize("experts", [5, 10])
@pytest.mark.parametrize(("layout", "ranks"), [("fsdp", 4), ("ep", 4), ("ep", 2), ("hsdp", 4)])
def test_a_layout_reads_its_own_bytes_and_writes_the_whole_model(tmp_path, layout, ranks, experts):
    tensors = disk_tensors(experts)
    source = write_folder(tmp_path / "in", tensors)
    results = run_ranks(round_trip, ranks, layout, source, tmp_path / "out", experts)
    for read, held, _ in results:
        assert read == held
    assert_equal(read_folder(tmp_path / "out"), tensors)
    if results[0][2] is not None:
        assert_equal(results[0][2], expected_state(tensors, experts))


def test_a_rank_without_experts_in_bf16(tmp_path):
    """5 experts on 4 ranks: the last holds none; stacks in bf16, all else fp32, from a file in fp32 and back to one."""
    tensors = disk_tensors()
    source = write_folder(tmp_path / "in", tensors)

    def there_and_back(source, target):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from ckpt_layout import load_hf, save_hf, split_experts

        model, mesh = tiny(), init_device_mesh("cpu", (dist.get_world_size(),))
        stacks = model.backbone.layers[1].mixer.experts.to(torch.bfloat16)
        fully_shard(stacks, mesh=mesh)
        fully_shard(model, mesh=mesh)
        load_hf(model, source)
        save_hf(model, target, family="nemotron_h", max_shard_size=300)
        return list(split_experts(stacks.up_proj))

    assert run_ranks(there_and_back, 4, source, tmp_path / "out") == [[0, 1], [2, 3], [4], []]
    want = {key: value.bfloat16() if ".experts." in key else value for key, value in tensors.items()}
    assert_equal(read_folder(tmp_path / "out"), want)


def test_a_diverged_router_bias_is_never_exported(tmp_path):
    source = write_folder(tmp_path / "in", disk_tensors())

    def drift(source, target):
        import torch.distributed as dist

        from ckpt_layout import load_hf, save_hf

        model = sharded("fsdp")
        load_hf(model, source)
        if dist.get_rank() == 1:
            model.backbone.layers[1].mixer.router.bias[2] += 0.002
        try:
            save_hf(model, target, family="nemotron_h")
        except ValueError as error:
            return type(error).__name__, str(error)

    for name, message in run_ranks(drift, 3, source, tmp_path / "out"):
        assert name == "ReplicaMismatchError"
        assert "backbone.layers.1.mixer.router.bias: ranks 0,2 / 1" in message
        assert "router.weight" not in message
    assert not (tmp_path / "out").exists()


def test_hsdp_replicas_that_drifted_are_named():
    def drift():
        import torch.distributed as dist

        from ckpt_layout import assert_replicated

        model = sharded("hsdp")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(1.0)
            model.backbone.layers[1].mixer.router.bias.fill_(0)
            assert_replicated(model)
            if dist.get_rank() == 3:
                model.lm_head.weight.to_local()[0, 0] += 1
        try:
            assert_replicated(model)
        except ValueError as error:
            return str(error)

    for message in run_ranks(drift, 4):
        assert message.endswith("lm_head.weight: ranks 1 / 3")


def test_a_difference_along_one_axis_of_a_mesh_is_raised_on_all_ranks():
    def drift():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from ckpt_layout import assert_replicated

        mesh, model = init_device_mesh("cpu", (2, 2)), nn.Linear(2, 2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
            assert_replicated(model, mesh)
            if dist.get_rank() == 1:
                model.bias[0] = 9
        try:
            assert_replicated(model, mesh)
        except ValueError as error:
            return str(error)

    for message in run_ranks(drift, 4, timeout=20):
        assert message.endswith("bias: ranks 0 / 1; bias: ranks 1 / 3")


def test_a_rank_that_cannot_write_fails_all_and_leaves_no_folder(tmp_path):
    source = write_folder(tmp_path / "in", disk_tensors())

    def full_disk(source, target):
        import torch.distributed as dist

        import ckpt_layout._hf_folder as files
        from ckpt_layout import load_hf, save_hf

        model = sharded("fsdp")
        load_hf(model, source)
        original = files._write_all

        def failing(file, offset, data):
            raise OSError(28, "No space left on device")

        if dist.get_rank() == 1:
            files._write_all = failing
        try:
            save_hf(model, target, family="nemotron_h")
        except Exception as error:
            return type(error).__name__, str(error)
        finally:
            files._write_all = original

    first, second = run_ranks(full_disk, 2, source, tmp_path / "out")
    assert first[0] == "PeerError"
    assert "rank 1: OSError: [Errno 28] No space left" in first[1]
    assert second[0] == "OSError"
    assert not (tmp_path / "out").exists()

"""From a Hugging Face folder through training on four ranks and out again, at numbers of experts that do not divide."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

WORDS = (
    'transform=[{type="expert_parallelized"}, {type="fsdp", separate_lm_head=true}]',
    "tracker=[]",
    'model.pattern="ME"',
    "model.hidden_size=32",
    "model.mamba_num_heads=2",
    "model.mamba_head_dim=16",
    "model.mamba_num_groups=1",
    "model.ssm_state_size=8",
    "model.expert_hidden_size=24",
    "model.shared_expert_hidden_size=40",
    "data.sequence_length=16",
    "data.global_batch_size=4",
    "clipper.max_norm=0.5",
)
MOE = "backbone.layers.1.mixer."


def source(path: Path, experts: int) -> dict[str, torch.Tensor]:
    """A folder as the hub has it, written by safetensors alone; with a router bias that is not zero."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(experts)

    def values(*shape: int, scale: float = 0.1) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors = {
        "backbone.embeddings.weight": values(256, 32),
        "backbone.norm_f.weight": values(32, scale=1.0),
        "lm_head.weight": values(256, 32),
        "backbone.layers.0.norm.weight": values(32, scale=1.0),
        "backbone.layers.0.mixer.in_proj.weight": values(2 * 32 + 2 * 8 + 2, 32),
        "backbone.layers.0.mixer.conv1d.weight": values(32 + 2 * 8, 1, 4),
        "backbone.layers.0.mixer.conv1d.bias": values(32 + 2 * 8),
        "backbone.layers.0.mixer.A_log": values(2),
        "backbone.layers.0.mixer.D": values(2),
        "backbone.layers.0.mixer.dt_bias": values(2),
        "backbone.layers.0.mixer.norm.weight": values(32, scale=1.0),
        "backbone.layers.0.mixer.out_proj.weight": values(32, 32),
        "backbone.layers.1.norm.weight": values(32, scale=1.0),
        f"{MOE}gate.weight": values(experts, 32),
        f"{MOE}gate.e_score_correction_bias": values(experts, scale=0.01),
        f"{MOE}shared_experts.up_proj.weight": values(40, 32),
        f"{MOE}shared_experts.down_proj.weight": values(32, 40),
    }
    for expert in range(experts):
        tensors[f"{MOE}experts.{expert}.up_proj.weight"] = values(24, 32)
        tensors[f"{MOE}experts.{expert}.down_proj.weight"] = values(32, 24)
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "nemotron_h"}))
    return tensors


def trained(words: list[str], folders: list[tuple[str, str, list[str]]], device_type: str) -> list[dict[str, Any]]:
    """For each (source, target, more words): load, forward, three steps, export; what each rank then holds."""
    import shutil

    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from ckpt_layout import load_hf, save_hf
    from moe_core import load_config
    from nemotron_nano.train.assemble import assemble

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()

    results = []
    for origin, target, more in folders:
        run = assemble(load_config((), [*words, *more]), device_type=device_type)
        trainer = run.config["trainer"].build(run)
        with torch.no_grad():
            for tensor in run.model.state_dict().values():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(float("nan"))
        load_hf(run.model, origin)
        run.model.eval()
        with torch.no_grad():
            logits = run.model(torch.arange(24, device=device_type).view(2, 12) * 7 % 256).cpu()
        losses = [trainer._step(run, step)["loss"] for step in range(3)]
        after = {name: whole(tensor) for name, tensor in run.model.state_dict().items()}
        save_hf(run.model, target, family="nemotron_h", max_shard_size="20KB")
        results.append({"logits": logits, "losses": losses, "state": after})
        del run, trainer
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree("runs", ignore_errors=True)
    return results


def as_on_disk(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the file of a model in this state must hold, worked out by hand."""
    disk = {}
    for name, value in state.items():
        if ".experts." in name:
            for expert, part in enumerate(value):
                disk[name.replace(".experts.", f".experts.{expert}.") + ".weight"] = part
        else:
            name = name.replace(".mixer.ssm.", ".mixer.").replace(".router.bias", ".gate.e_score_correction_bias")
            disk[name.replace(".router.weight", ".gate.weight")] = value
    return disk


@pytest.mark.parametrize("experts", [5, 10, 8])
def test_every_tensor_of_the_export_is_what_training_made_of_it(experts, tmp_path, on_ranks, device_type):
    from safetensors.torch import load_file

    original = source(tmp_path / "in", experts)
    number = f"model.num_experts={experts}"
    alone = [(str(tmp_path / "in"), str(tmp_path / "one"), [number])]
    (reference,) = on_ranks(trained, 1, list(WORDS), alone, device_type)[0]
    # 5 experts would leave one of four EP ranks empty, which is refused
    degrees = [ep for ep in (1, 2, 4) if (experts, ep) != (5, 4)]
    folders = [(str(tmp_path / "in"), str(tmp_path / f"out{ep}"), [number, f"mesh.ep={ep}"]) for ep in degrees]
    by_rank = on_ranks(trained, 4, list(WORDS), folders, device_type)

    for position, ep in enumerate(degrees):
        mine = [rank[position] for rank in by_rank]
        files = [load_file(file) for file in sorted((tmp_path / f"out{ep}").glob("*.safetensors"))]
        assert len(files) > 2
        written = {key: value for file in files for key, value in file.items()}
        assert written.keys() == original.keys()
        for rank in mine:
            assert torch.allclose(rank["logits"], reference["logits"], rtol=1e-5, atol=1e-5)
            assert rank["losses"] == pytest.approx(reference["losses"], rel=1e-5)
            for key, value in as_on_disk(rank["state"]).items():  # the router bias too: on every rank
                assert torch.equal(written[key], value), (ep, key)
        for key, value in as_on_disk(reference["state"]).items():
            assert torch.allclose(written[key], value, rtol=1e-3, atol=1e-4), (ep, key)
        moved = [key for key in original if not torch.equal(written[key], original[key])]
        assert f"{MOE}gate.e_score_correction_bias" in moved
        assert len(moved) > len(original) // 2

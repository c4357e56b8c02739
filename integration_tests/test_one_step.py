"""One optimizer step of the whole trainer, under every layout of up to 4 ranks, against one process."""

from typing import Any

import pytest
import torch

WORDS = [
    'transform=[{type="expert_parallelized"}, {type="fsdp", separate_lm_head=true}]',
    "tracker=[]",
    "data.sequence_length=64",
    "data.global_batch_size=8",
    "clipper.max_norm=0.5",
    "loss.chunk_tokens=96",
]


def step_of_a_run(words: list[str], device_type: str) -> dict[str, Any]:
    """The loss, the norm, every gradient after clipping and every weight after the step, whole, by name."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from moe_core import load_config, update_router_bias
    from nemotron_nano.train.assemble import assemble
    from nemotron_nano.train.measure import sum_over_ranks
    from nemotron_nano.train.pretrain import accumulate_gradients

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()

    run = assemble(load_config((), words), device_type=device_type)
    assert dist.get_world_size() == run.mesh.size()
    outputs = accumulate_gradients(run, run.data.train_batches(0))
    norm = run.clipper(run.model.parameters())
    gradients = {name: whole(p.grad) for name, p in run.model.named_parameters() if p.grad is not None}
    run.optimizer.step()
    update_router_bias(run.model, run.sub_mesh("dp"), rate=1e-3)
    return {
        "loss": sum_over_ranks(outputs, run.sub_mesh("dp"), 0).mean("cross_entropy"),
        "norm": norm.item(),
        "gradients": gradients,
        "weights": {name: whole(tensor) for name, tensor in run.model.state_dict().items()},
    }


@pytest.fixture(scope="module")
def one_process(on_ranks, device_type):
    return on_ranks(step_of_a_run, 1, WORDS, device_type)[0]


LAYOUTS = [
    (2, ["mesh.ep=1"]),
    (2, ["mesh.ep=2"]),
    (4, ["mesh.ep=1"]),
    (4, ["mesh.ep=2"]),
    (4, ["mesh.ep=4"]),
    (4, ["mesh.ep=2", "mesh.dp_replicate=2"]),
    (4, ["mesh.ep=1", "mesh.dp_replicate=2"]),
    (2, ["mesh.ep=2", "data.microbatches=2"]),
    (2, ["mesh.ep=2", "model.num_experts=5"]),
]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=lambda value: str(value).replace("mesh.", ""))
def test_a_step_is_that_of_one_process(one_process, on_ranks, device_type, world_size, layout):
    expected = one_process
    if changed := [word for word in layout if word.startswith("model.")]:
        (expected,) = on_ranks(step_of_a_run, 1, WORDS + changed, device_type)
    results = on_ranks(step_of_a_run, world_size, WORDS + layout, device_type)
    assert expected["norm"] > 0.5, "clipping is not active"
    for result in results:
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert result["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert result["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            distance = (result["gradients"][name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
            assert distance < 1e-5, name
        biases = [name for name in expected["weights"] if name.endswith("router.bias")]
        assert biases
        for name in biases:
            assert torch.equal(result["weights"][name], expected["weights"][name]), name


def test_a_layout_after_another_one_in_the_same_processes(on_ranks, device_type):
    """The groups of an earlier mesh of the same shape are gone, and nothing may remember them."""
    first = on_ranks(step_of_a_run, 4, [*WORDS, "mesh.ep=2"], device_type)
    second = on_ranks(step_of_a_run, 4, [*WORDS, "mesh.ep=4"], device_type)
    assert second[3]["norm"] == pytest.approx(first[0]["norm"], rel=1e-5)


def test_the_comparison_sees_a_wrong_gradient_scale(one_process, on_ranks, device_type):
    """What the test above must catch: expert gradients averaged over too few ranks."""

    def with_wrong_scale(words: list[str], device_type: str) -> dict[str, Any]:
        from unittest import mock

        from torch.distributed.fsdp import FSDPModule

        # what divides where the experts' shard axis has several ranks, and where it has one
        with (
            mock.patch.object(FSDPModule, "set_gradient_divide_factor"),
            mock.patch.object(FSDPModule, "set_all_reduce_hook"),
        ):
            return step_of_a_run(words, device_type)

    for world_size in (2, 4):
        result = on_ranks(with_wrong_scale, world_size, [*WORDS, "mesh.ep=2"], device_type)[0]
        assert abs(result["norm"] / one_process["norm"] - 1) > 1e-3

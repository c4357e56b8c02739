"""Experts that some ranks or microbatches do not use: the same collectives everywhere, and the right gradients."""

import pytest

from moe_core.testing import RankFailed, run_ranks

D, EXPERTS = 6, 5

USED = [  # [rank][microbatch] -> experts; 4 is used by nobody
    [[0, 1], [1, 2]],
    [[3], [0, 3]],
]


def _model(stem):
    """Each expert is a module of its own, and runs only if a token asks for it; so is its gate, which stays fp32."""
    import torch
    from torch import nn

    class Gate(nn.Module):
        keep_in_fp32 = True

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D))

        def forward(self, hidden):
            return hidden.to(self.weight.dtype) * self.weight

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(EXPERTS))
            self.gates = nn.ModuleList(Gate() for _ in range(EXPERTS))

        def forward(self, hidden, *, used):
            return hidden + sum(self.gates[e](self.experts[e](hidden)).tanh().to(hidden.dtype) for e in used)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(D, D)
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, hidden, used):
            hidden = self.stem(hidden) if stem != "none" else hidden.to(self.layers[0].experts[0].weight.dtype)
            for layer in self.layers:
                hidden = layer(hidden, used=used)
            return hidden

    torch.manual_seed(4)
    model = Model()
    model.stem.requires_grad_(stem == "trained")
    return model


def _tokens(rank, index):
    import torch

    return torch.randn(3, D, generator=torch.Generator().manual_seed(10 * rank + index))


def _errors(param_dtype, microbatches, checkpoint, sync_each, stem):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from fsdp_ep import apply_activation_checkpointing, fully_shard_moe, set_requires_gradient_sync

    reference = _model(stem).double()
    for rank in range(2):
        for index in range(microbatches):
            reference(_tokens(rank, index).double(), USED[rank][index]).square().sum().div(2).backward()

    model = _model(stem)
    apply_activation_checkpointing(model, checkpoint)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, param_dtype), reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    fully_shard_moe(model, dp_mesh=mesh, mp_policy=policy)
    for index in range(microbatches):
        set_requires_gradient_sync(model, sync_each or index == microbatches - 1)
        used = USED[dist.get_rank()][index]
        model(_tokens(dist.get_rank(), index), used).float().square().sum().backward()
    errors = {}
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if name.startswith("stem.") and stem != "trained":
            continue
        gradient = parameter.grad.full_tensor()
        if expected.grad is None:
            assert not gradient.any(), name
        else:
            errors[name] = ((gradient - expected.grad).norm() / expected.grad.norm()).item()
    return errors


def _several(cases):
    return [_errors(*case) for case in cases]


CASES = [
    ("float32", 1, "none", False, "trained"),
    ("float32", 2, "none", False, "trained"),
    ("float32", 2, "full", False, "trained"),
    ("float32", 2, "none", True, "trained"),
    ("bfloat16", 2, "none", False, "trained"),  # accumulated gradients are fp32, those of a late expert would be bf16
    ("bfloat16", 2, "selective", False, "trained"),
    # nothing that comes into the first block requires a gradient
    ("float32", 2, "none", False, "frozen"),
    ("float32", 1, "full", False, "none"),
    ("float32", 2, "selective", True, "none"),
    ("bfloat16", 2, "none", False, "frozen"),
]


def test_gradients_are_those_of_one_process_whatever_was_used_where():
    for results in run_ranks(_several, 2, CASES, timeout=30):
        for (dtype, microbatches, *_, stem), errors in zip(CASES, results, strict=True):
            used = 2 * 3 * (2 + microbatches)  # in two layers, by any rank
            assert len(errors) == used + (2 if stem == "trained" else 0)
            assert max(errors.values()) < (1e-5 if dtype == "float32" else 0.05), errors


def _without_the_filling(case):
    import fsdp_ep._fully_shard as under_test

    original, under_test.fill_unused_gradients = under_test.fill_unused_gradients, lambda *_: None
    try:
        return _errors(*case)
    finally:
        under_test.fill_unused_gradients = original


def test_without_the_filling_they_are_refused_by_fsdp():
    with pytest.raises(RankFailed, match="uniform gradient dtype"):
        run_ranks(_without_the_filling, 2, ("bfloat16", 2, "none", False, "trained"), timeout=20)

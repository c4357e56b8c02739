"""The layers of moe-core, spread by ep-dispatch, under the units of this package: one process is the reference."""

import pytest

from moe_core.testing import run_ranks

D = 12


def _model(num_experts):
    import torch
    from torch import nn

    from moe_core import MoE

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(D, eps=1e-5)
            self.mixer = MoE(
                dim=D, num_experts=num_experts, top_k=2, hidden_dim=20, shared_hidden_dim=8, scale=2.5, normalize=True
            )

        def forward(self, hidden):
            return hidden + self.mixer(self.norm(hidden))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(29, D)
            self.layers = nn.ModuleList(Block() for _ in range(2))
            self.lm_head = nn.Linear(D, 29, bias=False)

        def forward(self, tokens):
            hidden = self.embedding(tokens)
            for layer in self.layers:
                hidden = layer(hidden)
            return self.lm_head(hidden)

    torch.manual_seed(5)
    return Model()


def _compared(num_experts, degrees, checkpoint, dtype, routing):
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from ep_dispatch import shard_experts
    from ep_mesh import MeshConfig, build_mesh, resolve_sub_mesh
    from fsdp_ep import apply_activation_checkpointing, fully_shard_moe, set_requires_gradient_sync

    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh = build_mesh(MeshConfig(**degrees).resolve(world_size, num_experts), "cpu")
    ep_mesh = resolve_sub_mesh(mesh, "ep")
    tokens = torch.randint(0, 29, (world_size, 2, 9), generator=torch.Generator().manual_seed(8))
    if routing == "one expert":
        tokens[:] = 3

    def loss(model, batch):
        logits = model(batch).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2), (batch.flatten() * 5 + 1) % 29, reduction="sum")

    def prepared(model):
        for layer in model.layers:
            layer.mixer.router.bias.copy_(torch.linspace(-0.3, 0.3, num_experts))
        return model

    reference = prepared(_model(num_experts))
    (loss(reference, tokens) / tokens.numel()).backward()

    model = prepared(_model(num_experts))
    shard_experts(model, ep_mesh)
    apply_activation_checkpointing(model, checkpoint)
    hsdp = degrees.get("dp_replicate", 1) > 1
    fully_shard_moe(
        model,
        dp_mesh=resolve_sub_mesh(mesh, ("dp_replicate", "dp_shard") if hsdp else "dp_shard"),
        ep_mesh=ep_mesh,
        expert_dp_mesh=resolve_sub_mesh(mesh, ("dp_replicate", "dp_shard_mod_ep") if hsdp else "dp_shard_mod_ep"),
        mp_policy=MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32),
    )
    for index in range(2):
        set_requires_gradient_sync(model, index == 1)
        (loss(model, tokens[rank, index]) * world_size / tokens.numel()).backward()
    counts = [layer.mixer.router.tokens_per_expert.sum().item() for layer in model.layers]
    assert counts == [2 * 9 * 2] * 2, "counted once a token and microbatch, also under checkpointing"
    errors = {}
    for (name, parameter), (other, expected) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert name == other
        scale = expected.grad.norm().clamp_min(1e-12)
        errors[name] = ((parameter.grad.full_tensor() - expected.grad).norm() / scale).item()
    return errors


@pytest.mark.parametrize(("num_experts", "degrees", "checkpoint", "routing"), [
    (6, {"ep": 2}, "none", "by score"),
    (6, {"ep": 2}, "full", "by score"),
    (10, {"ep": 4}, "selective", "by score"),  # 3, 3, 3, 1
    (5, {"dp_replicate": 2, "ep": 2}, "full", "by score"),
    (5, {"dp_replicate": 2, "ep": 2}, "none", "one expert"),
    (6, {}, "full", "by score"),
])  # fmt: skip
def test_every_gradient_equals_one_process(num_experts, degrees, checkpoint, routing):
    for errors in run_ranks(_compared, 4, num_experts, degrees, checkpoint, "float32", routing):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(("world_size", "degrees", "checkpoint"), [
    (4, {"ep": 2}, "full"),
    (2, {"ep": 2}, "none"),
    (1, {}, "full"),
])  # fmt: skip
def test_bf16_is_close(world_size, degrees, checkpoint):
    for errors in run_ranks(_compared, world_size, 6, degrees, checkpoint, "bfloat16", "one expert"):
        assert max(errors.values()) < 0.2, errors  # rounding; a wrong scale is 0.5
        assert max(errors.values()) > 1e-4, "nothing was computed in bf16"

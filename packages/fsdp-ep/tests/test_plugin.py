"""The transforms as a trainer applies them: from config and run alone, for 1 rank as for several."""

import pytest

from fsdp_ep._plugin import ActivationCheckpointingConfig, FSDPConfig, moe_components
from moe_core.testing import RankFailed, run_ranks


def test_the_components_load():
    found = {(c.kind, c.name): c for c in moe_components()}
    assert set(found) == {("transform", "fsdp"), ("transform", "activation_checkpointed")}
    assert found["transform", "fsdp"].load_config_class() is FSDPConfig
    assert found["transform", "activation_checkpointed"].load_config_class() is ActivationCheckpointingConfig
    assert all(callable(component.load_factory()) for component in found.values())


def test_every_is_at_least_one():
    with pytest.raises(ValueError, match="every"):
        ActivationCheckpointingConfig(every=0)


def _transformed(degrees, **fields):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    from ep_mesh import MeshConfig, build_mesh, resolve_sub_mesh
    from moe_core.plugins import Run

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            self.lm_head = nn.Linear(6, 11, bias=False)

        def forward(self, tokens):
            hidden = self.embedding(tokens)
            for layer in self.layers:
                hidden = layer(hidden).relu()
            return self.lm_head(hidden)

    torch.manual_seed(1)
    mesh = build_mesh(MeshConfig(**degrees).resolve(dist.get_world_size()), "cpu")
    run = Run({}, world_size=dist.get_world_size(), rank=dist.get_rank(), sub_mesh=resolve_sub_mesh)
    run = run.with_part("mesh", mesh).with_part("model", Model())
    components = {component.name: component for component in moe_components()}
    for name, config in (
        ("activation_checkpointed", ActivationCheckpointingConfig()),
        ("fsdp", FSDPConfig(**fields)),
    ):
        run = run.with_part("model", components[name].load_factory()(config, run))
    tokens = torch.arange(8) % 11
    run.model(tokens).float().square().mean().backward()
    gradient = run.model.embedding.weight.grad.full_tensor()
    units = [name for name, module in run.model.named_modules() if isinstance(module, FSDPModule)]
    return units, run.model.embedding.weight.device_mesh.mesh_dim_names, gradient


def test_a_model_without_experts():
    """At degree 1 a config need not say so; at 2 the mesh has an axis for them."""
    with pytest.raises(RankFailed, match="no parameter is a DTensor"):
        run_ranks(_transformed, 2, {"ep": 2})
    for units, _, _ in run_ranks(lambda: _transformed({"ep": 2}, require_experts=False), 2):
        assert units == ["", "embedding", "layers.0", "layers.1"]


def test_fields_and_meshes():
    ((units, axes, expected),) = run_ranks(_transformed, 1, {})
    assert units == ["", "embedding", "layers.0", "layers.1"]
    assert axes == ("dp_shard",)

    def several():
        return [
            _transformed({"dp_replicate": 2}, separate_lm_head=True, reshard_after_forward=False),
            _transformed({}, cpu_offload=True),
            _transformed({}, param_dtype="bfloat16"),
        ]

    for hsdp, offloaded, low in run_ranks(several, 2):
        assert hsdp[0] == ["", "embedding", "layers.0", "layers.1", "lm_head"]
        assert hsdp[1] == ("dp_replicate", "dp_shard")
        assert offloaded[1] == ("dp_shard",)
        for _, _, gradient in (hsdp, offloaded):
            assert (gradient - expected).norm() < 1e-6 * expected.norm()
        assert 1e-5 < (low[2] - expected).norm() / expected.norm() < 0.05

"""The transforms that fsdp-ep registers with the plugin host: "fsdp" and "activation_checkpointed"."""

from typing import TYPE_CHECKING, Literal

import attrs

from moe_core.plugins import Component, hookimpl

if TYPE_CHECKING:
    from torch import nn

    from moe_core.plugins import Run

_HERE = "fsdp_ep._plugin"


@hookimpl
def moe_components() -> list[Component]:
    return [
        Component("transform", "fsdp", config=f"{_HERE}:FSDPConfig", factory=f"{_HERE}:fsdp"),
        Component(
            "transform",
            "activation_checkpointed",
            config=f"{_HERE}:ActivationCheckpointingConfig",
            factory=f"{_HERE}:activation_checkpointed",
        ),
    ]


@attrs.frozen
class FSDPConfig:
    """FSDP2 units over the run's mesh; experts on the mesh of those who hold the same ones."""

    separate_lm_head: bool = False
    """Make the head a unit of its own, for a loss that calls it outside of the model's forward."""
    reshard_after_forward: bool = True
    """Free gathered parameters between forward and backward: less memory, one more gather a unit."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """What parameters are gathered and computed in; modules that must stay fp32 do."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """What gradients are reduced in."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    require_experts: bool = True
    """With mesh.ep above 1, refuse a model whose experts are not split; false for one without MoE layers."""


@attrs.frozen
class ActivationCheckpointingConfig:
    """Which activations are computed again in backward instead of being kept."""

    mode: Literal["none", "full", "every_nth", "selective"] = "full"
    """"full": every block; "every_nth": every n-th; "selective": all but the expensive operators' results."""
    every: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """n of "every_nth": 2 checkpoints every second block."""


def fsdp(config: FSDPConfig, run: "Run") -> "nn.Module":
    """Shards `run.model` over `dp_shard`, with `dp_replicate` outside of it where that is larger than 1."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    from fsdp_ep._fully_shard import fully_shard_moe
    from fsdp_ep._units import find_blocks, find_embedding

    hsdp, ep_mesh = run.sub_mesh("dp_replicate").size() > 1, run.sub_mesh("ep")
    blocks = find_blocks(run.model)
    return fully_shard_moe(
        run.model,
        dp_mesh=run.sub_mesh(("dp_replicate", "dp_shard") if hsdp else "dp_shard"),
        # at degree 1 a config need not name a transform that splits experts, nor a model that has any
        ep_mesh=ep_mesh if ep_mesh.size() > 1 else None,
        expert_dp_mesh=run.sub_mesh(("dp_replicate", "dp_shard_mod_ep") if hsdp else "dp_shard_mod_ep"),
        blocks=blocks,
        embedding=find_embedding(run.model, blocks),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.param_dtype), reduce_dtype=getattr(torch, config.reduce_dtype)
        ),
        reshard_after_forward=config.reshard_after_forward,
        separate_lm_head=config.separate_lm_head,
        offload_policy=CPUOffloadPolicy(pin_memory=run.device_type != "cpu") if config.cpu_offload else None,
        require_experts=config.require_experts,
    )


def activation_checkpointed(config: ActivationCheckpointingConfig, run: "Run") -> "nn.Module":
    """Checkpoints the blocks of `run.model`."""
    from fsdp_ep._checkpointing import apply_activation_checkpointing

    return apply_activation_checkpointing(run.model, config.mode, config.every)

"""`fully_shard_moe`: FSDP2 over a model whose expert stacks live on another mesh."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fsdp_ep._gradients import fill_unused_gradients, set_gradient_scale
from fsdp_ep._unit_rules import ShardPlacement, check_dtypes, check_placements, check_ties, owned_parameters
from fsdp_ep._units import ShardingError, Units, find_units


def fully_shard_moe(
    model: nn.Module,
    *,
    dp_mesh: DeviceMesh,
    ep_mesh: DeviceMesh | None = None,
    expert_dp_mesh: DeviceMesh | None = None,
    blocks: Iterable[nn.Module] | None = None,
    head: nn.Module | None = None,
    embedding: nn.Module | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    separate_lm_head: bool = False,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    shard_placement_fn: ShardPlacement | None = None,
    require_experts: bool = True,
) -> nn.Module:
    """Shard `model` in place with FSDP2 so that a step equals one process on the global batch.

    Units: each expert stack on `expert_dp_mesh`; all modules that must stay fp32 together (see below); each
    block; the embedding; the head; and the model itself with the rest. Every gradient becomes the mean over
    all data-parallel ranks, those of experts included, on every mesh and with gloo as with NCCL. The model
    may be on the meta device; materialise it afterwards (`to_empty`, then initialise).

    A module with a true attribute `keep_in_fp32` (a router, Mamba's decay rates) keeps its parameters fp32 in
    storage and in use where the others are not. FSDP wants one dtype a unit, so all such modules form one
    unit: two more collectives a step for the whole model. They have to return new tensors, not their
    parameters themselves.

    Args:
        model: changed in place. Its forward has to run before anything else calls one of its units.
        dp_mesh: all data-parallel ranks: 1-D (shard), or 2-D (replicate, shard) for HSDP.
        ep_mesh: the 1-D mesh that expert stacks are `Shard(0)` DTensors on, which is how they are found. On
            one rank there are none, and no unit is made for them.
        expert_dp_mesh: the ranks that hold the same experts: `dp_mesh` without the ep axis; 1-D or 2-D alike.
        blocks: modules that become a unit each; default: the children of the outermost `nn.ModuleList`s.
        head: with `separate_lm_head`, the module that becomes a unit; default: Hugging Face's accessor, or
            `model.lm_head`.
        embedding: the module that becomes a unit; default: it stays with the root.
        mp_policy: precision of all units; expert units do not cast their inputs (routing weights are fp32). With a
            16-bit `param_dtype` and no `reduce_dtype` gradients are reduced in fp32.
        reshard_after_forward: free gathered parameters between forward and backward. The root and the head
            are kept, because backward begins with them.
        separate_lm_head: for a loss that calls the head itself, outside of the model's forward.
        offload_policy: FSDP2's, for all units.
        ignored_params: parameters to leave alone; `all_reduce_gradients` reduces what they get.
        shard_placement_fn: FSDP2's, for all units: which dim of a parameter is sharded; default: dim 0, which may
            be uneven, with nothing on the last ranks. `Shard(1)` spreads a stack of fewer experts than ranks.
        require_experts: False where the model need not have any though there is an `ep_mesh`: a stage of a pipeline,
            or a model without MoE layers.

    Returns:
        The model.

    Raises:
        ShardingError: a model that is sharded already, meshes that do not fit together, no block, an `ep_mesh` and
            no experts (on one rank too), an ep rank without an expert, a tied weight in two units, a unit stored in
            two dtypes, a dim that does not divide.

    Source: FSDP2 (PyTorch); expert stacks on their own mesh as in TorchTitan.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ShardingError("model", type(model).__name__, "has FSDP units already", "shard a model only once")
    policy = mp_policy or MixedPrecisionPolicy()
    if policy.reduce_dtype is None and policy.param_dtype in (torch.bfloat16, torch.float16):
        # FSDP's own default is the dtype of the parameters, which loses small gradients of many ranks in a sum
        policy = dataclasses.replace(policy, reduce_dtype=torch.float32)
    units = find_units(
        model,
        ep_mesh=ep_mesh,
        blocks=blocks,
        head=head,
        embedding=embedding,
        param_dtype=policy.param_dtype,
        separate_lm_head=separate_lm_head,
        require_experts=require_experts,
    )
    if units.experts:
        assert ep_mesh is not None
        _check_meshes(dp_mesh, ep_mesh, expert_dp_mesh)
    expert_mesh = expert_dp_mesh or dp_mesh
    groups = units.modules()
    parameters = owned_parameters(model, groups, ignored_params or ())
    check_ties(parameters)
    check_dtypes(parameters)
    check_placements(
        parameters,
        shard_placement_fn,
        lambda unit: expert_mesh if unit is not None and groups[unit][0] in units.experts else dp_mesh,
    )
    shared = {
        "offload_policy": offload_policy or OffloadPolicy(),
        "ignored_params": ignored_params,
        "shard_placement_fn": shard_placement_fn,
    }
    experts_policy = _without_casts(policy, policy.param_dtype)
    for module in units.experts:
        _unit([module], expert_mesh, dp_mesh.size(), experts_policy, reshard_after_forward, shared)
    if units.islands:
        # gathered once and kept: it is small, and its modules run all through the model
        _unit(units.islands, dp_mesh, dp_mesh.size(), _without_casts(policy, None), False, shared)
    for module in [*units.blocks, *([units.embedding] if units.embedding is not None else [])]:
        _unit([module], dp_mesh, dp_mesh.size(), policy, reshard_after_forward, shared)
    if units.head is not None:
        _unit([units.head], dp_mesh, dp_mesh.size(), policy, False, shared)
    _unit([model], dp_mesh, dp_mesh.size(), policy, None if reshard_after_forward else False, shared)
    _set_prefetch(model, units)
    for index, unit in enumerate(groups):
        if unit[0] not in (units.embedding, units.head):
            fill_unused_gradients(unit, [owned for owned in parameters if owned.unit == index])
    return model


def _unit(
    modules: list[nn.Module],
    mesh: DeviceMesh,
    dp_size: int,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | None,
    shared: dict[str, Any],
) -> None:
    fully_shard(modules, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward, **shared)
    set_gradient_scale(cast(FSDPModule, modules[0]), mesh, dp_size)


def _without_casts(policy: MixedPrecisionPolicy, param_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=policy.reduce_dtype, output_dtype=None, cast_forward_inputs=False
    )


def _check_meshes(dp_mesh: DeviceMesh, ep_mesh: DeviceMesh, expert_dp_mesh: DeviceMesh | None) -> None:
    if expert_dp_mesh is None:
        rule = f"is needed with an ep_mesh of {ep_mesh.size()} ranks"
        raise ShardingError("expert_dp_mesh", None, rule, "pass the ranks that hold the same experts")
    if expert_dp_mesh.ndim != dp_mesh.ndim:
        rule = f"must have as many axes as dp_mesh, {dp_mesh.ndim}"
        raise ShardingError("expert_dp_mesh.ndim", expert_dp_mesh.ndim, rule, "both (shard) or both (replicate, shard)")
    if expert_dp_mesh.size() * ep_mesh.size() != dp_mesh.size():
        rule = f"times the {ep_mesh.size()} ranks of ep_mesh must be the {dp_mesh.size()} ranks of dp_mesh"
        raise ShardingError("expert_dp_mesh.size()", expert_dp_mesh.size(), rule, "carve ep out of the shard axis")


def _set_prefetch(model: nn.Module, units: Units) -> None:
    """Let each block gather the next one together with its experts, in forward and in backward.

    Only where there are expert units. Their dispatch waits for a transfer to the host, so the host cannot run
    ahead and issue the next gather early, as FSDP counts on. And left alone it foresees one unit in backward, so
    that a block would gather its own experts only when it needs them.

    PyTorch 2.13 can also keep parameters of two meshes in one unit, by what `shard_placement_fn` returns, and
    gathers them together. 2.11 cannot, and two units leave each its own precision and gradient scale.

    Source: TorchTitan sets the same by hand for its models.
    """
    if not units.experts:
        return
    experts = {id(module) for module in units.experts}
    groups = [
        cast(list[FSDPModule], [block, *(m for m in block.modules() if m is not block and id(m) in experts)])
        for block in units.blocks
    ]
    # the root runs first, and the embedding inside it; a head of its own starts backward, else the root does
    first, last = cast(FSDPModule, units.embedding or model), cast(FSDPModule, units.head or model)
    forward = [[first], *groups]
    backward = [[last], *reversed(groups), *([[first]] if units.embedding is not None else [])]
    for here, ahead in itertools.pairwise(forward):
        here[0].set_modules_to_forward_prefetch(ahead)
    for here, ahead in itertools.pairwise(backward):
        here[0].set_modules_to_backward_prefetch(ahead)

"""Keeping the experts' loads even: the router bias, and auxiliary losses."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe_core._router import Score, TopKRouter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Reduction = Literal["mean", "sum"]


@torch.no_grad()
def update_router_bias(
    model: nn.Module, mesh_or_group: "DeviceMesh | ProcessGroup | None", rate: float = 1e-3
) -> dict[str, Tensor]:
    """Once per optimizer step: bias += rate * sign(mean load - load), and the counts start again at 0.

    The loads are those of all routers of `model` since the last call, summed over all ranks given: every
    data-parallel rank, expert-parallel peers and replicas included, so that the bias stays equal bit for bit
    everywhere. One collective for all layers, on a mesh of several axes too if it has been flattened (as a mesh
    of ep-mesh has, under the name "dp"); else one per axis, since a step must create no group. Every rank must
    call it. A router without bias only has its counts reset. (DeepSeek-V3; the mean of the bias is left where it
    drifts, which changes no choice.)

    Args:
        mesh_or_group: a process group, a `DeviceMesh` of any axes, or None for one process.

    Returns:
        By the name of each router in `model`, in its order: the summed loads, [E] int64.
    """
    routers = {name: module for name, module in model.named_modules() if isinstance(module, TopKRouter)}
    if not routers:
        return {}
    loads = torch.cat([router.tokens_per_expert for router in routers.values()])
    for group in _groups(mesh_or_group):
        dist.all_reduce(loads, group=group)
    by_router = loads.split([router.num_experts for router in routers.values()])
    for router, load in zip(routers.values(), by_router, strict=True):
        if router.bias is not None:
            # integers: mean - load has the sign of sum - E * load
            router.bias += rate * (load.sum() - router.num_experts * load).sign()
        router.tokens_per_expert.zero_()
    return dict(zip(routers, by_router, strict=True))


def _groups(mesh_or_group: "DeviceMesh | ProcessGroup | None") -> "Iterator[ProcessGroup]":
    if isinstance(mesh_or_group, DeviceMesh):
        mesh = _flattened(mesh_or_group)
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                yield mesh.get_group(axis)
    elif mesh_or_group is not None:
        yield mesh_or_group


def _flattened(mesh: DeviceMesh) -> DeviceMesh:
    """The 1-D mesh of the same ranks, if it has been made of this mesh or of what it is a part of; else the mesh.

    Torch keeps flattened meshes in a private mapping of the root, and deprecates finding them by slicing it.
    """
    if mesh.ndim == 1:
        return mesh
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    ranks = mesh.mesh.flatten().tolist()
    for other in getattr(root, "_flatten_mapping", {}).values():
        if other.mesh.flatten().tolist() == ranks:
            return other
    return mesh


def sequence_balance_loss(
    logits: Tensor,
    expert_ids: Tensor,
    *,
    score: Score = "sigmoid",
    padding_mask: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """How unevenly each sequence spreads its tokens over the experts: 1 if evenly, up to E / K. [] fp32.

    For a sequence of S tokens E / (K S^2) * sum_e count_e * sum_s p_se, where p is the score divided by its sum
    over the experts (DeepSeek-V3). The gradient flows through p alone.

    Args:
        logits: [B, S, E], or [S, E] for one sequence: the router's, unscored.
        expert_ids: [B, S, K] or [S, K]; E counts nowhere.
        padding_mask: [B, S] or [S] bool, True where a token is padding and counts nowhere.
        reduction: "mean" over sequences, weighted by their tokens; "sum" is that times the tokens, to be divided
            by a count over ranks and microbatches.
    """
    if logits.dim() == 2:
        logits, expert_ids = logits.unsqueeze(0), expert_ids.unsqueeze(0)
    sequences, length, num_experts = logits.shape
    valid = torch.ones(sequences, length, dtype=torch.bool, device=logits.device)
    if padding_mask is not None:
        valid = ~padding_mask.view(sequences, length)
    probability = _probability(logits, score) * valid.unsqueeze(-1)
    counts = _count_by_sequence(expert_ids, valid, num_experts)
    tokens = valid.sum(1)
    per_sequence = (counts * probability.sum(1)).sum(1) * num_experts / expert_ids.shape[-1]
    # times the tokens once, so that a sequence weighs what it has; of S^2 one S is left
    total = (per_sequence / tokens.clamp(min=1)).sum()
    return total / tokens.sum().clamp(min=1) if reduction == "mean" else total


def _probability(logits: Tensor, score: Score) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if score != "sigmoid":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _count_by_sequence(expert_ids: Tensor, valid: Tensor, num_experts: int) -> Tensor:
    ids = torch.where(valid.unsqueeze(-1), expert_ids, num_experts).flatten(1)
    counts = ids.new_zeros(ids.shape[0], num_experts + 1).scatter_add_(1, ids, torch.ones_like(ids))
    return counts[:, :num_experts]


def router_z_loss(logits: Tensor, *, padding_mask: Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
    """The mean (or sum) over tokens of logsumexp(logits)^2, which keeps logits small (ST-MoE). [] fp32.

    Args:
        logits: [..., E], unscored; padding_mask: [...] bool, True where a token is padding and counts nowhere.
    """
    squared = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1).square()
    if padding_mask is not None:
        squared = torch.where(padding_mask.view_as(squared), 0.0, squared)
    if reduction == "sum":
        return squared.sum()
    tokens = squared.numel() if padding_mask is None else (~padding_mask).sum().clamp(min=1)
    return squared.sum() / max(tokens, 1) if isinstance(tokens, int) else squared.sum() / tokens

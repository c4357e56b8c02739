"""Keeping the experts' loads even: a router's counts and bias, the rule that moves the bias, and auxiliary losses."""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook

from moe_core._moe_config import Score
from moe_core._numerics import wide_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Reduction = Literal["mean", "sum"]

STEPS = 16
"""Optimizer steps after which a bias that stood still counts as forgotten."""

_log = logging.getLogger(__name__)


class BalancedRouter(nn.Module):
    """A router as balancing knows it: something that counts the tokens of its experts, and may have a bias.

    Attributes:
        weight: a parameter, which the router is trained by.
        bias: [E] fp32 persistent buffer; None with `selection_bias=False`.
        tokens_per_expert: [E] int64 buffer, not stored: places given to each expert since the last
            `update_router_bias`; grows in training mode only, and not in a recomputation.
    """

    weight: nn.Parameter
    bias: Tensor | None
    tokens_per_expert: Tensor

    def __init__(self, num_experts: int, selection_bias: bool, device: torch.device | str | None) -> None:
        super().__init__()
        self.num_experts = num_experts
        bias = torch.empty(num_experts, dtype=torch.float32, device=device) if selection_bias else None
        self.register_buffer("bias", bias)
        counts = torch.empty(num_experts, dtype=torch.int64, device=device)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    def reset_balance(self) -> None:
        """Bias and counts 0."""
        self.tokens_per_expert.zero_()
        if self.bias is not None:
            self.bias.zero_()

    def count_tokens(self, expert_ids: Tensor) -> Tensor:
        """[T, K] int64 -> how many entries name each expert, [E] int64; E is counted nowhere. No host sync."""
        counts = _count(expert_ids.flatten(), self.num_experts)
        in_recomputation = torch._C._current_graph_task_id() != -1  # a backward pass runs on this thread
        if self.training and not in_recomputation:
            self.tokens_per_expert += counts
            _note_counting(self)
        return counts


def _sign(load: Tensor) -> Tensor:
    # integers: mean - load has the sign of sum - E * load
    return (load.sum() - len(load) * load).sign()


def _proportional(load: Tensor) -> Tensor:
    missing, total = load.sum() - len(load) * load, load.sum().clamp(min=1)
    return missing.float() / total.float()


BIAS_RULES: Mapping[str, Callable[[Tensor], Tensor]] = {"sign": _sign, "proportional": _proportional}
"""From the loads [E] int64, summed over ranks, to the direction in which the bias moves, [E]: upwards where an expert
has too few tokens. `nemotron_nano`'s trainer offers these by name."""


@torch.no_grad()
def update_router_bias(
    model: nn.Module,
    mesh_or_group: "DeviceMesh | ProcessGroup | None",
    rate: float = 1e-3,
    *,
    rule: str = "sign",
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
        rule: "sign"; or "proportional", which adds rate * (mean load - load) / mean load: a load that is nearly even
            then moves the bias little, and not by a whole step to either side (the variant without sign of Wang et
            al., 2024, arXiv 2408.15664, there not relative to the mean).

    Returns:
        By the name of each router in `model`, in its order: the summed loads, [E] int64.

    Raises:
        ValueError: there is no such rule; before any communication.
    """
    if rule not in BIAS_RULES:
        raise ValueError(f"rule = {rule!r}: must be one of {', '.join(BIAS_RULES)}")
    routers = {name: module for name, module in model.named_modules() if isinstance(module, BalancedRouter)}
    if not routers:
        return {}
    loads = torch.cat([router.tokens_per_expert for router in routers.values()])
    for group in _groups(mesh_or_group):
        dist.all_reduce(loads, group=group)
    by_router = loads.split([router.num_experts for router in routers.values()])
    for router, load in zip(routers.values(), by_router, strict=True):
        if router.bias is not None:
            router.bias += rate * BIAS_RULES[rule](load)
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
    num_experts, top_k = logits.shape[-1], expert_ids.shape[-1]
    valid = _valid(padding_mask, logits)
    probability = _probability(logits, score) * valid.unsqueeze(-1)
    counts = _count(torch.where(valid.unsqueeze(-1), expert_ids, num_experts).flatten(1), num_experts)
    tokens = valid.sum(1)
    per_sequence = (counts * probability.sum(1)).sum(1) * num_experts / top_k
    # times the tokens once, so that a sequence weighs what it has; of S^2 one S is left
    total = (per_sequence / tokens.clamp(min=1)).sum()
    return total / tokens.sum().clamp(min=1) if reduction == "mean" else total


def router_z_loss(logits: Tensor, *, padding_mask: Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
    """The mean (or sum) over tokens of logsumexp(logits)^2, which keeps logits small (ST-MoE). [] fp32.

    Args:
        logits: [..., E], unscored; padding_mask: [...] bool, True where a token is padding and counts nowhere.
    """
    valid = _valid(padding_mask, logits)
    total = torch.where(valid, logits.to(wide_dtype(logits)).logsumexp(-1).square(), 0.0).sum()
    return total / valid.sum().clamp(min=1) if reduction == "mean" else total


def _valid(padding_mask: Tensor | None, logits: Tensor) -> Tensor:
    """[...] bool, of logits [..., E]: which tokens count."""
    if padding_mask is None:
        return torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    return ~padding_mask.view(logits.shape[:-1])


def _probability(logits: Tensor, score: Score) -> Tensor:
    logits = logits.to(wide_dtype(logits))
    if score != "sigmoid":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _count(expert_ids: Tensor, num_experts: int) -> Tensor:
    """[..., N] int64 -> how many of the N name each expert, [..., E] int64; the id E is counted nowhere."""
    # integers, so the order of the additions does not matter; bincount would read its input back on a GPU
    counts = expert_ids.new_zeros(*expert_ids.shape[:-1], num_experts + 1)
    return counts.scatter_add_(-1, expert_ids, torch.ones_like(expert_ids))[..., :num_experts]


@attrs.define
class _Watch:
    """Whether a router is trained and nobody moves its bias: told once.

    Training goes on without `update_router_bias` as if nothing were wrong, with loads that nothing evens out. What
    gives it away is seen without reading a tensor back: optimizer steps go by in which a router counted tokens, and
    its bias is not written to (torch numbers the writes to a tensor). Microbatches do not matter, nor how parameters
    are sharded, nor how many optimizers share a step, since between two steps that count lies a forward pass.
    Anything that writes to the bias keeps this silent, as do optimizers that are none of torch's and compiled
    forward passes. It goes to the log and is no `warnings` warning, which could end the training.
    """

    version: int
    """Of the bias, when `steps` was 0."""
    steps: int = 0
    has_counted: bool = False
    """Whether tokens were counted since the last optimizer step."""
    has_warned: bool = False


_watches: "WeakKeyDictionary[BalancedRouter, _Watch]" = WeakKeyDictionary()


def _note_counting(router: BalancedRouter) -> None:
    """A training forward pass counted tokens. No host sync."""
    if torch.compiler.is_compiling() or router.bias is None or not router.weight.requires_grad:
        return
    _follow_optimizers()
    watch = _watches.get(router)
    if watch is None:
        watch = _watches[router] = _Watch(router.bias._version)
    watch.has_counted = True


@cache
def _follow_optimizers() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    forgotten = [watch for router, watch in _watches.items() if _is_forgotten(router, watch)]
    if not forgotten:
        return
    for watch in forgotten:
        watch.has_warned = True
    _log.warning(
        "%d router(s) counted tokens through %d optimizer steps, and their bias was not updated: experts' loads are "
        "not being balanced. Call moe_core.update_router_bias(model, mesh) after each optimizer step, with rate=0 to "
        "leave the bias where it is, or build the routers with selection_bias=False.",
        len(forgotten),
        STEPS,
    )


def _is_forgotten(router: BalancedRouter, watch: _Watch) -> bool:
    if not watch.has_counted or watch.has_warned or router.bias is None:
        return False
    watch.has_counted = False
    if router.bias._version != watch.version:
        watch.version, watch.steps = router.bias._version, 0
    watch.steps += 1
    return watch.steps > STEPS

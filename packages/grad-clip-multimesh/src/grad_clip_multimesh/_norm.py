"""The norm of tensors that are divided over different process groups."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from grad_clip_multimesh._groups import Group, Groups, Ranks

LocalTo = Mapping[Tensor, DeviceMesh]
"""Plain tensors that differ from rank to rank of a mesh, such as the experts of this rank."""


@dataclass(frozen=True)
class Piece:
    """What this rank holds of one tensor, and the groups that hold the rest."""

    tensor: Tensor | None
    """None: this rank has no gradient, others may have."""
    divided_over: tuple[Ranks, ...]


def find_piece(owner: Tensor, gradient: Tensor | None, groups: Groups, local_to: LocalTo) -> Piece:
    """Where `owner` lies decides, not the gradient: every rank has the first, and must reduce alike."""
    if isinstance(owner, DTensor):
        if gradient is not None:
            gradient = _local_part(gradient, owner)
        return Piece(gradient, groups.dividing(owner.device_mesh, owner.placements))
    if owner in local_to:
        mesh = local_to[owner]
        return Piece(gradient, groups.dividing(mesh, [Shard(0)] * mesh.ndim))
    return Piece(gradient, ())


def _local_part(gradient: Tensor, owner: DTensor) -> Tensor:
    if not isinstance(gradient, DTensor):
        return gradient
    placements = [Replicate() if p.is_partial() else p for p in owner.placements]
    if list(gradient.placements) != placements:
        # a Partial gradient is the sum of what the ranks hold; its norm is not the sum of theirs
        gradient = gradient.redistribute(placements=placements)
    return gradient.to_local()


def total_norm(
    pieces: Sequence[Piece],
    norm_type: float,
    groups: Groups,
    foreach: bool | None,
    pipeline_group: Group | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """The p-norm over all pieces on all ranks: [] of `dtype` on `device`, equal on all ranks.

    One all-reduce for each distinct group. It carries one number for each tensor, so that the result is
    that of one process up to the rounding of a single norm. Groups come in the order in which the tensors
    do, which is the same on every rank.
    """
    by_groups: dict[tuple[Ranks, ...], list[Tensor | None]] = defaultdict(list)
    for piece in pieces:
        if piece.tensor is not None or piece.divided_over:
            by_groups[piece.divided_over].append(piece.tensor)
    if not by_groups and pipeline_group is None:
        return torch.zeros((), dtype=dtype, device=device)
    ordered = [tensor for tensors in by_groups.values() for tensor in tensors]
    norms = _local_norms(ordered, norm_type, foreach, device=device, dtype=dtype)
    parts = dict(zip(by_groups, norms.split([len(tensors) for tensors in by_groups.values()]), strict=True))
    for ranks in dict.fromkeys(ranks for divided_over in parts for ranks in divided_over):
        shared = [key for key in parts if ranks in key]
        reduced = _reduce(torch.cat([parts[key] for key in shared]), norm_type, groups[ranks])
        parts.update(zip(shared, reduced.split([len(parts[key]) for key in shared]), strict=True))
    total = _norm_of_norms(torch.cat([*parts.values(), norms.new_zeros(0)]), norm_type)
    return total if pipeline_group is None else _reduce(total.reshape(1), norm_type, pipeline_group)[0]


def _local_norms(
    tensors: Sequence[Tensor | None],
    norm_type: float,
    foreach: bool | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """[number of tensors]: the norm of each, 0 for one that is empty or not there."""
    if not tensors:
        return torch.zeros(0, dtype=dtype, device=device)
    norms = [torch.zeros((), dtype=dtype, device=device)] * len(tensors)
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if tensor is not None and tensor.numel() > 0:
            alike[tensor.device, tensor.dtype].append((index, tensor))
    for members in alike.values():
        values = _norm_each([tensor for _, tensor in members], norm_type, foreach)
        for (index, _), value in zip(members, values, strict=True):
            norms[index] = on_device(value.to(dtype), device)
    return torch.stack(norms)


def _norm_each(tensors: list[Tensor], norm_type: float, foreach: bool | None) -> Sequence[Tensor]:
    # a sum of squares in bf16 would stop growing after a few hundred elements
    dtype = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else None
    if foreach is False:
        return [torch.linalg.vector_norm(tensor, norm_type, dtype=dtype) for tensor in tensors]
    return torch._foreach_norm(tensors, norm_type, dtype=dtype)


def _norm_of_norms(norms: Tensor, norm_type: float) -> Tensor:
    if norms.numel() == 0:
        return norms.new_zeros(())
    return torch.linalg.vector_norm(norms, norm_type)


def _reduce(norms: Tensor, norm_type: float, group: Group) -> Tensor:
    """[N] norms of parts -> [N] norms of wholes, over the group."""
    sent = on_device(norms, torch.device(group.device_type or norms.device))
    if norm_type != math.inf:
        powers = sent**norm_type
        dist.all_reduce(powers, op=dist.ReduceOp.SUM, group=group.process_group)
        return on_device(powers ** (1.0 / norm_type), norms.device)
    # gloo's maximum loses NaN, so it travels beside the numbers as a flag
    is_nan = sent.isnan()
    sent = torch.cat([sent.masked_fill(is_nan, 0.0), is_nan.to(sent.dtype)])
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group.process_group)
    maximum, is_nan = sent.chunk(2)
    return on_device(maximum.masked_fill(is_nan > 0, math.nan), norms.device)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy only where one is needed: gradients offloaded to the host, groups that reduce on the device."""
    here = tensor.device
    if here.type == device.type and device.index in (None, here.index):
        return tensor
    return tensor.to(device)

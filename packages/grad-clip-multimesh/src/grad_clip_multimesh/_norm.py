"""The norm of tensors that are divided over different process groups."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from grad_clip_multimesh._groups import Group, Groups, Ranks

LocalTo = Mapping[Tensor, DeviceMesh]
"""Tensors that differ from rank to rank of a mesh without saying so, such as the experts of this rank."""


@dataclass(frozen=True)
class Piece:
    """What this rank holds of one tensor, and the groups that hold the rest."""

    tensor: Tensor | None
    """None: this rank has no gradient, others may have."""
    divided_over: tuple[Ranks, ...]


def find_piece(owner: Tensor, gradient: Tensor | None, groups: Groups, local_to: LocalTo) -> Piece:
    """Where `owner` lies decides, not the gradient: every rank has the first, and must reduce alike."""
    divided_over: tuple[Ranks, ...] = ()
    if isinstance(owner, DTensor):
        if gradient is not None:
            gradient = _local_part(gradient, owner)
        divided_over = groups.dividing(owner.device_mesh, owner.placements)
    if owner in local_to:
        divided_over = groups.local_to(local_to[owner], divided_over)
    return Piece(gradient, divided_over)


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
    pipeline_group: dist.ProcessGroup | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """The p-norm over all pieces on all ranks: [] of `dtype` on `device`, equal on all ranks.

    One all-reduce for each distinct group. It carries one number for each tensor, so that the result is
    that of one process up to the rounding of a single norm. Groups come in the order in which the tensors
    do, which is the same on every rank.
    """
    by_groups: dict[tuple[Ranks, ...], list[int]] = defaultdict(list)
    for index, piece in enumerate(pieces):
        if piece.tensor is not None or piece.divided_over:
            by_groups[piece.divided_over].append(index)
    order = [index for indices in by_groups.values() for index in indices]
    norms = _local_norms([pieces[index].tensor for index in order], norm_type, foreach, device=device, dtype=dtype)
    parts = dict(zip(by_groups, norms.split([len(indices) for indices in by_groups.values()]), strict=True))
    for ranks in dict.fromkeys(ranks for divided_over in parts for ranks in divided_over):
        shared = [key for key in parts if ranks in key]
        reduced = _reduce(torch.cat([parts[key] for key in shared]), norm_type, groups[ranks])
        parts.update(zip(shared, reduced.split([len(parts[key]) for key in shared]), strict=True))
    wholes = torch.cat([*parts.values(), norms.new_zeros(0)])
    if len(parts) > 1:  # back to the order of the tensors, for the rounding of one process
        wholes = torch.stack(
            [whole for _, whole in sorted(zip(order, wholes.unbind(), strict=True), key=itemgetter(0))]
        )
    total = torch.linalg.vector_norm(wholes, norm_type) if order else norms.new_zeros(())
    if pipeline_group is None:
        return total
    # fp32 whatever `dtype` is: a stage without parameters cannot know that of the others
    return _reduce(total.reshape(1).float(), norm_type, _of_pipeline(pipeline_group, device))[0].to(dtype)


def _of_pipeline(process_group: dist.ProcessGroup, here: torch.device) -> Group:
    """Reduces where the gradients are, or else where the group can: a stage may have none, or keep them on the host."""
    types = [device.type for device in process_group._device_types]
    return Group(process_group, here.type if here.type in types else types[0])


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


def _reduce(norms: Tensor, norm_type: float, group: Group) -> Tensor:
    """[N] norms of parts -> [N] norms of wholes, over the group."""
    sent = on_device(norms, torch.device(group.device_type))
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

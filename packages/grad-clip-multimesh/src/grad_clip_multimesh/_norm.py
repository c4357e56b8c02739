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

    held: Tensor | None
    """The local tensor itself. None: this rank has no gradient, others may have."""
    tensor: Tensor | None
    """The same, with what was Partial reduced."""
    divided_over: tuple[Ranks, ...]
    local: bool
    """Other ranks may have more or fewer of these."""


def find_pieces(
    owners: Sequence[Tensor], gradients: Sequence[Tensor | None], groups: Groups, local_to: LocalTo
) -> list[Piece]:
    """Where an owner lies decides, not its gradient: every rank has the first, and must reduce alike."""
    for mesh in [owner.device_mesh for owner in owners if isinstance(owner, DTensor)] + list(local_to.values()):
        groups.learn(mesh)
    # all of them before the first Partial gradient is reduced: errors come before communication
    divisions = [_division(owner, groups, local_to) for owner in owners]
    return [
        Piece(*_local_parts(gradient, owner), divided_over, bool(local_to) and owner in local_to)
        for owner, gradient, divided_over in zip(owners, gradients, divisions, strict=True)
    ]


def _division(owner: Tensor, groups: Groups, local_to: LocalTo) -> tuple[Ranks, ...]:
    divided_over: tuple[Ranks, ...] = ()
    if isinstance(owner, DTensor):
        divided_over = groups.dividing(owner.device_mesh, owner.placements)
    return groups.local_to(local_to[owner], divided_over) if local_to and owner in local_to else divided_over


def _local_parts(gradient: Tensor | None, owner: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What is held of a gradient, and what its norm is taken of."""
    if not isinstance(gradient, DTensor):
        return gradient, gradient
    held = gradient.to_local()
    if isinstance(owner, DTensor):
        placements = tuple(Replicate() if p.is_partial() else p for p in owner.placements)
        if gradient.placements != placements:
            # a Partial gradient is the sum of what the ranks hold; its norm is not the sum of theirs
            return held, gradient.redistribute(placements=placements).to_local()
    return held, held


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
    that of one process up to the rounding of a single norm; and one for all that are local to a rank, since
    the ranks may have different numbers of these. Groups come in an order that the tensors' placements set,
    which is the same on every rank.
    """
    kinds = _alike(pieces)
    order = [index for indices in kinds.values() for index in indices]
    norms = _local_norms([pieces[index].tensor for index in order], norm_type, foreach, device=device, dtype=dtype)
    parts = dict(zip(kinds, norms.split([len(indices) for indices in kinds.values()]), strict=True))
    for kind in kinds:
        if kind.local:
            parts[kind] = torch.linalg.vector_norm(parts[kind], norm_type, keepdim=True)
    for ranks in dict.fromkeys(ranks for kind in kinds for ranks in kind.divided_over):
        shared = [kind for kind in kinds if ranks in kind.divided_over]
        reduced = _reduce(torch.cat([parts[kind] for kind in shared]), norm_type, groups[ranks])
        parts.update(zip(shared, reduced.split([len(parts[kind]) for kind in shared]), strict=True))
    total = norms.new_zeros(())
    if parts:
        total = torch.linalg.vector_norm(_in_order_of_tensors(kinds, parts), norm_type)
    if pipeline_group is None:
        return total
    # fp32 whatever `dtype` is: a stage without parameters cannot know that of the others
    return _reduce(total.reshape(1).float(), norm_type, _of_pipeline(pipeline_group, device))[0].to(dtype)


@dataclass(frozen=True)
class _Kind:
    """What pieces have in common that are reduced alike."""

    divided_over: tuple[Ranks, ...]
    local: bool


def _alike(pieces: Sequence[Piece]) -> dict[_Kind, list[int]]:
    """The indices of the pieces of each kind.

    Local kinds are last: where they begin may differ from rank to rank. What is divided over several groups is
    first, so that these are reduced in the order of its axes, as DTensor does.
    """
    kinds: dict[_Kind, list[int]] = defaultdict(list)
    for index, piece in enumerate(pieces):
        if piece.tensor is not None or piece.divided_over:
            kinds[_Kind(piece.divided_over, piece.local)].append(index)
    return dict(sorted(kinds.items(), key=lambda item: (item[0].local, -len(item[0].divided_over))))


def _in_order_of_tensors(kinds: Mapping[_Kind, list[int]], parts: Mapping[_Kind, Tensor]) -> Tensor:
    """The norms for the last sum, which so rounds as that of one process does."""
    if len(parts) == 1:
        (only,) = parts.values()
        return only
    indices = [index for kind, indices in kinds.items() if not kind.local for index in indices]
    norms = [norm for kind, part in parts.items() if not kind.local for norm in part.unbind()]
    ordered = [norm for _, norm in sorted(zip(indices, norms, strict=True), key=itemgetter(0))]
    return torch.stack(ordered + [part[0] for kind, part in parts.items() if kind.local])


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
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if tensor is not None and tensor.numel() > 0:
            alike[tensor.device, tensor.dtype].append((index, tensor))
    norms = [torch.zeros((), dtype=dtype, device=device)] * len(tensors)
    for members in alike.values():
        each = torch.stack(_norm_each([tensor for _, tensor in members], norm_type, foreach))
        each = on_device(each.to(dtype), device)
        if len(members) == len(tensors):
            return each
        for (index, _), norm in zip(members, each.unbind(), strict=True):
            norms[index] = norm
    return torch.stack(norms)


def _norm_each(tensors: list[Tensor], norm_type: float, foreach: bool | None) -> list[Tensor]:
    # a sum of squares in bf16 would stop growing after a few hundred elements
    dtype = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else None
    if foreach is False:
        return [torch.linalg.vector_norm(tensor, norm_type, dtype=dtype) for tensor in tensors]
    return list(torch._foreach_norm(tensors, norm_type, dtype=dtype))


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

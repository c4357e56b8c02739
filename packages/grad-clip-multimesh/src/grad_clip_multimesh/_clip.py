"""torch.nn.utils' three functions, for gradients on any mix of meshes."""

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import GeneratorType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from grad_clip_multimesh._pieces import Group, Groups, LocalTo, Piece, Ranks, find_pieces

_EPSILON = 1e-6
"""torch's: keeps the factor finite where the norm is 0."""

_DOUBLE = (torch.float64, torch.complex128)
_WITHOUT_DOUBLE = ("mps",)
"""Kinds of devices."""
_LARGEST_POWER = 7.0
"""p up to which float64 holds sums of p-th powers of any fp32 numbers: 2^(128 p) of 2^100 elements and more."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float | None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    local_to: LocalTo | None = None,
    pipeline_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale the gradients in place so that their norm over all ranks is at most `max_norm`.

    Does what `torch.nn.utils.clip_grad_norm_` does, and also takes parameters that are DTensors on several
    meshes (FSDP and HSDP, experts on a mesh of their own), plain tensors among them, empty shards, and
    gradients that are None on some ranks. Collective: every rank that holds a part of one of the parameters
    calls it with the same parameters in the same order. A parameter that is replicated counts once.

    The norm is finite wherever it fits its dtype, also where sums of powers overflow on the way, as those of torch
    do: four fp32 elements of 1e30 have the norm 2e30. Where torch's own is finite, it has those bits, also where
    powers underflow: elements of 1e-30 have the norm 0. One above the largest number is infinite, and clips all to 0.

    At most one all-reduce for each distinct group of ranks; no other transfer from a device to the host than the one
    that `error_if_nonfinite` needs.

    Args:
        parameters: an iterable of parameters, or one; those whose gradient is None everywhere count as 0.
        max_norm: the largest norm that gradients are left with; None: nothing is scaled.
        norm_type: p of the norm, more than 0, up to `math.inf`.
        error_if_nonfinite: raise if the norm is NaN or infinite, on all ranks, before anything is scaled.
        foreach: False takes tensors one by one, which needs less memory at a time.
        local_to: parameters that differ from rank to rank of a mesh without saying so, with that mesh: plain
            experts of this rank, or experts that FSDP shards over the ranks that have the same ones. Ranks may
            have different numbers of plain ones; a rank that has none passes an empty tensor in their place.
            Plain parameters that are not named are taken to be the same on all ranks.
        pipeline_group: ranks that hold other layers; the norm is taken over theirs too, in fp32. A rank that
            holds none calls with an empty list.

    Returns:
        The norm before clipping: [] fp32 (fp64 if a parameter is), plain, equal on all ranks.

    Raises:
        ValueError: `norm_type` is not above 0, `max_norm` is below 0 or NaN, or `local_to` names a tensor that is
            not among `parameters`, or axes over which a DTensor is divided already. Before any communication.
        RuntimeError: see `error_if_nonfinite`.

    A gradient that is `Partial` where its parameter is not, is reduced with its own collectives before; every
    rank has to have it.
    """
    norm_type = _checked_norm_type(norm_type)
    if max_norm is not None:
        _check_max_norm(max_norm)
    owners = _listed(parameters)
    if not owners and isinstance(parameters, GeneratorType) and pipeline_group is None:
        warnings.warn("`parameters` is an empty generator: is it used up? Nothing is clipped.", stacklevel=3)
    groups = Groups()
    pieces = find_pieces(owners, [owner.grad for owner in owners], groups, local_to or {})
    norm = _total_norm(owners, pieces, norm_type, groups, foreach, pipeline_group)
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    if max_norm is not None:
        _scale([piece.held for piece in pieces if piece.held is not None], max_norm, norm, foreach)
    return norm


@torch.no_grad()
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    local_to: LocalTo | None = None,
    pipeline_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The norm of these tensors over all ranks, as if they were one vector; see `clip_grad_norm_`.

    Every rank passes tensors with the same placements in the same order: unlike `clip_grad_norm_` it cannot
    know of one that is missing on some ranks. The keys of `local_to` are tensors among these.
    """
    norm_type = _checked_norm_type(norm_type)
    owners, groups = _listed(tensors), Groups()
    pieces = find_pieces(owners, owners, groups, local_to or {})
    norm = _total_norm(owners, pieces, norm_type, groups, foreach, pipeline_group)
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    return norm


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Multiply the gradients in place by `max_norm / (total_norm + 1e-6)`, where that is below 1.

    No communication: `total_norm` is the norm over all ranks, as `get_total_norm` returns it. A NaN or
    infinite norm scales like any other, on all ranks alike.

    Raises:
        ValueError: `max_norm` is below 0 or NaN.
    """
    _check_max_norm(max_norm)
    if isinstance(total_norm, DTensor):
        total_norm = total_norm.full_tensor()
    gradients = [parameter.grad for parameter in _listed(parameters)]
    held = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    _scale([gradient for gradient in held if gradient is not None], max_norm, total_norm, foreach)


def _scale(held: Sequence[Tensor], max_norm: float, norm: Tensor, foreach: bool | None) -> None:
    factor = torch.clamp(float(max_norm) / (norm + _EPSILON), max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in held:
        alike[gradient.device, gradient.dtype].append(gradient)
    for (device, _), gradients in alike.items():
        if foreach is False:
            for gradient in gradients:
                gradient.mul_(_on_device(factor, device))
        else:
            torch._foreach_mul_(gradients, _on_device(factor, device))


def _listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _check_max_norm(max_norm: float) -> None:
    if not float(max_norm) >= 0:
        raise ValueError(
            f"max_norm = {max_norm}: must be at least 0, gradients would change their sign; math.inf scales nothing"
        )


def _checked_norm_type(norm_type: float) -> float:
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type = {norm_type}: must be above 0; math.inf is the largest absolute value")
    return norm_type


def _check_finite(norm: Tensor, norm_type: float) -> None:
    if not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} over all gradients is {norm.item()}, so they cannot be clipped; "
            "error_if_nonfinite=False scales them all the same"
        )


def _total_norm(
    owners: Sequence[Tensor],
    pieces: Sequence[Piece],
    norm_type: float,
    groups: Groups,
    foreach: bool | None,
    pipeline_group: dist.ProcessGroup | None,
) -> Tensor:
    """The p-norm over all pieces on all ranks: [], equal on all ranks.

    One all-reduce for each distinct group. It carries one number for each tensor, so that the result is
    that of one process up to the rounding of a single norm; and one for all that are local to a rank, since
    the ranks may have different numbers of these. Groups come in an order that the tensors' placements set,
    which is the same on every rank.

    Sums of p-th powers overflow long before the norm does. So a spare norm of each kind of pieces, in scaled
    arithmetic, goes the same way and is the result where the other is infinite, which no rank has to know before.
    """
    # from the parameters, which all ranks have: what is reduced must be alike
    dtype = torch.float64 if any(owner.dtype in _DOUBLE for owner in owners) else torch.float32
    device = owners[0].device if owners else torch.device("cpu")
    kinds = _alike(pieces)
    order = [index for indices in kinds.values() for index in indices]
    norms = _local_norms([pieces[index].tensor for index in order], norm_type, foreach, device=device, dtype=dtype)
    sizes = [len(indices) for indices in kinds.values()]
    parts, spare = (dict(zip(kinds, row.split(sizes), strict=True)) for row in norms.unbind())
    for kind in kinds:
        spare[kind] = _scaled_norm(spare[kind], norm_type).reshape(1)
        if kind.local:
            parts[kind] = torch.linalg.vector_norm(parts[kind], norm_type, keepdim=True)
    for ranks in dict.fromkeys(ranks for kind in kinds for ranks in kind.divided_over):
        shared = [kind for kind in kinds if ranks in kind.divided_over]
        sent = torch.cat([parts[kind] for kind in shared]), torch.cat([spare[kind] for kind in shared])
        reduced, reduced_spare = _reduce(*sent, norm_type, groups[ranks])
        parts.update(zip(shared, reduced.split([len(parts[kind]) for kind in shared]), strict=True))
        spare.update(zip(shared, reduced_spare.split(1), strict=True))
    total = large = norms.new_zeros(1)
    if parts:
        total = torch.linalg.vector_norm(_in_order_of_tensors(kinds, parts), norm_type, keepdim=True)
        large = _scaled_norm(torch.cat([*spare.values()]), norm_type).reshape(1)
    if pipeline_group is not None:
        # fp32 whatever `dtype` is: a stage without parameters cannot know that of the others
        total, large = _reduce(total.float(), large.float(), norm_type, _of_pipeline(pipeline_group, device))
    return (total if norm_type == math.inf else torch.where(total.isinf(), large, total))[0].to(dtype)


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
    """[2, number of tensors]: the norm of each, 0 for one that is empty or not there; and the spare one."""
    if not tensors:
        return torch.zeros(2, 0, dtype=dtype, device=device)
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if tensor is not None and tensor.numel() > 0:
            alike[tensor.device, tensor.dtype].append((index, tensor))
    norms = [torch.zeros(2, dtype=dtype, device=device)] * len(tensors)
    for members in alike.values():
        held = [tensor for _, tensor in members]
        # a sum of squares in bf16 would stop growing after a few hundred elements
        wide = torch.float32 if held[0].dtype in (torch.bfloat16, torch.float16) else None
        each = torch.stack(_norm_each(held, norm_type, foreach, wide))
        both = torch.stack([each, _spare_norms(each, held, norm_type, foreach)])
        both = _on_device(both.to(dtype), device)
        if len(members) == len(tensors):
            return both
        for (index, _), norm in zip(members, both.unbind(1), strict=True):
            norms[index] = norm
    return torch.stack(norms, 1)


def _norm_each(
    tensors: list[Tensor], norm_type: float, foreach: bool | None, dtype: torch.dtype | None
) -> list[Tensor]:
    if foreach is False:
        return [torch.linalg.vector_norm(tensor, norm_type, dtype=dtype) for tensor in tensors]
    return list(torch._foreach_norm(tensors, norm_type, dtype=dtype))


def _spare_norms(norms: Tensor, tensors: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """The norms of the tensors, finite wherever they fit: as `norms` has them where those are.

    On the host only those that are not finite are taken again. To look at them on a device would be a host sync, so
    there all are.
    """
    if norm_type == math.inf:
        return norms
    if not _is_on_host(norms):
        return torch.stack(_norm_each_without_overflow(tensors, norm_type, foreach, norms.dtype))
    if norms.isfinite().all():
        return norms
    spare = list(norms.unbind())
    for index, (norm, tensor) in enumerate(zip(spare, tensors, strict=True)):
        if not norm.isfinite():
            (spare[index],) = _norm_each_without_overflow([tensor], norm_type, foreach, norms.dtype)
    return torch.stack(spare)


def _norm_each_without_overflow(
    tensors: list[Tensor], norm_type: float, foreach: bool | None, dtype: torch.dtype
) -> list[Tensor]:
    """In float64, which copies nothing, or else in a scaled copy of one tensor after the other."""
    real = [tensor.abs() if tensor.is_complex() else tensor for tensor in tensors]
    if norm_type > _LARGEST_POWER or real[0].dtype in _DOUBLE or real[0].device.type in _WITHOUT_DOUBLE:
        return [_scaled_norm(tensor.flatten().to(dtype), norm_type) for tensor in real]
    return [norm.to(dtype) for norm in _norm_each(real, norm_type, foreach, torch.float64)]


def _is_on_host(tensor: Tensor) -> bool:
    """Whether the host may look at it without waiting for a device."""
    return tensor.device.type == "cpu"


def _scaled_norm(values: Tensor, norm_type: float) -> Tensor:
    """[N, ...] -> [...]: the norm over the first dim, in which no power is above 1."""
    largest = torch.linalg.vector_norm(values, math.inf, dim=0)
    scale = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    return torch.linalg.vector_norm(values / scale, norm_type, dim=0) * scale


def _reduce(norms: Tensor, spare: Tensor, norm_type: float, group: Group) -> tuple[Tensor, Tensor]:
    """[N] norms of parts, [S] spare ones -> those of wholes, over the group."""
    there = torch.device(group.device_type)
    sent = _on_device(norms, there)
    if norm_type != math.inf:
        # the spare norms travel as they are, each rank's in a row of its own: as powers they would overflow as well
        rows = sent.new_zeros(group.process_group.size(), len(spare))
        rows[group.process_group.rank()] = _on_device(spare, there)
        sent = torch.cat([sent**norm_type, rows.flatten()])
        dist.all_reduce(sent, op=dist.ReduceOp.SUM, group=group.process_group)
        powers, rows = sent[: len(norms)], sent[len(norms) :].view_as(rows)
        whole, spare = powers ** (1.0 / norm_type), _scaled_norm(rows, norm_type)
        return _on_device(whole, norms.device), _on_device(spare, norms.device)
    # gloo's maximum loses NaN, so it travels beside the numbers as a flag
    is_nan = sent.isnan()
    sent = torch.cat([sent.masked_fill(is_nan, 0.0), is_nan.to(sent.dtype)])
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group.process_group)
    maximum, is_nan = sent.chunk(2)
    return _on_device(maximum.masked_fill(is_nan > 0, math.nan), norms.device), spare


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy only where one is needed: gradients offloaded to the host, groups that reduce on the device."""
    here = tensor.device
    if here.type == device.type and device.index in (None, here.index):
        return tensor
    return tensor.to(device)

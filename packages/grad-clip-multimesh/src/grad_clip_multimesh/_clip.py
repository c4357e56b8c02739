"""torch.nn.utils' three functions, for gradients on any mix of meshes."""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from types import GeneratorType
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from grad_clip_multimesh._groups import Groups
from grad_clip_multimesh._norm import LocalTo, Piece, find_pieces, on_device, total_norm

_EPSILON = 1e-6
"""torch's: keeps the factor finite where the norm is 0."""


class _Result(TypedDict):
    device: torch.device
    dtype: torch.dtype


_DOUBLE = (torch.float64, torch.complex128)


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

    At most one all-reduce for each distinct group of ranks; no other transfer to the host than the one that
    `error_if_nonfinite` needs.

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
    pieces = _pieces(owners, [owner.grad for owner in owners], groups, local_to)
    norm = total_norm(pieces, norm_type, groups, foreach, pipeline_group, **_kind_of_result(owners))
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
    pieces = _pieces(owners, owners, groups, local_to)
    norm = total_norm(pieces, norm_type, groups, foreach, pipeline_group, **_kind_of_result(owners))
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
                gradient.mul_(on_device(factor, device))
        else:
            torch._foreach_mul_(gradients, on_device(factor, device))


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


def _pieces(
    owners: Sequence[Tensor], gradients: Sequence[Tensor | None], groups: Groups, local_to: LocalTo | None
) -> list[Piece]:
    known = set(map(id, owners)) if local_to else ()
    for tensor in local_to or ():
        if id(tensor) not in known:
            # a key that is no longer a parameter would make the experts count as replicated
            raise ValueError(
                f"local_to has a tensor of shape {list(tensor.shape)} that is not among those whose norm is taken: "
                "name the very objects that are passed (after `fully_shard`, which replaces parameters; "
                "for `get_total_norm` the gradients)"
            )
    return find_pieces(owners, gradients, groups, local_to or {})


def _kind_of_result(owners: Sequence[Tensor]) -> _Result:
    """From the parameters, which all ranks have: what is reduced must be alike."""
    double = any(owner.dtype in _DOUBLE for owner in owners)
    return {
        "device": owners[0].device if owners else torch.device("cpu"),
        "dtype": torch.float64 if double else torch.float32,
    }

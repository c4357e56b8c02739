"""Reordering rows between tokens, senders and experts, with gradients summed in a fixed order.

Every order in here is by (expert, source rank, token, place in K), and stable. That is the order in which one
process would hold the rows of the ranks' batches one after the other, so an expert sees the same matrix, and
its weight gradient has the same bits, at any expert-parallel degree.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def build_permute_indices(counts: Tensor, num_rows: int | None = None) -> Tensor:
    """Where to find the rows that arrived by sender when they are to lie by expert: [R] int64.

    Args:
        counts: [ep, e] int64: rows that each source rank sent for each local expert. The rows arrive grouped
            by (source rank, expert); `rows[indices]` is grouped by (expert, source rank).
        num_rows: R, the sum of `counts`. Left out it is read back from the device, which is a host sync.
    """
    by_expert = counts.t().flatten()
    arrived_at = _exclusive_cumsum(counts.flatten()).view(counts.shape).t().flatten()
    shift = arrived_at - _exclusive_cumsum(by_expert)
    if num_rows is None:
        num_rows = int(by_expert.sum())
    rows = torch.arange(num_rows, device=counts.device)
    return rows + shift.repeat_interleave(by_expert, output_size=num_rows)


def _exclusive_cumsum(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0) - sizes


def inverse_permutation(indices: Tensor) -> Tensor:
    """[R] -> [R]: `rows[indices][inverse]` is `rows`."""
    return torch.empty_like(indices).index_copy_(0, indices, torch.arange(len(indices), device=indices.device))


class HomeOrder(NamedTuple):
    """How this rank's tokens correspond to the rows that it sends, which lie by expert."""

    token: Tensor
    """[R] int64: the token of each row."""
    place: Tensor
    """[R] int64: where each row's token and choice stand in the flattened [T, K]."""
    row: Tensor
    """[T, K] int64: the row of each choice; any row where `sent` is False."""
    sent: Tensor | None
    """[T, K] bool: which choices have a row; None if all have."""


class SortedChoices(NamedTuple):
    """The T*K choices of a batch in the order of (expert, token, place in K)."""

    place: Tensor
    """[T*K] int64: where each sorted choice stands in the flattened [T, K]."""
    row: Tensor
    """[T, K] int64: where each choice stands in the sorted order; those of E, which send nothing, come last."""
    counts: Tensor
    """[E] int64."""
    invalid: Tensor
    """[] int64: ids that are not in 0..E. Where it is not 0 the rest means nothing."""


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> SortedChoices:
    """[T, K] integers in 0..E. No host sync."""
    ids = expert_ids.flatten()
    sorted_ids, place = torch.sort(ids, stable=True)
    bounds = torch.searchsorted(sorted_ids, torch.arange(num_experts + 2, device=ids.device))
    invalid = bounds[0] + len(ids) - bounds[-1]
    return SortedChoices(place, inverse_permutation(place).view_as(expert_ids), bounds[:-1].diff(), invalid)


def home_order(expert_ids: Tensor, choices: SortedChoices, num_rows: int, num_experts: int) -> HomeOrder:
    """Of the first `num_rows` sorted choices; those past them are of E, and have none."""
    place, row, top_k = choices.place[:num_rows], choices.row, max(expert_ids.shape[1], 1)
    if num_rows == expert_ids.numel():
        return HomeOrder(place // top_k, place, row, None)
    return HomeOrder(place // top_k, place, row.clamp(max=max(num_rows - 1, 0)), expert_ids != num_experts)


def check_shapes(hidden: Tensor, expert_ids: Tensor) -> None:
    """Raises ValueError unless they are [T, D] and integers [T, K]."""
    if hidden.dim() != 2 or expert_ids.dim() != 2 or len(hidden) != len(expert_ids):
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and expert_ids {tuple(expert_ids.shape)} must be [T, D] and [T, K], with "
            "one row for each token"
        )
    if expert_ids.is_floating_point() or expert_ids.dtype == torch.bool:
        raise ValueError(f"expert_ids are {expert_ids.dtype}: must be integers")


def check_weights(expert_weights: Tensor, order: HomeOrder) -> None:
    """Raises ValueError unless there is a weight for each choice."""
    if expert_weights.shape != order.row.shape:
        raise ValueError(
            f"expert_weights {tuple(expert_weights.shape)} must be [T, K] like the expert_ids {tuple(order.row.shape)}"
        )


class Gather(torch.autograd.Function):
    """(hidden [T, D], order) -> rows [R, D]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: HomeOrder) -> Tensor:
        ctx.order = order
        return hidden.index_select(0, order.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_over_choices(grad, ctx.order).to(grad.dtype), None


class Permute(torch.autograd.Function):
    """(rows [R, D], indices [R], inverse [R]) -> rows[indices]; the inverse makes backward a gather as well."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, indices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None


class WeightedSum(torch.autograd.Function):
    """(rows [R, D], expert_weights [T, K], order) -> [T, D]: sum over k of weight * row, fp32, in the order of K."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, expert_weights: Tensor, order: HomeOrder) -> Tensor:
        ctx.save_for_backward(rows, expert_weights)
        ctx.order = order
        return _sum_over_choices(rows, order, expert_weights).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, expert_weights = ctx.saved_tensors
        order: HomeOrder = ctx.order
        wide = _wide_dtype(rows)
        per_row = grad.index_select(0, order.token).to(wide)
        weight = expert_weights.flatten().index_select(0, order.place).to(wide)
        grad_rows = (per_row * weight.unsqueeze(1)).to(rows.dtype)
        grad_weights = _take((per_row * rows).sum(-1, keepdim=True), order.row.flatten(), order.sent)
        return grad_rows, grad_weights.view_as(expert_weights).to(expert_weights.dtype), None


def _sum_over_choices(rows: Tensor, order: HomeOrder, weight: Tensor | None = None) -> Tensor:
    tokens, choices = order.row.shape
    total = rows.new_zeros(tokens, rows.shape[1], dtype=_wide_dtype(rows))
    for k in range(choices):
        term = _take(rows, order.row[:, k], None if order.sent is None else order.sent[:, k]).to(total.dtype)
        # multiplied and added apart: a fused multiply-add may be used for some elements only
        total += term if weight is None else term * weight[:, k : k + 1].to(total.dtype)
    return total


def _take(rows: Tensor, row: Tensor, sent: Tensor | None) -> Tensor:
    """rows[row], zeros where nothing was sent."""
    if sent is None:
        return rows.index_select(0, row)
    if rows.shape[0] == 0:
        return rows.new_zeros(row.shape[0], rows.shape[1])
    return torch.where(sent.reshape(-1, 1), rows.index_select(0, row), 0)


def _wide_dtype(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)

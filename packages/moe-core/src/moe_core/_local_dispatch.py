"""Tokens to experts that are all on this rank, and back: what `GroupedExperts` does without a dispatcher.

Rows lie sorted by (expert, token, place in K), stably, and every sum over a token's K copies is taken in
fp32 in the order of K; so the result never depends on how a kernel orders its additions.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class LocalHandle(NamedTuple):
    """How rows and tokens correspond."""

    token: Tensor
    """[T*K] int64: the token of each row."""
    place: Tensor
    """[T*K] int64: where each row's token and choice stand in the flattened [T, K]."""
    row: Tensor
    """[T, K] int64: the row of each token's choices."""


class LocalDispatched(NamedTuple):
    """Complete at once. Rows of masked choices lie past the last expert's."""

    rows: Tensor
    tokens_per_expert: Tensor
    handle: LocalHandle

    def wait(self) -> "LocalDispatched":
        return self


class LocalDispatch:
    """The dispatcher of a layer whose experts are all here."""

    def dispatch(self, hidden: Tensor, expert_ids: Tensor, num_experts: int) -> LocalDispatched:
        """[T, D], [T, K] int64 in 0..E (E sends nothing) -> rows [T*K, D]; no host sync.

        Raises:
            RuntimeError: an id is not in 0..E; without a host sync, so on an accelerator when it gets there.
        """
        ids = expert_ids.flatten()
        sorted_ids, place = torch.sort(ids, stable=True)
        row = torch.empty_like(place).index_copy_(0, place, torch.arange(len(place), device=place.device))
        handle = LocalHandle(place // max(expert_ids.shape[1], 1), place, row.view_as(expert_ids))
        bounds = torch.searchsorted(sorted_ids, torch.arange(num_experts + 2, device=ids.device))
        valid = (bounds[0] == 0) & (bounds[-1] == len(ids))
        torch._assert_async(valid, f"expert_ids must be in 0..num_experts = {num_experts}")
        return LocalDispatched(_Gather.apply(hidden, handle), bounds[:-1].diff(), handle)

    def combine(self, rows: Tensor, expert_weights: Tensor, handle: LocalHandle) -> Tensor:
        """[T*K, D], [T, K] -> [T, D] in the rows' dtype."""
        return _WeightedSum.apply(rows, expert_weights, handle)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, handle: LocalHandle) -> Tensor:
        ctx.row = handle.row
        return hidden.index_select(0, handle.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over_choices(grad, ctx.row).to(grad.dtype), None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, expert_weights: Tensor, handle: LocalHandle) -> Tensor:
        ctx.save_for_backward(rows, expert_weights)
        ctx.handle = handle
        return sum_over_choices(rows, handle.row, expert_weights).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, expert_weights = ctx.saved_tensors
        handle: LocalHandle = ctx.handle
        wide = wide_dtype(rows)
        per_row = grad.index_select(0, handle.token).to(wide)
        weight = expert_weights.flatten().index_select(0, handle.place).to(wide)
        grad_rows = (per_row * weight.unsqueeze(1)).to(rows.dtype)
        grad_weight = (per_row * rows).sum(-1).index_select(0, handle.row.flatten())
        return grad_rows, grad_weight.view_as(expert_weights).to(expert_weights.dtype), None


def sum_over_choices(rows: Tensor, row: Tensor, weight: Tensor | None = None) -> Tensor:
    """rows [R, D], row [T, K] -> [T, D]: the sum over k, in order, of (weight[t, k] *) rows[row[t, k]].

    In fp32, or the rows' dtype if that is wider.
    """
    total = rows.new_zeros(row.shape[0], rows.shape[1], dtype=wide_dtype(rows))
    for k in range(row.shape[1]):
        term = rows.index_select(0, row[:, k]).to(total.dtype)
        # multiplied and added apart: a fused multiply-add may be used for some elements only
        total += term if weight is None else term * weight[:, k : k + 1].to(total.dtype)
    return total


def wide_dtype(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)

"""The dispatcher of a layer whose experts are all on this rank."""

from typing import NamedTuple

import torch
from torch import Tensor

from ep_dispatch._permute import Gather, HomeOrder, WeightedSum, check_shapes, check_weights, sort_by_expert


class LocalDispatched(NamedTuple):
    """Complete at once."""

    rows: Tensor
    """[T*K, D] grouped by expert; rows of masked choices lie past the last expert's."""
    tokens_per_expert: Tensor
    """[E] int64."""
    handle: HomeOrder

    def wait(self) -> "LocalDispatched":
        return self


class LocalDispatcher:
    """Groups tokens by expert and back, without communication and without a host sync."""

    def dispatch(self, hidden: Tensor, expert_ids: Tensor, num_experts: int) -> LocalDispatched:
        """[T, D], [T, K] int64 in 0..E (E sends nothing) -> rows [T*K, D].

        Raises:
            ValueError: the shapes do not fit together.
            RuntimeError: an id is not in 0..E; without a host sync, so on an accelerator when it gets there.
        """
        check_shapes(hidden, expert_ids)
        place, row, counts, invalid = sort_by_expert(expert_ids, num_experts)
        torch._assert_async(invalid == 0, f"expert_ids must be in 0..num_experts = {num_experts}")
        order = HomeOrder(place // max(expert_ids.shape[1], 1), place, row, None)
        return LocalDispatched(Gather.apply(hidden, order), counts, order)

    def combine(self, rows: Tensor, expert_weights: Tensor, handle: HomeOrder) -> Tensor:
        """[T*K, D], [T, K] -> [T, D] in the rows' dtype; sums in fp32 over K in order."""
        check_weights(expert_weights, handle)
        return WeightedSum.apply(rows, expert_weights, handle)

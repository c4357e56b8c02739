"""A dispatcher whose traffic is given instead of exchanged: what a layer holds in memory, without ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ep_dispatch._all_to_all import AllToAllDispatcher
from ep_dispatch._exchange import Splits
from ep_dispatch._permute import SortedChoices


class _Axis:
    """As much of a mesh, and of its group, as a dispatcher asks of it, without a process group."""

    ndim = 1
    group_name = "planned"


class PlannedDispatcher(AllToAllDispatcher):
    """All that `AllToAllDispatcher` does on one rank but the exchange of counts, for tensors on the meta device.

    The same operators run on buffers of the same sizes, forward and backward, so their shapes and lifetimes can be
    measured before there are any ranks.
    """

    def __init__(self, sent: Sequence[int], received: Sequence[int], num_local_experts: int) -> None:
        """
        Args:
            sent: rows that this rank sends to each rank of the ep axis; their sum is at most T*K.
            received: rows that it gets from each.
            num_local_experts: e, those of this rank.

        Raises:
            ValueError: `sent` and `received` are of different lengths.
        """
        if len(sent) != len(received):
            raise ValueError(f"sent has {len(sent)} ranks and received {len(received)}: they must be the same ranks")
        super().__init__(_Axis())  # type: ignore[arg-type]  # stands for a DeviceMesh
        self._splits = Splits(list(sent), list(received), _Axis())  # type: ignore[arg-type]  # and for its group
        self._num_local_experts = num_local_experts

    def _exchange_counts(self, choices: SortedChoices, num_experts: int) -> tuple[Tensor, Splits, Tensor]:
        shape = (len(self._splits.received), self._num_local_experts)
        received = torch.empty(shape, dtype=torch.int64, device="meta")
        return received, self._splits, received.sum(0)

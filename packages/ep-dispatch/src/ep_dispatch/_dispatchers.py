"""The dispatchers: tokens grouped by expert on this rank, or sent to the ranks which hold their experts, and back.

Who holds which expert is the split of `torch.chunk`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ep_dispatch._exchange import Finish, Flight, Splits, Start, start, to_host, wait
from ep_dispatch._permute import (
    Gather,
    HomeOrder,
    Permute,
    SortedChoices,
    WeightedSum,
    build_permute_indices,
    check_shapes,
    check_weights,
    home_order,
    inverse_permutation,
    sort_by_expert,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ExpertShardingError(ValueError):
    """A model's experts cannot be split over this mesh."""


def chunk_size(num_experts: int, degree: int) -> int:
    """Experts on every rank but the last ones, which may hold fewer.

    Raises:
        ExpertShardingError: a rank would hold none.
    """
    size = -(-num_experts // degree)
    if (degree - 1) * size >= num_experts:
        work = ", ".join(str(d) for d in range(1, num_experts + 1) if (d - 1) * -(-num_experts // d) < num_experts)
        counts = ", ".join(str(len(owned_experts(num_experts, size, rank))) for rank in range(degree))
        raise ExpertShardingError(
            f"num_experts = {num_experts} on ep = {degree} ranks leaves a rank without an expert ({counts}): every "
            f"rank must hold at least one; degrees that work: {work}"
        )
    return size


def owned_experts(num_experts: int, size: int, rank: int) -> range:
    """The experts of `rank`, where `size` is `chunk_size`."""
    return range(min(rank * size, num_experts), min((rank + 1) * size, num_experts))


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
        choices = sort_by_expert(expert_ids, num_experts)
        torch._assert_async(choices.invalid == 0, f"expert_ids must be in 0..num_experts = {num_experts}")
        order = home_order(expert_ids, choices, expert_ids.numel(), num_experts)
        return LocalDispatched(Gather.apply(hidden, order), choices.counts, order)

    def combine(self, rows: Tensor, expert_weights: Tensor, handle: HomeOrder) -> Tensor:
        """[T*K, D], [T, K] -> [T, D] in the rows' dtype; sums in fp32 over K in order."""
        check_weights(expert_weights, handle)
        return WeightedSum.apply(rows, expert_weights, handle)


class SplitMismatchError(ValueError):
    """Ranks disagree on what they exchange."""


class AllToAllHandle(NamedTuple):
    """What `combine` needs to bring the rows home, and what was counted on the way."""

    order: HomeOrder
    by_expert: Tensor
    """[R] int64: rows by expert = rows by sender, indexed by this."""
    by_sender: Tensor
    """[R] int64: its inverse."""
    splits: Splits
    tokens_per_expert: Tensor
    """[e] int64: rows received for each expert of this rank."""
    local_tokens_per_expert: Tensor
    """[E] int64: rows that this rank sent to each expert of the layer."""


class AllToAllDispatched:
    """Rows on their way; `rows` may be read after `wait()`.

    Attributes:
        tokens_per_expert: [e] int64 on the rows' device; host_tokens_per_expert: the same on the host.
        exact: there are no rows past the last expert's.
    """

    exact = True

    def __init__(self, pending: Tensor, flight: Flight, handle: AllToAllHandle, host_tokens_per_expert: Tensor) -> None:
        self._pending: Tensor | None = pending
        self._flight = flight
        self._rows: Tensor | None = None
        self.handle = handle
        self.tokens_per_expert = handle.tokens_per_expert
        self.host_tokens_per_expert = host_tokens_per_expert

    @property
    def rows(self) -> Tensor:
        """[R, D], grouped by expert and source rank."""
        if self._rows is None:
            raise RuntimeError("the rows are still on their way: call wait() first")
        return self._rows

    def wait(self) -> "AllToAllDispatched":
        if self._pending is not None:
            arrived = Finish.apply(self._pending, self._flight)
            self._rows = Permute.apply(arrived, self.handle.by_expert, self.handle.by_sender)
            self._pending = None
        return self


class AllToAllDispatcher:
    """Tokens to their experts' ranks and back, by all-to-alls on the expert-parallel axis.

    Experts are held as `torch.chunk` splits them. A dispatch costs every rank the same collectives, whatever its
    tokens: an all-to-all of counts, one of rows, and one of rows on the way back; backward costs two of rows. It
    waits for the device once, to learn how many rows go where. Results equal those of one process on the ranks'
    tokens in rank order, bit for bit.
    """

    def __init__(
        self,
        ep_mesh: "DeviceMesh",
        *,
        dedup: Literal["auto", "never"] = "auto",
        exact: bool = True,
        check_splits: bool = False,
    ) -> None:
        """
        Args:
            ep_mesh: 1-D mesh of the ranks that share the experts.
            dedup: whether a token goes once to a rank that holds several of its experts. "auto" and "never" both
                send it once for each expert.
            exact: buffers of just the rows that are there. False (buffers of a fixed size) is not available.
            check_splits: compare the ranks' splits before rows are sent, and say which ranks disagree instead of
                hanging; costs a collective and a host sync for each dispatch.

        Raises:
            ValueError: the mesh is not 1-D, or an option is not available.
        """
        if ep_mesh.ndim != 1:
            raise ValueError(f"ep_mesh has {ep_mesh.ndim} axes: must be the 1-D expert-parallel axis of the mesh")
        if dedup not in ("auto", "never"):
            raise ValueError(
                f'dedup = {dedup!r}: must be "auto" or "never"; sending a token once per rank is not built'
            )
        if not exact:
            raise ValueError("exact = False: must be True; buffers of a fixed size are not built")
        self.ep_mesh, self.check_splits = ep_mesh, check_splits

    def dispatch(self, hidden: Tensor, expert_ids: Tensor, num_experts: int) -> AllToAllDispatched:
        """[T, D], [T, K] int64 in 0..E (E sends nothing) -> the rows of this rank's experts, from all ranks.

        Raises:
            ValueError: the shapes do not fit together; or, on all ranks, an id of one of them is not in 0..E.
        """
        check_shapes(hidden, expert_ids)
        choices = sort_by_expert(expert_ids, num_experts)
        received_counts, splits, host_counts = self._exchange_counts(choices, num_experts)
        if self.check_splits:
            _check(splits, hidden, num_experts)
        order = home_order(expert_ids, choices, sum(splits.sent), num_experts)
        flight = Flight(splits, hidden.device)
        pending = Start.apply(Gather.apply(hidden, order), flight.anchor, flight)
        by_expert = build_permute_indices(received_counts, sum(splits.received))
        handle = AllToAllHandle(
            order,
            by_expert,
            inverse_permutation(by_expert),
            splits,
            tokens_per_expert=received_counts.sum(0),
            local_tokens_per_expert=choices.counts,
        )
        return AllToAllDispatched(pending, flight, handle, host_counts)

    def combine(self, rows: Tensor, expert_weights: Tensor, handle: AllToAllHandle) -> Tensor:
        """[R, D], [T, K] -> [T, D] in the rows' dtype; weights applied at home, sums in fp32 over K in order."""
        check_weights(expert_weights, handle.order)
        flight = Flight(handle.splits.reversed(), rows.device)
        pending = Start.apply(Permute.apply(rows, handle.by_sender, handle.by_expert), flight.anchor, flight)
        return WeightedSum.apply(Finish.apply(pending, flight), expert_weights, handle.order)

    def _exchange_counts(self, choices: SortedChoices, num_experts: int) -> tuple[Tensor, Splits, Tensor]:
        """Rows received by (source rank, local expert) [ep, e]; the splits; the sum [e] on the host."""
        degree, group = self.ep_mesh.size(), self.ep_mesh.get_group()
        size = chunk_size(num_experts, degree)
        local = len(owned_experts(num_experts, size, self.ep_mesh.get_local_rank()))
        # the last ranks may hold fewer experts than the others: zeros make all chunks alike
        by_rank = F.pad(choices.counts, (0, degree * size - num_experts)).view(degree, size)
        # every rank learns whose ids are wrong, so that all of them raise
        sent = torch.cat([by_rank, choices.invalid.expand(degree, 1)], 1)
        even = [size + 1] * degree
        received = wait(start(sent.flatten(), Splits(even, even, group))).view(degree, size + 1)
        host = to_host(torch.cat([by_rank.sum(1), received.flatten()]))
        host_received = host[degree:].view(degree, size + 1)
        _refuse_invalid(host_received[:, size].tolist(), num_experts)
        host_counts = host_received[:, :size]
        splits = Splits(host[:degree].tolist(), host_counts.sum(1).tolist(), group)
        return received[:, :local], splits, host_counts.sum(0)[:local]


def _refuse_invalid(by_rank: list[int], num_experts: int) -> None:
    wrong = {rank: count for rank, count in enumerate(by_rank) if count}
    if wrong:
        found = ", ".join(f"{count} on expert-parallel rank {rank}" for rank, count in wrong.items())
        raise ValueError(
            f"expert_ids must be in 0..num_experts = {num_experts} (which sends nothing), and are not: {found}"
        )


def _check(splits: Splits, hidden: Tensor, num_experts: int) -> None:
    """All ranks learn what each of them sends and expects; a disagreement raises on all of them."""
    degree = len(splits.sent)
    dtype_size = hidden.element_size()
    mine = torch.tensor([*splits.sent, *splits.received, hidden.shape[1], dtype_size, num_experts])
    even = [len(mine)] * degree
    everyone = wait(start(mine.to(hidden.device).repeat(degree), Splits(even, even, splits.group)))
    table = everyone.view(degree, -1).cpu()
    sent, received, others = table[:, :degree], table[:, degree : 2 * degree], table[:, 2 * degree :]
    for name, column in zip(("width D", "bytes per element", "num_experts"), others.t().tolist(), strict=True):
        if len(set(column)) > 1:
            raise SplitMismatchError(f"{name} differs over the expert-parallel ranks 0..{degree - 1}: {column}")
    for source, target in (sent != received.t()).nonzero().tolist():
        raise SplitMismatchError(
            f"expert-parallel rank {source} sends {int(sent[source, target])} rows to rank {target}, which expects "
            f"{int(received[target, source])}"
        )


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

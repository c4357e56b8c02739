"""All-to-alls that autograd knows, started and awaited apart, and the one transfer to the host.

Each half is a function of its own, so that what runs between them overlaps with the transfer in forward and,
since autograd goes backwards through the same order, in backward as well.

For activation checkpointing: the operator `ep_dispatch::to_host` carries the attribute `must_save`, by the
protocol that `moe_core` describes: a policy keeps its result and a recomputation reads no counts back again.
The all-to-alls themselves are `_c10d_functional::all_to_all_single`; keeping the results of those whose input is
an integer tensor saves a recomputation the exchange of counts, keeping the others trades memory for the exchange
of rows.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.library.custom_op("ep_dispatch::to_host", mutates_args=())
def to_host(counts: Tensor) -> Tensor:
    """A copy on the host; waits for the device."""
    return counts.to("cpu", copy=True)


@to_host.register_fake
def _(counts: Tensor) -> Tensor:
    return torch.empty_like(counts, device="cpu")


setattr(torch.ops.ep_dispatch.to_host.default, "must_save", True)  # noqa: B010 - mypy knows no such attribute


class Splits(NamedTuple):
    """Rows to and from each rank of a group, on the host."""

    sent: list[int]
    received: list[int]
    group: "ProcessGroup"

    def reversed(self) -> "Splits":
        return Splits(self.received, self.sent, self.group)


def start(rows: Tensor, splits: Splits) -> Tensor:
    """Start an all-to-all of the rows [sum(sent), ...]; the result may be read after `wait` only."""
    return torch.ops._c10d_functional.all_to_all_single(
        rows.contiguous(), splits.received, splits.sent, splits.group.group_name
    )


def wait(pending: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(pending)


class Flight:
    """One exchange under autograd: ties the two halves together."""

    def __init__(self, splits: Splits, device: torch.device) -> None:
        self.splits = splits
        # makes the exchange part of the graph on every rank, whatever the rows require: a rank without tokens may
        # have rows that require no gradient, and the others' gradients are to come back all the same
        self.anchor = torch.empty(0, device=device, requires_grad=torch.is_grad_enabled())
        self.gradient: Tensor | None = None
        """What backward has sent and not yet awaited."""


class Start(torch.autograd.Function):
    """Starts the rows' way out; backward waits for the gradient that `Finish` has sent on its way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return start(rows, flight.splits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # `grad` has the shape that autograd asks for here, of the rows on the other side; the values come by
        # the flight
        pending, ctx.flight.gradient = ctx.flight.gradient, None
        return wait(pending), None, None


class Finish(torch.autograd.Function):
    """Waits for the rows that `Start` sent; backward starts the gradient's way back."""

    @staticmethod
    def forward(ctx: Any, pending: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return wait(pending).view_as(pending)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.flight.gradient = start(grad, ctx.flight.splits.reversed())
        return grad, None

"""Running a function inside the head module's call, so that the hooks on it act once around all chunks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from chunked_loss._fsdp_head import HeadCall, take_fp32_gradients

Inner = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class HeadError(ValueError):
    """The model's head cannot be used for a chunked loss; the message says what to change."""


def find_head(model: nn.Module, name: str) -> nn.Module:
    """The submodule `name` of `model`, which must have a weight [V, D]."""
    try:
        head = model.get_submodule(name)
    except AttributeError:
        children = ", ".join(child for child, _ in model.named_children())
        raise HeadError(f"head = {name!r}: the model has no such submodule; it has {children or 'none'}") from None
    if not isinstance(getattr(head, "weight", None), Tensor):
        raise HeadError(f"head = {name!r}: {type(head).__name__} has no weight; give the output projection")
    return head


def call_in_head(
    head: nn.Module, hidden: Tensor, inner: Inner, *, keep_head_unsharded: bool = False, recompute: bool = False
) -> Tensor:
    """`inner(hidden, weight, bias)` as the head's forward: [] fp32, with its own autograd function on top.

    FSDP's hooks gather the weight before and free it after, once, whatever `inner` does with it. As `inner` has
    the gradients ready before backward (unless `recompute`), the weight is not gathered again there, and it asks
    for an fp32 gradient, so that what is reduced over the ranks was never rounded.
    """
    if not isinstance(head, FSDPModule):
        with _replaced_forward(head, lambda rows: inner(rows, *_weights(head))):
            return _checked(head(hidden))
    call = HeadCall(head, gathers_in_backward=recompute, keeps_unsharded=keep_head_unsharded)

    def forward(rows: Tensor) -> Tensor:
        weight, bias = _weights(head)
        take_fp32_gradients(weight, bias)
        loss = inner(rows, weight, bias)
        call.register(loss)
        return loss

    with _replaced_forward(head, forward), call.in_forward():
        loss = _checked(head(hidden))
    call.finish(hidden)
    return loss


def _weights(head: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = head.weight, getattr(head, "bias", None)
    assert isinstance(weight, Tensor)
    if isinstance(weight, DTensor):
        raise HeadError(
            "the head's weight is still sharded while the head runs, so it belongs to an outer FSDP unit: make "
            "the head a unit of its own (fully_shard(head), or separate_lm_head=True with fsdp_ep)"
        )
    return weight, bias


def _checked(loss: Tensor) -> Tensor:
    if loss.dtype not in (torch.float32, torch.float64):
        raise HeadError(
            f"the loss left the head as {loss.dtype}: its mixed-precision policy must not set output_dtype to less "
            "than float32"
        )
    return loss


@contextmanager
def _replaced_forward(head: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """`forward` on this instance alone; hooks and the class stay as they are."""
    before = vars(head).get("forward")
    head.forward = forward
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before

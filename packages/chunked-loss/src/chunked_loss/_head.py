"""The head module: finding it, leaving it out of the model's call, and running the loss inside its own call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


class SkippedHead(nn.Module):
    """Stands where the head was: hands its input on, and remembers it."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head  # a submodule still, so that what walks over the model, like FSDP's set-up, meets it
        self._hidden: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """[..., D]: what the head was given in the model's last call.

        Raises:
            RuntimeError: the model has not called its head.
        """
        if self._hidden is None:
            raise RuntimeError("the model has not called its head inside `with skip_lm_head(model)`")
        return self._hidden

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._hidden = hidden
        return hidden


@contextmanager
def skip_lm_head(model: nn.Module, head: str = "lm_head") -> Iterator[SkippedHead]:
    """Inside the block, `model` gives out what it would give its head: no logits are formed, no hook of it runs.

        with skip_lm_head(model) as skipped:
            model(tokens)
        loss = linear_cross_entropy(skipped.hidden, model.lm_head.weight, labels)

    What the model does with its logits afterwards (a cap, a scale) happens to its output, not to `skipped.hidden`:
    pass the cap to the loss. The head is back in its place after the block, also after an exception.

    Args:
        head: name of the submodule with the weight [V, D].

    Raises:
        ValueError: the model has no such submodule.
    """
    module = find_head(model, head)
    parent_name, _, name = head.rpartition(".")
    parent = model.get_submodule(parent_name)
    skipped = SkippedHead(module)
    skipped.train(module.training)
    setattr(parent, name, skipped)
    try:
        yield skipped
    finally:
        setattr(parent, name, module)

"""Running a function inside the head module's call, so that the hooks on it act once around all chunks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


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


def call_in_head(head: nn.Module, hidden: Tensor, inner: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Tensor:
    """`inner(hidden, weight, bias)` as the head's forward: [] fp32, with its own autograd function on top.

    FSDP's hooks gather the weight before and free it after, once, whatever `inner` does with it. As `inner`
    has the gradients ready before backward, the weight is not gathered again there, and it asks for an fp32
    gradient, so that what is reduced over the ranks was never rounded.
    """

    def forward(hidden: Tensor) -> Tensor:
        weight, bias = head.weight, getattr(head, "bias", None)
        assert isinstance(weight, Tensor)
        if isinstance(weight, DTensor):
            raise HeadError(
                "the head's weight is still sharded while the head runs, so it belongs to an outer FSDP unit: make "
                "the head a unit of its own (fully_shard(head), or separate_lm_head=True with fsdp_ep)"
            )
        if isinstance(head, FSDPModule):
            _take_fp32_gradients(weight, bias)
        loss = inner(hidden, weight, bias)
        if isinstance(head, FSDPModule):
            _gather_only_once(head, loss)
        return loss

    with _replaced_forward(head, forward):
        loss = head(hidden)
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


def _take_fp32_gradients(*parameters: Tensor | None) -> None:
    """Set on the gathered copies, which FSDP owns: the user's parameters keep their gradients' dtype."""
    for parameter in parameters:
        if parameter is not None and parameter.is_leaf and hasattr(parameter, "grad_dtype"):
            parameter.grad_dtype = torch.float32


def _gather_only_once(head: FSDPModule, loss: Tensor) -> None:
    """Switch the gather before backward off for this loss's own backward, and on again after it.

    FSDP's hook on the loss comes later than this one, so the switch is off when that hook reads it.
    """
    if loss.grad_fn is None:
        return
    loss.register_hook(lambda _: head.set_unshard_in_backward(False))
    loss.grad_fn.register_hook(lambda *_: head.set_unshard_in_backward(True))

"""What the loss asks of a head that is an FSDP2 unit of its own, and gives back.

Some of it only FSDP's private state tells: whether the next backward reduces gradients (there is a setter only), and
where the weights go after forward. These names are the same in torch 2.11 to 2.13.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule


class HeadCall:
    """One call of the head, whose forward makes one loss.

    The loss's gradient passes, in this order, what `register` hooks to it, FSDP's own hook, and what `finish` hooks.
    So a switch is thrown for FSDP's hook alone, and stands as before whatever happens afterwards.
    """

    def __init__(self, head: FSDPModule, *, keeps_unsharded: bool) -> None:
        self._head = head
        self._gathers_in_backward = True
        self._keeps_unsharded = keeps_unsharded and torch.is_grad_enabled()
        self._loss: Tensor | None = None

    def register(self, loss: Tensor, *, gathers_in_backward: bool) -> None:
        """Inside the head's forward."""
        self._loss = loss
        self._gathers_in_backward = gathers_in_backward
        if loss.requires_grad:
            loss.register_hook(lambda _: self._before_fsdp())

    def finish(self, hidden: Tensor) -> None:
        """After the head's call on `hidden`."""
        # held no longer: its hooks hold this object, and no collector sees a circle that leads through a graph
        loss, self._loss = self._loss, None
        if loss is None or not loss.requires_grad:
            return
        loss.register_hook(lambda _: self._after_fsdp())
        if self._keeps_unsharded and hidden.requires_grad:
            # its gradient comes after the head's backward is over
            hidden.register_hook(lambda _: self._head.set_reshard_after_backward(True, recurse=False))

    def _before_fsdp(self) -> None:
        if not self._gathers_in_backward:
            self._head.set_unshard_in_backward(False)
        if self._keeps_unsharded:
            reduces = all(group.reduce_grads for group in _groups(self._head))
            self._head.set_reshard_after_backward(reduces, recurse=False)

    def _after_fsdp(self) -> None:
        self._head.set_unshard_in_backward(True)

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Around the head's call: the weights stay gathered after it, if asked for, and never after an exception."""
        groups = _groups(self._head) if self._keeps_unsharded else []
        before = [group.post_forward_mesh_info for group in groups]
        for group in groups:
            group.post_forward_mesh_info = None
        with resharded_on_exception(self._head):
            try:
                yield
            except BaseException:
                self._loss = None  # as in `finish`, which is not reached
                raise
            finally:
                for group, mesh_info in zip(groups, before, strict=True):
                    group.post_forward_mesh_info = mesh_info


@contextmanager
def resharded_on_exception(head: object, wanted: bool = True) -> Iterator[None]:
    """Weights that were left gathered would go stale when the caller goes on after an exception."""
    try:
        yield
    except BaseException:
        if wanted and isinstance(head, FSDPModule):
            head.set_reshard_after_backward(True, recurse=False)
            head.reshard()
        raise


def take_fp32_gradients(parameters: Iterable[Tensor]) -> None:
    """Set on the gathered copies, which FSDP owns: the user's parameters keep their gradients' dtype.

    Where torch lacks `grad_dtype`, gradients are rounded to the parameter's dtype before they are reduced.
    """
    for parameter in parameters:
        if parameter.is_floating_point() and hasattr(parameter, "grad_dtype"):
            parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)


def output_dtype(head: FSDPModule) -> torch.dtype | None:
    """What the unit's policy casts outputs to."""
    dtype: torch.dtype | None = head._get_fsdp_state()._mp_policy.output_dtype
    return dtype


def _groups(head: FSDPModule) -> list[Any]:
    state = head._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]

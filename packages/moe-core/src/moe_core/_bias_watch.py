"""Tells, once, that a router is trained and nobody moves its bias.

Without `update_router_bias` training goes on as if nothing were wrong, with loads that nothing evens out. What
gives it away is seen without reading a tensor back: optimizer steps go by in which a router counted tokens, and
its bias is not written to (torch numbers the writes to a tensor). Microbatches do not matter, nor how parameters
are sharded, nor how many optimizers share a step, since between two steps that count lies a forward pass.

Anything that writes to the bias keeps this silent, as do optimizers that are none of torch's and compiled
forward passes. It goes to the log and is no `warnings` warning: training must not end for it where those are errors.
"""

import logging
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import attrs
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from moe_core._router import TopKRouter

STEPS = 16
"""Optimizer steps after which a bias that stood still counts as forgotten."""

_log = logging.getLogger(__name__)


@attrs.define
class _Watch:
    version: int
    """Of the bias, when `steps` was 0."""
    steps: int = 0
    has_counted: bool = False
    """Whether tokens were counted since the last optimizer step."""
    has_warned: bool = False


_watches: "WeakKeyDictionary[TopKRouter, _Watch]" = WeakKeyDictionary()


def note_counting(router: "TopKRouter") -> None:
    """A training forward pass counted tokens for a router that has a bias. No host sync."""
    if torch.compiler.is_compiling() or router.bias is None or not router.weight.requires_grad:
        return
    _follow_optimizers()
    watch = _watches.get(router)
    if watch is None:
        watch = _watches[router] = _Watch(router.bias._version)
    watch.has_counted = True


@cache
def _follow_optimizers() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    forgotten = [watch for router, watch in _watches.items() if _is_forgotten(router, watch)]
    if not forgotten:
        return
    for watch in forgotten:
        watch.has_warned = True
    _log.warning(
        "%d router(s) counted tokens through %d optimizer steps, and their bias was not updated: experts' loads are "
        "not being balanced. Call moe_core.update_router_bias(model, mesh) after each optimizer step, with rate=0 to "
        "leave the bias where it is, or build the routers with selection_bias=False.",
        len(forgotten),
        STEPS,
    )


def _is_forgotten(router: "TopKRouter", watch: _Watch) -> bool:
    if not watch.has_counted or watch.has_warned or router.bias is None:
        return False
    watch.has_counted = False
    if router.bias._version != watch.version:
        watch.version, watch.steps = router.bias._version, 0
    watch.steps += 1
    return watch.steps > STEPS

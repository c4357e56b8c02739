"""Activation checkpointing that recomputes blocks in backward, but never a decision.

A recomputed router may break a near-tie the other way and train another model than the one whose loss was
taken. So an operator whose result must be kept says so by a true attribute `must_save` on its
`torch._ops.OpOverload`, e.g. `torch.ops.my_router.choose.default.must_save = True`, and every mode here saves
it; such an operator must not write to its arguments. In the same way one that is dear to compute again says
`expensive`, and "selective" saves it. Nothing else of the package that defines it has to be known.
"""

import functools
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_ep._errors import ShardingError
from fsdp_ep._saved_results import KeepsResult, SavedResults
from fsdp_ep._units import find_blocks

Mode = Literal["none", "full", "every_nth", "selective"]

_MARK = "_fsdp_ep_checkpointed"

_EXPENSIVE = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution"})
_EXPENSIVE_PREFIXES = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_scaled_mm")
_COMMUNICATION = frozenset({"_c10d_functional", "_c10d_functional_autograd"})


def apply_activation_checkpointing(
    model: nn.Module, mode: Mode = "full", every: int = 1, *, blocks: Iterable[nn.Module] | None = None
) -> nn.Module:
    """Free activations inside blocks after forward, and compute them again in backward.

    Wraps the `forward` of each chosen block in place, so modules, parameter names and state-dict keys stay as
    they are. Comes before `fully_shard_moe`. Gradients are bit-identical to those without it, given
    deterministic operators; the RNG state is restored for dropout.

    With `torch.compile`, compile what is checkpointed: `block.forward = torch.compile(block.forward)` before this.
    A block that is compiled afterwards, or as part of its model, runs uncompiled: PyTorch never compiles what a
    checkpoint calls. Matrix products that a compiled block fuses, or writes into buffers of its own, are recomputed in
    "selective" as well.

    Args:
        model: changed in place; may be on the meta device.
        mode: "none"; "full": every block; "every_nth": the first of every `every` blocks, in order;
            "selective": every block, but results of matrix products, convolutions, attention kernels,
            functional collectives and operators marked `expensive` are kept, the rest is recomputed. One that the
            block writes over, or returns, is kept as a copy.
        every: with "every_nth", at least 1.
        blocks: default: the children of the outermost `nn.ModuleList`s.

    Returns:
        The model.

    Raises:
        ShardingError: unknown mode, `every` below 1, no block, a block that is checkpointed already.

    Source: Chen et al. 2016 (training with sublinear memory); selective by operation as in PyTorch and
    TorchTitan.
    """
    if mode not in get_args(Mode):
        raise ShardingError("mode", repr(mode), f"must be one of {', '.join(get_args(Mode))}", "'full' saves most")
    if every < 1:
        raise ShardingError("every", every, "must be at least 1", "every = 1 checkpoints every block")
    if mode == "none":
        return model
    chosen = find_blocks(model) if blocks is None else list(blocks)
    keeps_result = _is_marked_or_expensive if mode == "selective" else _is_marked
    for block in chosen[:: every if mode == "every_nth" else 1]:
        _checkpoint_forward(block, keeps_result)
    return model


def _checkpoint_forward(block: nn.Module, keeps_result: KeepsResult) -> None:
    forward = block.forward
    if hasattr(forward, _MARK):
        rule = "is checkpointed already"
        raise ShardingError("blocks", type(block).__name__, rule, "call apply_activation_checkpointing once")

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        results = SavedResults(keeps_result)
        out = checkpoint(forward, *args, use_reentrant=False, context_fn=results.contexts, **kwargs)
        results.copy_what_shares_memory_with(out)  # whoever gets it may write to it
        return out

    setattr(checkpointed, _MARK, True)
    # on the instance: a wrapper module would rename the parameters
    block.forward = checkpointed


def _is_marked(operator: Any) -> bool:
    marked: bool = getattr(operator, "must_save", False)
    if marked and operator._schema.is_mutable:
        rule = "must_save = True on an operator that writes to its arguments, which a recomputation would miss"
        raise ShardingError("operator", operator, rule, "let it return new tensors")
    return marked


def _is_marked_or_expensive(operator: Any) -> bool:
    namespace, _, name = operator._schema.name.partition("::")
    expensive = name in _EXPENSIVE or name.startswith(_EXPENSIVE_PREFIXES) or getattr(operator, "expensive", False)
    return _is_marked(operator) or namespace in _COMMUNICATION or expensive

"""Activation checkpointing that recomputes blocks in backward, but never a decision.

A recomputed router may break a near-tie the other way and train another model than the one whose loss was
taken. So an operator whose result must be kept says so by a true attribute `must_save` on its
`torch._ops.OpOverload`, e.g. `torch.ops.my_router.choose.default.must_save = True`, and every mode here saves
it; such an operator must not write to its arguments. In the same way one that is dear to compute again says
`expensive`, and "selective" saves it. Nothing else of the package that defines it has to be known.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from fsdp_ep._units import ShardingError, find_blocks

Mode = Literal["none", "full", "every_nth", "selective"]

KeepsResult = Callable[[Any], bool]
"""Whether the results of an operator (`torch._ops.OpOverload`) are kept.

Those of one that writes to its arguments, such as `mm.out`, never are: the writing would be missing in a recomputation.
"""

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
        results = _SavedResults(keeps_result)
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


class _SavedResults:
    """Of one call of a block: results that its forward pass keeps, and its recomputations find again.

    `torch.utils.checkpoint.create_selective_checkpoint_contexts` does the same, but demands that both passes run
    the same operators in all. Inside a block they do not: FSDP gathers and copies in the hooks of nested units
    (experts, fp32 modules), in one pass and not in the other, as prefetching has it.

    What is kept shares its memory with what the block goes on with, and is copied just before an operator writes
    there. Version counters would not tell: under a dispatch mode a detached tensor has one of its own.
    """

    def __init__(self, keeps_result: KeepsResult) -> None:
        self._keeps_result = keeps_result
        self._of_operator: dict[Any, list[Any]] = defaultdict(list)
        self._in_storage: dict[int, list[_Kept]] = defaultdict(list)

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """What `torch.utils.checkpoint` enters around the forward pass, and around each recomputation."""
        return _Record(self), _Replay(self)

    def keeps(self, operator: Any) -> bool:
        return self._keeps_result(operator) and not operator._schema.is_mutable

    def keep(self, operator: Any, out: Any) -> None:
        self._of_operator[operator].append(tree_map(self._kept, out))

    def _kept(self, out: Any) -> Any:
        if not isinstance(out, Tensor):
            return out
        kept = _Kept(out)
        self._index(kept)
        return kept

    def _index(self, kept: "_Kept") -> None:
        for storage in _storages(kept.tensor):
            self._in_storage[storage].append(kept)

    def find(self, operator: Any, position: int) -> Any:
        """The results of the forward pass's call number `position` of the operator."""
        found = self._of_operator[operator]
        if position >= len(found):
            raise RuntimeError(
                f"recomputation calls {operator} more often than the forward pass did ({len(found)} times): "
                "a checkpointed block must run the same operators whose results are kept"
            )
        return tree_map(lambda x: x.tensor.detach() if isinstance(x, _Kept) else x, found[position])

    def copy_what_is_written(self, operator: Any, args: Any, kwargs: Any) -> None:
        """To be called before the operator runs."""
        for position, name in _written_arguments(operator):
            self.copy_what_shares_memory_with(args[position] if position < len(args) else kwargs.get(name))

    def copy_what_shares_memory_with(self, tensors: Any) -> None:
        """Give what is kept in the memory of these tensors memory of its own."""
        for tensor in tree_leaves(tensors):
            for storage in _storages(tensor) if isinstance(tensor, Tensor) else ():
                for kept in self._in_storage.pop(storage, ()):
                    kept.tensor = kept.tensor.clone()
                    self._index(kept)  # it may be handed out, and then written to


class _Kept:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def _storages(tensor: Tensor) -> Iterator[int]:
    """What names the memory that the tensor lies in, as long as it does."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:  # a DTensor, or a result on its way
        for name in flatten()[0]:
            yield from _storages(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()._cdata


@functools.cache
def _written_arguments(operator: Any) -> list[tuple[int, str]]:
    arguments = enumerate(operator._schema.arguments)
    return [(i, argument.name) for i, argument in arguments if argument.alias_info and argument.alias_info.is_write]


class _BesideCompilation(TorchDispatchMode):
    """Under most modes nothing is compiled. These see operators that compiled code calls as any others."""

    def __init__(self, results: _SavedResults) -> None:
        super().__init__()
        self._results = results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Record(_BesideCompilation):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._results.copy_what_is_written(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if self._results.keeps(func):
            self._results.keep(func, out)
        return out


class _Replay(_BesideCompilation):
    def __init__(self, results: _SavedResults) -> None:
        super().__init__(results)
        self._position: Counter[Any] = Counter()

    def __enter__(self) -> "_Replay":
        self._position.clear()  # a second backward through the same graph recomputes once more
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._results.copy_what_is_written(func, args, kwargs or {})
        if not self._results.keeps(func):
            return func(*args, **(kwargs or {}))
        self._position[func] += 1
        return self._results.find(func, self._position[func] - 1)

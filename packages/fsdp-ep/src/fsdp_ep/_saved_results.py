"""Results of chosen operators, kept from a forward pass and handed out again in its recomputation.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` does the same, but demands that both passes run
the same operators in all. Inside a block they do not: FSDP gathers and copies in the hooks of nested units
(experts, fp32 modules), in one pass and not in the other, as prefetching has it.

What is kept shares its memory with what the block goes on with, and is copied just before an operator writes there.
Version counters would not tell: under a dispatch mode a detached tensor has one of its own.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

KeepsResult = Callable[[Any], bool]
"""Whether the results of an operator (`torch._ops.OpOverload`) are kept.

Those of one that writes to its arguments, such as `mm.out`, never are: the writing would be missing in a recomputation.
"""


class SavedResults:
    """Of one call of a block: what its forward pass keeps, and its recomputations find again."""

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

    def __init__(self, results: SavedResults) -> None:
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
    def __init__(self, results: SavedResults) -> None:
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

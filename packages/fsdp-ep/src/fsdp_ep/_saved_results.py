"""Results of chosen operators, kept from a forward pass and handed out again in its recomputation.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` does the same, but demands that both passes run
the same operators in all. Inside a block they do not: FSDP gathers and copies in the hooks of nested units
(experts, fp32 modules), in one pass and not in the other, as prefetching has it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

KeepsResult = Callable[[Any], bool]
"""Whether the results of an operator (`torch._ops.OpOverload`) are kept."""


def saving_contexts(keeps_result: KeepsResult) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """What `torch.utils.checkpoint` enters around the forward pass, and around each recomputation."""
    results: dict[Any, list[Any]] = defaultdict(list)
    return _Record(keeps_result, results), _Replay(keeps_result, results)


class _Kept:
    """A tensor that must not be changed until it is handed out."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def get(self, operator: Any) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(f"a result of {operator}, kept for backward, was changed in place")
        return self._tensor.detach()


class _BesideCompilation(TorchDispatchMode):
    """Under most modes nothing is compiled. These see operators that compiled code calls as any others."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Record(_BesideCompilation):
    def __init__(self, keeps_result: KeepsResult, results: dict[Any, list[Any]]) -> None:
        super().__init__()
        self._keeps_result = keeps_result
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._keeps_result(func):
            self._results[func].append(tree_map(lambda x: _Kept(x) if isinstance(x, torch.Tensor) else x, out))
        return out


class _Replay(_BesideCompilation):
    def __init__(self, keeps_result: KeepsResult, results: dict[Any, list[Any]]) -> None:
        super().__init__()
        self._keeps_result = keeps_result
        self._results = results
        self._position: Counter[Any] = Counter()

    def __enter__(self) -> "_Replay":
        self._position.clear()  # a second backward through the same graph recomputes once more
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._keeps_result(func):
            return func(*args, **(kwargs or {}))
        position = self._position[func]
        self._position[func] += 1
        if position >= len(self._results[func]):
            raise RuntimeError(
                f"recomputation calls {func} more often than the forward pass did ({len(self._results[func])} times): "
                "a checkpointed block must run the same operators whose results are kept"
            )
        return tree_map(lambda x: x.get(func) if isinstance(x, _Kept) else x, self._results[func][position])

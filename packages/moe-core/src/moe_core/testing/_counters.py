"""Counters of what stalls a step: transfers to the host, and collectives."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_HOST = "_moe_core_on_host"


@attrs.define
class Count:
    """What was counted, by kind."""

    calls: "Counter[str]" = attrs.field(factory=Counter)
    bytes: "Counter[str]" = attrs.field(factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.calls.values())


class _Syncs(TorchDispatchMode):
    """Ops whose result, or whose result's shape, only the host can know."""

    _OPS = frozenset(
        {
            "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2",
            "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::equal",
            "aten::is_nonzero",
        }
    )  # fmt: skip

    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        inputs = list(_tensors(args))
        on_host = bool(inputs) and all(getattr(tensor, _HOST, False) for tensor in inputs)
        if not on_host and (name in self._OPS or _mask_indexing(name, args) or _unsized_repeat(name, args, kwargs)):
            self._count.calls[name.removeprefix("aten::")] += 1
        result = func(*args, **kwargs)
        if on_host:
            for tensor in _tensors(result):
                setattr(tensor, _HOST, True)
        return result


def _mask_indexing(name: str, args: tuple[Any, ...]) -> bool:
    if name not in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _unsized_repeat(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return name == "aten::repeat_interleave" and kwargs.get("output_size") is None


@contextmanager
def count_host_syncs() -> Iterator[Count]:
    """Count transfers to the host and data-dependent shapes inside the block.

    On the CPU every tensor is taken for device data, except the result of `.cpu()` or `.to("cpu")`, which
    is one transfer and may then be read freely. `.calls` has the counts by name of the operation.
    """
    count = Count()

    def counted(name: str, original: Callable[..., Any], marks: bool) -> Callable[..., Any]:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if getattr(self, _HOST, False):
                return original(self, *args, **kwargs)
            count.calls[name] += 1
            result = original(self, *args, **kwargs)
            if marks:
                result = result.clone() if result is self else result
                setattr(result, _HOST, True)
            return result

        return method

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        target = args[0] if args else kwargs.get("device")
        if isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu":
            rest = {**kwargs, "copy": True}
            return counted("cpu", originals["to"], True)(self, *args, **rest)
        return originals["to"](self, *args, **kwargs)

    originals = {name: getattr(torch.Tensor, name) for name in ("tolist", "cpu", "numpy", "to")}
    with ExitStack() as stack:
        # a dispatch mode does not see what these read
        for name in ("tolist", "numpy"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, counted(name, originals[name], False)))
        stack.enter_context(mock.patch.object(torch.Tensor, "cpu", counted("cpu", originals["cpu"], True)))
        stack.enter_context(mock.patch.object(torch.Tensor, "to", to))
        stack.enter_context(_Syncs(count))
        yield count


class _Collectives(TorchDispatchMode):
    _NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
    _NOT_COLLECTIVE = ("wait_tensor", "wrap_tensor_autograd", "monitored_barrier")

    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in self._NAMESPACES:
            kind = func._schema.name.split("::")[1].strip("_").removesuffix("_coalesced")
            if kind not in self._NOT_COLLECTIVE:
                self._count.calls[kind] += 1
                self._count.bytes[kind] += sum(t.numel() * t.element_size() for t in _tensors(args))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


@contextmanager
def count_collectives() -> Iterator[Count]:
    """Count collectives inside the block as the dispatcher sees them, from any thread's forward or backward.

    `.calls` and `.bytes` go by the operation's name without underscores, e.g. `allreduce`,
    `alltoall_base`, `all_gather_into_tensor`. Bytes are of all tensors that an operation is given.
    """
    count = Count()
    with _Collectives(count):
        yield count

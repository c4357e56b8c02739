"""The head module: finding it, leaving it out of the model's call, and running the loss inside its own call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from chunked_loss._fsdp_head import HeadCall, output_dtype, take_fp32_gradients

Projection = Callable[[Tensor], Tensor]
"""Rows [C, D] to logits [C, V], each row for itself."""


class LinearHead(NamedTuple):
    """A head that computes `F.linear(rows, weight, bias)` and nothing else."""

    weight: Tensor
    bias: Tensor | None


Inner = Callable[[Tensor, LinearHead | Projection], Tensor]


class HeadError(ValueError):
    """The model's head cannot be used for a chunked loss; the message says what to change."""


def find_head(model: nn.Module, name: str) -> nn.Module:
    """The submodule `name` of `model`, which must have a weight of whatever name, its own or of a module inside it."""
    try:
        head = model.get_submodule(name)
    except AttributeError:
        children = ", ".join(child for child, _ in model.named_children())
        raise HeadError(f"head = {name!r}: the model has no such submodule; it has {children or 'none'}") from None
    if next(head.parameters(), None) is None:
        raise HeadError(f"head = {name!r}: {type(head).__name__} has no weight; give the output projection")
    return head


def find_callable_head(model: nn.Module, name: str, *, recompute: bool = False) -> nn.Module:
    """The head whose call `call_in_head` may stand in for; what it does to a row is kept, or it is refused here.

    Reads modules and hooks only: no weight, so that no parametrization runs, and nothing on the device.

    Raises:
        HeadError: it names what of the head would be lost.
    """
    head = _without_torch_wrappers(find_head(model, name))
    in_the_way = _what_would_be_lost(head)
    if in_the_way is None and not _is_linear(head):
        in_the_way = _what_cannot_be_chunked(head, recompute)
    if in_the_way is not None:
        raise HeadError(f"head = {name!r}: {type(head).__name__} {in_the_way}; or use CLMCrossEntropyLoss")
    return head


def _without_torch_wrappers(head: nn.Module) -> nn.Module:
    """What torch.compile or activation checkpointing wrapped: they say how to compute it, and here the loss does."""
    while type(head).__module__.startswith("torch.") and not isinstance(head, FSDPModule) and not _hooks(head):
        inner = head._modules.get("_orig_mod", head._modules.get("_checkpoint_wrapped_module"))
        if inner is None:
            break
        head = inner
    return head


def _is_linear(head: nn.Module) -> bool:
    """By its code. FSDP and parametrizations make subclasses of nn.Linear that inherit its forward."""
    return type(head).forward is nn.Linear.forward and "forward" not in vars(head)


def _what_would_be_lost(head: nn.Module) -> str | None:
    """What acts on the logits, where the call gives the loss; hooks before forward act on the rows as always."""
    for kind, hooks in _hooks(head).items():
        for hook in hooks:
            if kind != "forward pre-hook" and not _is_of_fsdp(hook):
                return (
                    f"has a {kind}, {_name(hook)}, which would get the loss where it expects the logits: remove it, or "
                    "move what it does into the head's forward"
                )
    if type(head).__call__ is not nn.Module.__call__:
        return "has a __call__ of its own, which the loss would leave out: move what it does into forward"
    if isinstance(head, FSDPModule) and output_dtype(head) in (torch.bfloat16, torch.float16):
        return f"gives out {output_dtype(head)} by its mixed-precision policy, and so the loss: leave output_dtype out"
    return None


def _what_cannot_be_chunked(head: nn.Module, recompute: bool) -> str | None:
    """Why a head with a forward of its own cannot be called on one chunk of rows after another."""
    if recompute:
        return "is more than a linear layer: recompute = True cannot differentiate it twice; leave it out"
    for name, module in head.named_modules():
        if isinstance(module, (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)) and (
            module is not head or not isinstance(module, FSDPModule)
        ):
            return (
                f"holds {name or 'itself'}, a {type(module).__name__}, whose collectives would run for every chunk: "
                "make the head as a whole the unit, with fully_shard"
            )
        if isinstance(module, _BatchNorm):
            return (
                f"holds {name or 'itself'}, a {type(module).__name__}, whose statistics would be those of one chunk: "
                "normalise each row by itself"
            )
    for name, parameter in head.named_parameters():
        if parameter._backward_hooks:
            hook = next(iter(parameter._backward_hooks.values()))
            return f"has a hook on the gradient of {name}, {_name(hook)}, which would run for every chunk: remove it"
    return None


def _hooks(head: nn.Module) -> dict[str, list[Callable]]:
    """The hooks that its call would run, by kind; no kind without any."""
    kinds = {
        "forward pre-hook": head._forward_pre_hooks,
        "forward hook": head._forward_hooks,
        "backward pre-hook": head._backward_pre_hooks,
        "backward hook": head._backward_hooks,
    }
    return {kind: list(hooks.values()) for kind, hooks in kinds.items() if hooks}


def _is_of_fsdp(hook: Callable) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp.")


def _name(hook: Callable) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__qualname__


def call_in_head(
    head: nn.Module, hidden: Tensor, inner: Inner, *, keep_head_unsharded: bool = False, recompute: bool = False
) -> Tensor:
    """`inner(rows, what the head does)` as the head's forward: [] fp32, with its own autograd function on top.

    Hooks before forward change the rows, and FSDP's gather the weight before and free it after, once, whatever `inner`
    does with it. As `inner` has the gradients ready before backward (unless `recompute`), the weight is not gathered
    again there, and it asks for an fp32 gradient, so that what is reduced over the ranks was never rounded.
    """
    own_forward, is_linear = head.forward, _is_linear(head)
    call = HeadCall(head, keeps_unsharded=keep_head_unsharded) if isinstance(head, FSDPModule) else None

    def forward(rows: Tensor) -> Tensor:
        projection = _projection(head, is_linear, own_forward, rows.dim())
        # what is computed once, before the loss, has a graph that leads to the weights and waits for backward
        computed = isinstance(projection, LinearHead) and any(
            part is not None and not part.is_leaf for part in projection
        )
        hooked = any(not _is_of_fsdp(hook) for hook in head._forward_pre_hooks.values())
        if call is not None:
            take_fp32_gradients(head.parameters())
        with nullcontext() if isinstance(projection, LinearHead) else parametrize.cached():
            loss = inner(rows, projection)
        if call is not None:
            call.register(loss, gathers_in_backward=recompute or computed or hooked)
        return loss

    with _replaced_forward(head, forward), call.in_forward() if call is not None else nullcontext():
        loss: Tensor = head(hidden)
    if loss.dtype not in (torch.float32, torch.float64):
        raise HeadError(
            f"the loss left the head as {loss.dtype}: its mixed-precision policy must not set output_dtype to less "
            "than float32"
        )
    if call is not None:
        call.finish(hidden)
    return loss


def _projection(
    head: nn.Module, is_linear: bool, own_forward: Callable[[Tensor], Tensor], dims: int
) -> LinearHead | Projection:
    """What the head does, while FSDP has gathered it. A weight that is computed is computed here, and once."""
    if any(isinstance(parameter, DTensor) for parameter in head.parameters()):
        raise HeadError(
            "the head's weight is still sharded while the head runs, so it belongs to an outer FSDP unit: make "
            "the head a unit of its own (fully_shard(head), or separate_lm_head=True with fsdp_ep)"
        )
    if is_linear:
        weight: Any = head.weight
        if not is_traceable_wrapper_subclass(weight):  # such as quantized ones, with products of their own
            return LinearHead(weight, getattr(head, "bias", None))

    buffers = dict(head.named_buffers())
    versions: list[int] = []

    def project(rows: Tensor) -> Tensor:
        given = own_forward(rows[(None,) * (dims - 2)])  # as many dims as its input has elsewhere
        if not isinstance(given, Tensor):
            raise HeadError(f"the head's forward gave a {type(given).__name__}: it must give logits, as one tensor")
        logits = given.flatten(0, -2)
        if len(logits) != len(rows):
            raise HeadError(f"the head made {len(logits)} rows of {len(rows)}: it must make a row of logits of each")
        now = [buffer._version for buffer in buffers.values()]
        for name, before, after in zip(buffers, versions, now, strict=False):
            if before != after:
                raise HeadError(
                    f"the head changes its buffer {name} in every call of its forward, and there is one for each "
                    "chunk: leave that out, or use CLMCrossEntropyLoss"
                )
        versions[:] = now
        return logits

    return project


@contextmanager
def _replaced_forward(head: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """`forward` on this instance alone, not through `head.compile()`; hooks and the class stay as they are."""
    before, compiled_call = vars(head).get("forward"), head._compiled_call_impl
    head.forward, head._compiled_call_impl = forward, None
    try:
        yield
    finally:
        head._compiled_call_impl = compiled_call
        if before is None:
            del head.forward
        else:
            head.forward = before


_UNCHANGED = frozenset(
    f"{name}Backward{number}"
    for name in ("ToCopy", "Alias", "View", "UnsafeView", "Slice", "Clone", "_DDPSink", "CompiledFunction")
    for number in ("", "0")
)
"""Nodes of a graph that leave values as they are, or that cannot be looked into."""


def refuse_what_follows(logits: Any, hidden: Tensor, name: str) -> None:
    """`logits`, of a model whose head was skipped, must be what the head's place gave out, up to casts and slices.

    Raises:
        HeadError: something else was done to them, such as a scale or a cap. Without a graph nothing is seen.
    """
    node = logits.grad_fn if isinstance(logits, Tensor) else None
    while node is not None and node is not hidden.grad_fn:
        if node.name() not in _UNCHANGED:
            raise HeadError(
                f"head = {name!r}: the model changes its logits after the head ({node.name()}), and the loss would "
                "leave that out: give softcap if it is a cap, or use CLMCrossEntropyLoss"
            )
        node = node.next_functions[0][0] if node.next_functions else None


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

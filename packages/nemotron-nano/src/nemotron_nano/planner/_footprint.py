"""What a layer, or the loss, holds in memory: run on the meta device, where tensors have sizes and no contents."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ep_dispatch import PlannedDispatcher
from ep_mesh import MeshConfig
from fsdp_ep import apply_activation_checkpointing
from moe_core.plugins import Batch, Run
from nemotron_nano.model import Layer, NemotronNano, RMSNorm
from nemotron_nano.planner._collectives import rows_received, rows_sent
from nemotron_nano.planner._inputs import Workload, innermost
from nemotron_nano.planner._units import expert_share


@attrs.frozen(kw_only=True)
class Footprint:
    """Bytes beyond the weights and the input of a part of the model."""

    kept: int
    """Between its forward and its backward pass; with the input where that is kept."""
    forward_peak: int
    backward_peak: int
    """Beyond what was kept; the incoming gradient and those of weights included."""
    after_experts: int = 0
    """Beyond what was kept (it may be below 0), when the gradients of a layer's experts are ready to be reduced."""
    gradients: int
    """Of weights, in the dtype that they come in."""


def footprint_of_layer(work: Workload, mesh: MeshConfig, block: int) -> Footprint:
    """Of block number `block` on a rank whose experts get their share of all rows, and not more."""
    dtype = getattr(torch, work.param_dtype)
    layer = Layer(work.model, work.model.pattern[block], "auto", device="meta").to(dtype)
    if mesh.ep > 1 and work.model.pattern[block] == "E":
        _split_experts(layer, work, mesh)
    layer.mixer.forward = _with_flash_attention(layer.mixer.forward)
    if work.is_checkpointed(block):
        apply_activation_checkpointing(
            layer, "selective" if work.checkpointing == "selective" else "full", blocks=[layer]
        )
    hidden = partial(_hidden, work, mesh, dtype)
    experts = next((m for m in layer.modules() if hasattr(m, "dispatcher")), None)
    segments = None
    if work.isolates_documents:
        shape = (work.rows_per_rank(mesh.world_size), work.sequence_length)
        segments = torch.empty(shape, dtype=torch.int64, device="meta")
    return _measure(lambda x: _only_hidden(layer(x, segments)), list(layer.parameters()), hidden, experts)


def footprint_of_loss(work: Workload, mesh: MeshConfig) -> Footprint:
    """Of the final norm, the head and the loss."""
    dtype = getattr(torch, work.param_dtype)
    end = _End(work).to(dtype)
    # uncompiled: what is fused holds no more than this
    loss = innermost(work.config["loss"]).build(Run(work.config).with_part("model", end))
    shape = (work.rows_per_rank(mesh.world_size), work.sequence_length)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")

    def forward(x: Tensor) -> Tensor:
        end.x = x
        total: Tensor = loss(end, Batch(tokens=tokens, labels=tokens, document_ids=None)).sum
        end.x = None
        return total

    is_gathered = work.separate_lm_head and work.loss == "chunked_clm_cross_entropy"
    if is_gathered and hasattr(end.lm_head.weight, "grad_dtype"):
        end.lm_head.weight.grad_dtype = torch.float32  # as the loss asks of a head that FSDP gathers
    return _measure(forward, list(end.parameters()), partial(_hidden, work, mesh, dtype), None)


class _End(nn.Module):
    """What comes after the layers, with a model's interface."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.norm_f = RMSNorm(work.model.hidden_size, work.model.norm_eps, device="meta")
        self.lm_head = nn.Linear(work.model.hidden_size, work.model.vocab_size, bias=False, device="meta")
        self.x: Tensor | None = None

    def forward(self, tokens: Tensor, *, document_ids: Tensor | None = None, return_hidden: bool = False) -> Tensor:
        assert self.x is not None
        hidden = self.norm_f(self.x)
        self.x = None
        return hidden if return_hidden else self.lm_head(hidden).float()


def _only_hidden(out: Any) -> Tensor:
    hidden: Tensor = out[0] if isinstance(out, tuple) else out
    return hidden


def _hidden(work: Workload, mesh: MeshConfig, dtype: torch.dtype) -> Tensor:
    shape = (work.rows_per_rank(mesh.world_size), work.sequence_length, work.model.hidden_size)
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def _measure(
    forward: Callable[[Tensor], Tensor], weights: list[nn.Parameter], hidden: Callable[[], Tensor], experts: Any
) -> Footprint:
    with _Storages(weights) as storages:
        leaf = hidden()
        # neither a leaf, which its gradient's accumulator would keep, nor kept by what made it
        x = leaf * 1
        before = storages.live
        with _watched(experts, storages) as moments:
            # another tensor stands for the output, so that the output itself stays only if something needs it
            out = forward(x) * 1
            forward_peak = storages.take_peak() - before - _size(out)
            del x
            kept = storages.live - (before - _size(leaf)) - _size(out)
            gradient = torch.empty_like(out)
            start = storages.live
            storages.take_peak()
            torch.autograd.backward([out], [gradient])
            peak = storages.take_peak() - start
    gradients = sum(_size(weight.grad) for weight in weights if weight.grad is not None)
    after = moments[0] - start if moments else 0
    return Footprint(kept=kept, forward_peak=forward_peak, backward_peak=peak, after_experts=after, gradients=gradients)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Storages(TorchDispatchMode):
    """Bytes of all storages that were made inside and are alive, after each operator."""

    def __init__(self, others: list[nn.Parameter]) -> None:
        super().__init__()
        self.live = self._peak = 0
        self._known: set[int] = set()
        self._others = {_key(parameter) for parameter in others}

    def take_peak(self) -> int:
        """The most since the last call."""
        peak, self._peak = self._peak, self.live
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._note(tensor)
        return out

    def _note(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._known or key in self._others:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._known.add(key)
        self.live += size
        self._peak = max(self._peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _watched(experts: nn.Module | None, storages: _Storages) -> Iterator[list[int]]:
    """The bytes alive when the backward pass leaves the experts' dispatch: FSDP reduces their gradients then."""
    moments: list[int] = []
    if experts is None:
        yield moments
        return

    def watch(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_Moment.apply(args[0], lambda: moments.append(storages.live)), *args[1:])

    handle = experts.register_forward_pre_hook(watch)
    try:
        yield moments
    finally:
        handle.remove()


class _Moment(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return grad, None


class _Flash(TorchFunctionMode):
    """Attention without its [S, S] scores, which CPUs and accelerators compute so, and the meta device does not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _FlashAttention.apply(*args[:3], kwargs["attn_mask"])
        return func(*args, **(kwargs or {}))


def _with_flash_attention(forward: Callable[..., Any]) -> Callable[..., Any]:
    # inside the module, since a mode around the backward pass does not reach what it recomputes
    def flash(*args: Any, **kwargs: Any) -> Any:
        with _Flash():
            return forward(*args, **kwargs)

    return flash


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, mask, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _split_experts(layer: Layer, work: Workload, mesh: MeshConfig) -> None:
    experts = layer.mixer.experts
    share = expert_share(work.model.num_experts, mesh.ep)
    for name, parameter in list(experts.named_parameters()):
        experts.register_parameter(name, nn.Parameter(parameter.new_empty(share, *parameter.shape[1:])))
    sent, received = (_even(rows(work, mesh), mesh.ep) for rows in (rows_sent, rows_received))
    experts.dispatcher = PlannedDispatcher(sent, received, share)


def _even(total: int, parts: int) -> list[int]:
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]


def model_on_meta(work: Workload) -> NemotronNano:
    """All parameters, without memory."""
    return NemotronNano(work.model, device="meta")

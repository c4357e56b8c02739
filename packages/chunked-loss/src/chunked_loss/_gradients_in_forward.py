"""The loss with its gradients formed chunk by chunk in forward; per token, formed again in backward."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunked_loss._chunk import ChunkLosses, Problem, Products, joined, products_for, slices, tiles, without_autocast
from chunked_loss._head import HeadError

_keeps_graph: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
"""Whether the backward pass that runs keeps its graph for another one; private in torch, so it may be absent."""


class Gradients(NamedTuple):
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class _Wanted(NamedTuple):
    """Which inputs get a gradient, and in which dtype it is handed on; None: none."""

    hidden: torch.dtype | None
    weight: torch.dtype | None
    bias: torch.dtype | None


_NOTHING = _Wanted(None, None, None)


def _chunk_pass(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem, wanted: _Wanted
) -> tuple[ChunkLosses, Gradients]:
    """One pass over the chunks, under no_grad; gradients come in the accumulation dtype.

    One buffer holds the logits of every chunk in turn, and then their gradient. An ignored row enters as
    zeros: what it holds, NaN included, reaches neither the loss nor a gradient.
    """
    dtype, vocabulary = problem.row_weight.dtype, slice(0, problem.vocab_size)
    products = products_for(hidden, weight, dtype)
    gradients = _zeros(hidden, weight, bias, wanted, dtype)
    buffer = hidden.new_empty(min(len(hidden), problem.chunk_tokens), problem.vocab_size, dtype=dtype)
    parts: list[ChunkLosses] = []
    for chunk in slices(len(hidden), problem.chunk_tokens):
        rows = torch.where(problem.valid[chunk, None], hidden[chunk], 0)
        logits = buffer[: rows.shape[0]]
        products.logits_(logits, rows, weight[vocabulary])
        if bias is not None:
            logits.add_(bias[vocabulary])
        row_weight = None if wanted == _NOTHING else problem.row_weight[chunk]
        losses, d_logits = problem.kernel(logits, problem.labels[chunk], problem.terms, row_weight)
        parts.append(losses)
        _add_gradients(gradients, chunk, d_logits, rows, weight[vocabulary], products)
    return joined(parts, problem.row_weight), gradients


def _zeros(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: _Wanted, dtype: torch.dtype) -> Gradients:
    """[T, D], [V, D] and [V]; the rows of a padded vocabulary stay zero."""
    return Gradients(
        None if wanted.hidden is None else torch.empty_like(hidden, dtype=dtype),
        None if wanted.weight is None else torch.zeros_like(weight, dtype=dtype),
        None if wanted.bias is None or bias is None else torch.zeros_like(bias, dtype=dtype),
    )


def _add_gradients(
    gradients: Gradients, chunk: slice, d_logits: Tensor, rows: Tensor, weight: Tensor, products: Products
) -> None:
    vocabulary = slice(0, len(weight))
    if gradients.hidden is not None:
        products.d_rows_(gradients.hidden[chunk], d_logits, weight)
    if gradients.weight is not None:
        products.add_d_weight_(gradients.weight[vocabulary], d_logits, rows)
    if gradients.bias is not None:
        gradients.bias[vocabulary].add_(d_logits.sum(dim=0))


def _refuse_second_order() -> None:
    if torch.is_grad_enabled():  # autograd runs a backward with gradients on only under create_graph=True
        raise RuntimeError(
            "linear_cross_entropy forms its gradient once: create_graph=True is not supported; "
            "pass recompute=True where a second derivative is needed"
        )


def _grad_dtype(tensor: Tensor | None) -> torch.dtype | None:
    """The dtype in which autograd takes this input's gradient; newer torch lets a leaf ask for a wider one."""
    if tensor is None:
        return None
    if tensor.is_leaf and hasattr(tensor, "grad_dtype"):
        return tensor.grad_dtype or torch.promote_types(tensor.dtype, torch.float32)  # None: it takes any
    return tensor.dtype


def _wanted(inputs: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> _Wanted:
    return _Wanted(*(_grad_dtype(tensor) if need else None for tensor, need in zip(inputs, needs, strict=True)))


def _weighted(losses: ChunkLosses, problem: Problem) -> Tensor:
    per_token = losses.cross_entropy + losses.z_loss
    return torch.where(problem.valid, problem.row_weight * per_token, 0)


class SumOfLosses(torch.autograd.Function):
    """sum_t row_weight_t loss_t, with the gradients formed while the chunk's logits are there."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem, grad_enabled: bool
    ) -> tuple[Tensor, ...]:
        wanted = _wanted((hidden, weight, bias), ctx.needs_input_grad[:3]) if grad_enabled else _NOTHING
        with without_autocast(hidden.device.type):
            losses, gradients = _chunk_pass(hidden, weight, bias, problem, wanted)
        ctx.save_for_backward(*gradients)
        ctx.wanted = wanted
        ctx.mark_non_differentiable(*losses)
        ctx.set_materialize_grads(False)
        return _weighted(losses, problem).sum(), *losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return (*_scaled_gradients(ctx, grad), None, None)


def _scaled_gradients(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """The gradients that forward saved, times that of the sum of losses."""
    _refuse_second_order()
    # what is saved must outlive a backward whose graph is kept
    is_last = _keeps_graph is not None and not torch.compiler.is_compiling() and not _keeps_graph()
    return [
        None if saved is None else _scaled(saved, grad, dtype, in_place=is_last)
        for saved, dtype in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    ]


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype, *, in_place: bool) -> Tensor:
    """gradient * factor in `dtype`, rounded once, holding no second [V, D] in the accumulation dtype."""
    if gradient.dtype == dtype:
        return gradient.mul_(factor) if in_place else gradient * factor
    result = torch.empty_like(gradient, dtype=dtype)
    source, target = torch.atleast_1d(gradient, result)
    for tile in tiles(source):
        target[tile] = source[tile] * factor
    return result


class LossPerToken(torch.autograd.Function):
    """row_weight_t loss_t for each token; its upstream gradient is unknown in forward, so backward recomputes."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem, grad_enabled: bool
    ) -> tuple[Tensor, ...]:
        with without_autocast(hidden.device.type):
            losses, _ = _chunk_pass(hidden, weight, bias, problem, _NOTHING)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.problem = problem
        ctx.wanted = _wanted((hidden, weight, bias), ctx.needs_input_grad[:3])
        ctx.mark_non_differentiable(*losses)
        ctx.set_materialize_grads(False)
        return _weighted(losses, problem), *losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        problem = ctx.problem
        scaled = torch.where(problem.valid, problem.row_weight * grad, 0)
        with without_autocast(grad.device.type):
            hidden, weight, bias = ctx.saved_tensors
            _, gradients = _chunk_pass(hidden, weight, bias, problem._replace(row_weight=scaled), ctx.wanted)
        cast = [
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(gradients, ctx.wanted, strict=True)
        ]
        return (*cast, None, None)


def sum_of_projected_losses(
    hidden: Tensor, project: Callable[[Tensor], Tensor], problem: Problem, classes_of: Callable[[int], int]
) -> tuple[Tensor, ChunkLosses]:
    """`SumOfLosses` of `project(rows [C, D]) -> logits [C, V]`: any module that computes each row for itself.

    Autograd differentiates it on every chunk at once, towards each leaf that it has read, whosever that is; so it runs
    once a chunk, and its gradients add up in the accumulation dtype. There is a chunk also of no rows. In place of an
    ignored row stands one that counts: a module need not be finite at any other, such as at zeros.
    `classes_of(V)`, once V is known, takes the place of `problem.vocab_size`.

    Raises:
        HeadError: a hook on the gradient of what it reads, which would run once a chunk.
    """
    dtype = problem.row_weight.dtype
    wants_hidden = hidden.requires_grad and torch.is_grad_enabled()
    d_hidden = torch.zeros_like(hidden, dtype=dtype) if wants_hidden else None
    totals: dict[Tensor, Tensor] = {}
    parts: list[ChunkLosses] = []
    stand_in, any_counts = _row_that_counts(hidden.detach(), problem.valid)
    for chunk in slices(max(1, len(hidden)), problem.chunk_tokens):
        valid = problem.valid[chunk, None]
        rows = torch.where(valid, hidden.detach()[chunk], stand_in).requires_grad_(wants_hidden)
        logits = project(rows.clone())  # may be written to
        if not parts:
            problem = problem._replace(vocab_size=classes_of(logits.shape[-1]))
        logits = logits[:, : problem.vocab_size]
        row_weight = problem.row_weight[chunk] if logits.requires_grad else None
        with torch.no_grad(), without_autocast(hidden.device.type):
            losses, d_logits = problem.kernel(
                logits.to(dtype, copy=True), problem.labels[chunk], problem.terms, row_weight
            )
        parts.append(losses)
        if row_weight is None:
            continue
        leaves = _leaves(logits)
        _refuse_hooks(leaf for leaf in leaves if leaf is not rows)
        # what was computed before the call, and once, is in the graph of every chunk
        found = torch.autograd.grad(
            logits, leaves, d_logits.to(logits.dtype), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for leaf, gradient in zip(leaves, found, strict=True):
            if leaf is rows and d_hidden is not None:
                d_hidden[chunk] = torch.where(valid, gradient, 0)
                continue
            gradient = torch.where(any_counts, gradient, 0).to(dtype)
            totals[leaf] = totals[leaf].add_(gradient) if leaf in totals else gradient
    losses = joined(parts, problem.row_weight)
    value = _weighted(losses, problem).sum()
    inputs, gradients = list(totals), list(totals.values())
    if d_hidden is not None:
        inputs, gradients = [*inputs, hidden], [*gradients, d_hidden]
    return (_WithGradients.apply(value, gradients, *inputs) if inputs else value), losses


def _row_that_counts(hidden: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The first valid row [1, D], and whether there is one, []; without a host sync."""
    if not len(hidden):
        return hidden.new_zeros(1, hidden.shape[-1]), valid.any()
    return hidden.index_select(0, valid.to(torch.uint8).argmax()[None]), valid.any()


def _refuse_hooks(leaves: Iterable[Tensor]) -> None:
    for leaf in leaves:
        if leaf._backward_hooks:
            hook = next(iter(leaf._backward_hooks.values()))
            raise HeadError(
                f"the head reads a tensor of shape {tuple(leaf.shape)} that has a hook on its gradient, "
                f"{getattr(hook, '__qualname__', hook)}, which would run for every chunk: remove it, or use "
                "CLMCrossEntropyLoss"
            )


def _leaves(result: Tensor) -> list[Tensor]:
    """Every leaf of the graph of `result`."""
    found: list[Tensor] = []
    seen: set[Any] = set()
    ahead: list[Any] = [result.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            found.append(node.variable)
        ahead += [earlier for earlier, _ in node.next_functions]
    return found


class _WithGradients(torch.autograd.Function):
    """`value`, whose gradients towards `inputs` are there already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.wanted = [_grad_dtype(tensor) for tensor in inputs]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *_scaled_gradients(ctx, grad))

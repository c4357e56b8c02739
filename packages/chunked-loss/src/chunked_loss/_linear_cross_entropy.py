"""`linear_cross_entropy`: the head's product and the cross entropy, chunk by chunk, with exact gradients."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from chunked_loss._chunk import ChunkLosses, Terms, cross_entropy_chunk
from chunked_loss._products import accumulate_dtype, add_d_weight_, d_rows, logits_

Reduction = Literal["mean", "sum", "none"]
ChunkKernel = Callable[[Tensor, Tensor, Terms, Tensor | None], tuple[ChunkLosses, Tensor]]


class LossStats(NamedTuple):
    """What a trainer logs, from the same pass: detached, on the device, no synchronisation."""

    cross_entropy: Tensor
    """[] fp32, sum over valid tokens, without the z-loss; smoothing and weights included."""
    z_loss: Tensor
    """[] fp32, sum over valid tokens of z_loss * logsumexp^2."""
    tokens: Tensor
    """[] int64, how many tokens are valid."""
    correct: Tensor
    """[] int64, how many of them have their label's logit at the maximum."""


class _Problem(NamedTuple):
    """The inputs that take no gradient."""

    labels: Tensor
    """[T] int64, 0 where ignored."""
    valid: Tensor
    """[T] bool."""
    row_weight: Tensor
    """[T] in the accumulation dtype: d(result)/d(loss of token t), 0 where ignored."""
    terms: Terms
    chunk_tokens: int
    kernel: ChunkKernel


class _Gradients(NamedTuple):
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def _chunk_pass(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: _Problem, wanted: tuple[bool, bool, bool]
) -> tuple[ChunkLosses, _Gradients]:
    """One pass over the chunks, under no_grad; `wanted` says which of hidden, weight, bias get a gradient.

    One buffer holds the logits of every chunk in turn, and then their gradient. An ignored row enters as
    zeros: what it holds, NaN included, reaches neither the loss nor a gradient.
    """
    T, V = hidden.shape[0], weight.shape[0]
    dtype = problem.row_weight.dtype
    d_hidden = torch.empty_like(hidden) if wanted[0] else None
    d_weight = torch.zeros_like(weight, dtype=dtype) if wanted[1] else None
    d_bias = torch.zeros_like(bias, dtype=dtype) if wanted[2] and bias is not None else None
    buffer = hidden.new_empty(min(T, problem.chunk_tokens), V, dtype=dtype)
    parts: list[ChunkLosses] = []
    for chunk in _chunks(T, problem.chunk_tokens):
        rows = torch.where(problem.valid[chunk, None], hidden[chunk], 0)
        logits = buffer[: rows.shape[0]]
        logits_(logits, rows, weight)
        if bias is not None:
            logits.add_(bias)
        losses, d_logits = problem.kernel(
            logits, problem.labels[chunk], problem.terms, problem.row_weight[chunk] if any(wanted) else None
        )
        parts.append(losses)
        if d_hidden is not None:
            d_hidden[chunk] = d_rows(d_logits, weight)
        if d_weight is not None:
            add_d_weight_(d_weight, d_logits, rows)
        if d_bias is not None:
            d_bias.add_(d_logits.sum(dim=0))
    return _joined(parts, problem.row_weight), _Gradients(d_hidden, d_weight, d_bias)


def _joined(parts: list[ChunkLosses], like: Tensor) -> ChunkLosses:
    if not parts:
        return ChunkLosses(torch.zeros_like(like), torch.zeros_like(like), torch.zeros_like(like, dtype=torch.bool))
    return ChunkLosses(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _refuse_second_order() -> None:
    if torch.is_grad_enabled():  # autograd runs a backward with gradients on only under create_graph=True
        raise RuntimeError(
            "linear_cross_entropy forms its gradient once: create_graph=True is not supported; "
            "use torch.nn.functional.cross_entropy on full logits where a second derivative is needed"
        )


def _grad_dtype(tensor: Tensor | None) -> torch.dtype | None:
    """The dtype in which autograd takes this input's gradient; newer torch lets a leaf ask for a wider one."""
    if tensor is None:
        return None
    if tensor.is_leaf and hasattr(tensor, "grad_dtype"):
        return tensor.grad_dtype or accumulate_dtype(tensor.dtype)
    return tensor.dtype


class _Sum(torch.autograd.Function):
    """sum_t row_weight_t loss_t, with the gradients formed in forward, while the chunk's logits are there."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: _Problem, grad_enabled: bool
    ) -> tuple[Tensor, ...]:
        needs = ctx.needs_input_grad
        wanted = (grad_enabled and needs[0], grad_enabled and needs[1], grad_enabled and needs[2])
        with torch.autocast(hidden.device.type, enabled=False):
            losses, gradients = _chunk_pass(hidden, weight, bias, problem, wanted)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [_grad_dtype(tensor) for tensor in (hidden, weight, bias)]
        ctx.mark_non_differentiable(*losses)
        ctx.set_materialize_grads(False)
        return _weighted(losses, problem).sum(), *losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        # out of place: the saved gradients serve every backward of a retained graph
        gradients = [
            None if saved is None else (saved.to(grad.dtype) * grad).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*gradients, None, None)


class _PerToken(torch.autograd.Function):
    """row_weight_t loss_t for each token; its upstream gradient is unknown in forward, so backward recomputes."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: _Problem, grad_enabled: bool
    ) -> tuple[Tensor, ...]:
        with torch.autocast(hidden.device.type, enabled=False):
            losses, _ = _chunk_pass(hidden, weight, bias, problem, (False, False, False))
        ctx.save_for_backward(hidden, weight, bias)
        ctx.problem = problem
        ctx.dtypes = [_grad_dtype(tensor) for tensor in (hidden, weight, bias)]
        ctx.mark_non_differentiable(*losses)
        ctx.set_materialize_grads(False)
        return _weighted(losses, problem), *losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        problem = ctx.problem
        scaled = torch.where(problem.valid, problem.row_weight * grad, 0)
        with torch.autocast(grad.device.type, enabled=False):
            hidden, weight, bias = ctx.saved_tensors
            wanted = tuple(ctx.needs_input_grad[:3])
            _, gradients = _chunk_pass(hidden, weight, bias, problem._replace(row_weight=scaled), wanted)
        cast = [
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (*cast, None, None)


def _weighted(losses: ChunkLosses, problem: _Problem) -> Tensor:
    per_token = losses.cross_entropy + losses.z_loss
    return torch.where(problem.valid, problem.row_weight * per_token, 0)


class HeadLoss(NamedTuple):
    """The result in the accumulation dtype, straight from autograd's function, and the statistics."""

    value: Tensor
    stats: LossStats


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_tokens: int = 512,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    denominator: Tensor | float | None = None,
    kernel: ChunkKernel = cross_entropy_chunk,
) -> HeadLoss:
    """`linear_cross_entropy` with the chunk's arithmetic (`kernel`) to be replaced by a compiled one."""
    _check_options(reduction, chunk_tokens, label_smoothing, softcap, denominator)
    _check_tensors(hidden, weight, labels, bias, class_weight, token_weight)
    dtype = accumulate_dtype(hidden.dtype, weight.dtype)
    flat_labels = labels.reshape(-1)
    valid = flat_labels != ignore_index
    safe_labels = torch.where(valid, flat_labels, 0)
    terms = Terms(label_smoothing, z_loss, softcap, None if class_weight is None else class_weight.to(dtype))
    own = valid.to(dtype) if token_weight is None else torch.where(valid, token_weight.reshape(-1).to(dtype), 0)
    row_weight = own
    if reduction == "mean":
        row_weight = own / _denominator(own, safe_labels, terms, denominator)
    problem = _Problem(safe_labels, valid, row_weight, terms, chunk_tokens, kernel)
    function = _PerToken if reduction == "none" else _Sum
    value, *rest = function.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, problem, torch.is_grad_enabled())
    if reduction == "none":
        value = value.reshape(labels.shape)
    return HeadLoss(value, _stats(ChunkLosses(*rest), valid, own))


def _denominator(own: Tensor, labels: Tensor, terms: Terms, given: Tensor | float | None) -> Tensor | float:
    if given is not None:
        return given.to(own.dtype) if isinstance(given, Tensor) else given
    total = (own if terms.class_weight is None else own * terms.class_weight[labels]).sum()
    return torch.where(total == 0, 1, total)  # nothing counts: 0.0, not NaN


def _stats(losses: ChunkLosses, valid: Tensor, own: Tensor) -> LossStats:
    return LossStats(
        cross_entropy=torch.where(valid, own * losses.cross_entropy, 0).sum().detach(),
        z_loss=torch.where(valid, own * losses.z_loss, 0).sum().detach(),
        tokens=valid.sum(),
        correct=(valid & losses.is_correct).sum(),
    )


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_tokens: int = 512,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    denominator: Tensor | float | None = None,
    return_stats: Literal[False] = False,
) -> Tensor: ...


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_tokens: int = 512,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    denominator: Tensor | float | None = None,
    return_stats: Literal[True],
) -> tuple[Tensor, LossStats]: ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_tokens: int = 512,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    denominator: Tensor | float | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, LossStats]:
    """Cross entropy of `softcap * tanh((hidden @ weight^T + bias) / softcap)`, never holding [T, V] logits.

    Gradients are formed chunk by chunk while the chunk's logits are there (6 T D V FLOPs; recomputing them
    in backward would take 8), so a call holds one chunk of logits and the gradients. Logits, losses and sums
    are fp32 (fp64 for fp64 inputs) whatever the inputs' dtype; each gradient is rounded once, at the end.
    The result does not depend on `chunk_tokens`.

    Token t costs cross entropy (with `label_smoothing` and `class_weight` as in
    `torch.nn.functional.cross_entropy`) plus `z_loss * logsumexp(logits_t)^2` (PaLM's), all of it times
    `token_weight_t`. Ignored tokens cost exactly 0, and their hidden states, NaN included, reach nothing.

    Args:
        hidden: [..., D], any floating dtype.
        weight: [V, D]; a plain tensor. For a sharded head, call its module: `ChunkedCLMCrossEntropyLoss`.
        labels: [...] int64, the classes; `ignore_index` counts nowhere.
        bias: [V].
        reduction: "sum"; "mean": sum / sum_t token_weight_t class_weight_{y_t}, 0.0 if nothing counts;
            "none": one value per token, whose gradient is computed again in backward.
        chunk_tokens: how many tokens' logits are held at once.
        softcap: None or > 0.
        class_weight: [V], no gradient.
        token_weight: [...], no gradient.
        denominator: what "mean" divides by instead, e.g. `global_denominator`'s; never 0.
        return_stats: also return `LossStats`.

    Returns:
        [] (or [...] for "none") fp32, or fp64 for fp64 inputs; with `return_stats` a pair.

    Raises:
        ValueError: shapes that do not fit, or an option out of its range.
        RuntimeError: backward with create_graph=True.
    """
    value, stats = head_loss(
        hidden,
        weight,
        labels,
        bias=bias,
        ignore_index=ignore_index,
        reduction=reduction,
        chunk_tokens=chunk_tokens,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        class_weight=class_weight,
        token_weight=token_weight,
        denominator=denominator,
    )
    return (value, stats) if return_stats else value


def _check_options(
    reduction: str, chunk_tokens: int, label_smoothing: float, softcap: float | None, denominator: Any
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction = {reduction!r}: must be "mean", "sum" or "none"')
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens = {chunk_tokens}: must be at least 1")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing = {label_smoothing}: must be between 0 and 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap = {softcap}: must be above 0, or None for none")
    if denominator is not None and reduction != "mean":
        raise ValueError(f'denominator with reduction = {reduction!r}: only "mean" divides')


def _check_tensors(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{name} is a DTensor: call the head's module, so that its hooks gather the weight once "
                "(ChunkedCLMCrossEntropyLoss does), or pass .full_tensor()"
            )
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}: must be [..., D] and [V, D]")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels {tuple(labels.shape)}: must have hidden's shape without its last dim, {tuple(hidden.shape[:-1])}"
        )
    for name, vector in (("bias", bias), ("class_weight", class_weight)):
        if vector is not None and vector.shape != weight.shape[:1]:
            raise ValueError(f"{name} {tuple(vector.shape)}: must be [V] = [{weight.shape[0]}]")
    if token_weight is not None and token_weight.shape != labels.shape:
        raise ValueError(
            f"token_weight {tuple(token_weight.shape)}: must have the shape of labels {tuple(labels.shape)}"
        )
    for name, constant in (("class_weight", class_weight), ("token_weight", token_weight)):
        if constant is not None and constant.requires_grad:
            raise ValueError(f"{name} requires a gradient, which is not formed: detach it")

"""`linear_cross_entropy`: the head's product and the cross entropy, chunk by chunk, with exact gradients."""

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from chunked_loss._head_loss import LossStats, Reduction, head_loss


class _Options(TypedDict, total=False):
    bias: Tensor | None
    ignore_index: int
    reduction: Reduction
    chunk_tokens: int
    num_chunks: int | None
    label_smoothing: float
    z_loss: float
    softcap: float | None
    class_weight: Tensor | None
    token_weight: Tensor | None
    denominator: Tensor | float | None
    vocab_size: int | None
    valid_tokens: int | None
    accumulate_dtype: torch.dtype
    recompute: bool


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, return_stats: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, LossStats]: ...


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, return_stats: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_tokens: int = 512,
    num_chunks: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    denominator: Tensor | float | None = None,
    vocab_size: int | None = None,
    valid_tokens: int | None = None,
    accumulate_dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, LossStats]:
    """Cross entropy of `softcap * tanh((hidden @ weight^T + bias) / softcap)`, never holding [T, V] logits.

    Gradients are formed chunk by chunk while the chunk's logits are there (6 T D V FLOPs; recomputing them
    in backward would take 8), so a call holds one chunk of logits and the gradients: in fp32
    chunk * V * 4 + V * D * 4 + T * D * 4 bytes. Logits, losses and sums are fp32 (fp64 for fp64 inputs) whatever
    the inputs' dtype. The result does not depend on `chunk_tokens`.

    Gradients are rounded once, at the end. Two kinds of device round the gradient of the logits of bf16 inputs as
    well (relative error up to 2^-9 each, independent of the number of chunks): GPUs, and for hidden's gradient
    CPUs with bf16 instructions.

    Token t costs cross entropy (with `label_smoothing` and `class_weight` as in
    `torch.nn.functional.cross_entropy`) plus `z_loss * logsumexp(logits_t)^2` (PaLM's), all of it times
    `token_weight_t`. Ignored tokens cost exactly 0, and their hidden states, NaN included, reach nothing. Where
    knowing them costs no synchronisation (labels on the CPU, or `valid_tokens`) they are not computed at all.

    Args:
        hidden: [..., D], any floating dtype.
        weight: [V, D]; a plain tensor. For a sharded head, call its module: `ChunkedCLMCrossEntropyLoss`.
        labels: [...] int64, the classes, on hidden's device or the CPU; `ignore_index` counts nowhere.
        bias: [V].
        reduction: "sum"; "mean": sum / sum_t token_weight_t class_weight_{y_t}, 0.0 if nothing counts;
            "none": one value per token, whose gradient is computed again in backward.
        chunk_tokens: how many tokens' logits are held at once.
        num_chunks: the number of chunks, instead of `chunk_tokens`; T need not be a multiple of it.
        softcap: None or > 0.
        class_weight: [V], no gradient.
        token_weight: [...], no gradient.
        denominator: what "mean" divides by instead, e.g. `global_denominator`'s; never 0.
        vocab_size: the rows of weight, bias and class_weight past it are padding of the vocabulary: they are in no
            softmax and no smoothing, and their gradient is exactly 0.
        valid_tokens: how many labels are not ignored, if the host knows (more is allowed); saves the products of the
            others where the labels are not on the CPU.
        accumulate_dtype: torch.float32, or torch.float64 for a reference.
        recompute: form no gradients in forward, but compute each chunk again in backward, by plain autograd:
            slower, and differentiable twice. A second derivative holds the logits of all chunks.
        return_stats: also return `LossStats`.

    Returns:
        [] (or [...] for "none") fp32, or fp64 for fp64 inputs; with `return_stats` a pair.

    Raises:
        ValueError: shapes that do not fit, or an option out of its range.
        RuntimeError: backward with create_graph=True, without `recompute`.
    """
    value, stats = head_loss(
        hidden,
        weight,
        labels,
        bias=bias,
        ignore_index=ignore_index,
        reduction=reduction,
        chunk_tokens=chunk_tokens,
        num_chunks=num_chunks,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        class_weight=class_weight,
        token_weight=token_weight,
        denominator=denominator,
        vocab_size=vocab_size,
        valid_tokens=valid_tokens,
        accumulate_dtype=accumulate_dtype,
        recompute=recompute,
    )
    return (value, stats) if return_stats else value

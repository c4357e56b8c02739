"""The loss by plain autograd, chunk by chunk under activation checkpointing: what a second derivative needs."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from chunked_loss._chunk import ChunkLosses, Problem, Terms, joined, slices, without_autocast


def recomputed_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: Problem
) -> tuple[Tensor, ChunkLosses]:
    """row_weight_t loss_t for each token, [T], with a graph that can be differentiated any number of times.

    Each chunk's logits are computed again in backward (8 T D V FLOPs in all). The weight is widened once, so that
    its gradient adds up over the chunks in the accumulation dtype.
    """
    dtype, vocabulary = problem.row_weight.dtype, slice(0, problem.vocab_size)
    wide_weight = weight[vocabulary].to(dtype)
    wide_bias = None if bias is None else bias[vocabulary].to(dtype)
    values, parts = [hidden.new_zeros(0, dtype=dtype)], []
    with without_autocast(hidden.device.type):
        for chunk in slices(len(hidden), problem.chunk_tokens):
            rows = torch.where(problem.valid[chunk, None], hidden[chunk], 0).to(dtype)
            losses = ChunkLosses(
                *checkpoint(
                    _losses_of_chunk,
                    rows,
                    wide_weight,
                    wide_bias,
                    problem.labels[chunk],
                    problem.terms,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
            per_token = losses.cross_entropy + losses.z_loss
            values.append(torch.where(problem.valid[chunk], problem.row_weight[chunk] * per_token, 0))
            parts.append(ChunkLosses(*(column.detach() for column in losses)))
    # a graph to both, of however few rows
    values[0] = values[0] + 0 * (hidden[:0].sum(-1) + wide_weight[:0].sum())
    return torch.cat(values), joined(parts, problem.row_weight)


def _losses_of_chunk(
    rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """`ChunkLosses` of [C, D] rows, all of one dtype, by operations that autograd can differentiate twice."""
    logits = rows @ weight.T
    if bias is not None:
        logits = logits + bias
    if terms.softcap is not None:
        logits = terms.softcap * torch.tanh(logits / terms.softcap)
    lse = logits.logsumexp(dim=-1)
    at_label = logits.gather(1, labels[:, None])[:, 0]
    own = 1.0 if terms.class_weight is None else terms.class_weight[labels]
    cross_entropy = (1.0 - terms.label_smoothing) * own * (lse - at_label)
    if terms.label_smoothing:
        share = terms.label_smoothing / logits.shape[1]
        everyone = torch.ones_like(logits[0]) if terms.class_weight is None else terms.class_weight
        cross_entropy = cross_entropy + share * (everyone.sum() * lse - logits @ everyone)
    return cross_entropy, terms.z_loss * lse.square(), at_label == logits.amax(dim=-1)

"""The numeric core on one chunk of logits: per-token losses, and the gradient in place of the logits."""

from typing import NamedTuple

import torch
from torch import Tensor


class Terms(NamedTuple):
    """What the loss of one token is made of, besides its cross entropy."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    class_weight: Tensor | None = None
    """[V] in the dtype of the logits."""


class ChunkLosses(NamedTuple):
    """Per token of the chunk, [C] each; unweighted by `row_weight`."""

    cross_entropy: Tensor
    z_loss: Tensor
    is_correct: Tensor


def cross_entropy_chunk(
    logits: Tensor, labels: Tensor, terms: Terms, row_weight: Tensor | None
) -> tuple[ChunkLosses, Tensor]:
    """Losses of one chunk, and its gradient with respect to the logits.

    With l = softcap(logits), lse_t = logsumexp_v l_tv, y the label, w the class weights (1 without) and s the
    smoothing, token t costs

        (1 - s) w_y (lse_t - l_ty) + s/V sum_v w_v (lse_t - l_tv) + z_loss lse_t^2

    Args:
        logits: [C, V] fp32 (fp64 allowed), **overwritten** - by the gradient if `row_weight` is given.
        labels: [C] int64, each in range(V); rows that count nowhere have any label and weight 0.
        row_weight: [C], d(loss)/d(loss of token t); None: no gradient is formed.

    Returns:
        the losses, and `logits`.
    """
    cap_slope = None
    if terms.softcap is not None:
        logits.div_(terms.softcap).tanh_()
        if row_weight is not None:
            cap_slope = logits.square().neg_().add_(1.0)
        logits.mul_(terms.softcap)
    peak = logits.amax(dim=-1)
    logits.sub_(peak[:, None])
    index = labels[:, None]
    at_label = logits.gather(1, index)[:, 0]
    smoothing_sum = _weighted_sum(logits, terms) if terms.label_smoothing else None
    logits.exp_()
    total = logits.sum(dim=-1)
    log_total = total.log()
    lse = log_total + peak
    label_weight = (1.0 - terms.label_smoothing) * _weight_at(labels, terms, log_total)
    cross_entropy = label_weight * (log_total - at_label)
    if smoothing_sum is not None:
        share = terms.label_smoothing / logits.shape[1]
        cross_entropy = cross_entropy + share * (_weight_total(logits, terms) * log_total - smoothing_sum)
    losses = ChunkLosses(cross_entropy, terms.z_loss * lse.square(), at_label == 0)
    if row_weight is not None:
        _gradient_(logits, index, terms, row_weight, total, lse, label_weight)
        if cap_slope is not None:
            logits.mul_(cap_slope)
    return losses, logits


def _gradient_(
    exps: Tensor, index: Tensor, terms: Terms, row_weight: Tensor, total: Tensor, lse: Tensor, label_weight: Tensor
) -> None:
    """Turn exp(l - max) into d(sum_t row_weight_t loss_t)/dl, in place.

    The probabilities share one factor per row, so one product and one scattered subtraction are enough.
    """
    share = terms.label_smoothing / exps.shape[1]
    factor = label_weight + 2.0 * terms.z_loss * lse
    if share:
        factor = factor + share * _weight_total(exps, terms)
    exps.mul_((row_weight * factor / total)[:, None])
    exps.scatter_add_(1, index, -(row_weight * label_weight)[:, None])
    if not share:
        return
    if terms.class_weight is None:
        exps.sub_((share * row_weight)[:, None])
    else:
        exps.addr_(row_weight, terms.class_weight, alpha=-share)


def _weight_at(labels: Tensor, terms: Terms, like: Tensor) -> Tensor:
    return torch.ones_like(like) if terms.class_weight is None else terms.class_weight[labels]


def _weight_total(logits: Tensor, terms: Terms) -> Tensor | float:
    return float(logits.shape[1]) if terms.class_weight is None else terms.class_weight.sum()


def _weighted_sum(logits: Tensor, terms: Terms) -> Tensor:
    return logits.sum(dim=-1) if terms.class_weight is None else logits @ terms.class_weight

"""Causal-LM cross entropy on logits that exist, as free functions on tensors."""

import torch
import torch.nn.functional as F
from torch import Tensor


def sums(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor | None]:
    """The sum over valid tokens of the cross entropy, and that of `z_loss` * logsumexp^2; None without it."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    rows, flat_labels = wide.reshape(-1, wide.shape[-1]), labels.reshape(-1)
    cross_entropy = F.cross_entropy(
        rows, flat_labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
    )
    if not z_loss:
        return cross_entropy, None
    squares = rows.logsumexp(dim=-1).square()
    return cross_entropy, z_loss * torch.where(flat_labels == ignore_index, 0, squares).sum()


def clm_cross_entropy_loss_sum(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Sum of the cross entropy over valid tokens, plus `z_loss` * logsumexp^2 (PaLM's).

    Args:
        logits: [..., V]; computed with in fp32 (fp64 stays).
        labels: [...] int64, aligned with the logits: no shift is applied.

    Returns:
        [] fp32; 0.0 with a graph where all labels are ignored.
    """
    cross_entropy, of_z = sums(logits, labels, ignore_index, label_smoothing, z_loss)
    return cross_entropy if of_z is None else cross_entropy + of_z


def clm_cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """`clm_cross_entropy_loss_sum` / `denominator`; None: the number of valid tokens here, 0.0 if there is none."""
    total = clm_cross_entropy_loss_sum(
        logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss
    )
    if denominator is None:
        denominator = (labels != ignore_index).sum().clamp(min=1)
    return total / denominator

"""Mamba's short convolution: depthwise, causal, followed by SiLU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def causal_conv_silu(padded: Tensor, weight: Tensor, bias: Tensor, segments: Tensor | None = None) -> Tensor:
    """silu(bias + sum over d of weight[:, k-1-d] * x_{t-d}), as k shifted multiply-adds.

    On a CPU the backward pass of a depthwise `conv1d` costs several times as much as this.

    Args:
        padded: [b, k-1 + S, channels], the k-1 inputs before the first token (zeros at the start) in front.
        weight: [channels, k]; bias: [channels]. All in one dtype.
        segments: [b, S] integers; no input of another segment is seen. None: one segment.

    Returns:
        [b, S, channels].
    """
    return _CausalConvSilu.apply(padded, weight, bias, segments)


def _seen(segments: Tensor | None, kernel: int) -> list[Tensor | None]:
    """By tap: [b, S, 1], 1 where the input that the tap looks at is in the token's own segment."""
    if segments is None:
        return [None] * kernel
    distances = range(kernel - 1, -1, -1)
    outside = F.pad(segments, (kernel - 1, 0), value=-1)
    length = segments.shape[1]
    return [(outside[:, kernel - 1 - d : kernel - 1 - d + length] == segments).unsqueeze(-1) for d in distances]


class _CausalConvSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor, bias: Tensor, segments: Tensor | None) -> Tensor:
        kernel = weight.shape[1]
        length = padded.shape[1] - kernel + 1
        pre = bias.repeat(padded.shape[0], length, 1)
        for tap, seen in enumerate(_seen(segments, kernel)):
            window = padded[:, tap : tap + length]
            pre.addcmul_(window if seen is None else window * seen, weight[:, tap])
        ctx.save_for_backward(padded, weight, pre, segments)
        return F.silu(pre)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        padded, weight, pre, segments = ctx.saved_tensors
        length = pre.shape[1]
        d_pre = torch.ops.aten.silu_backward(dy, pre)
        d_padded, d_taps = torch.zeros_like(padded), []
        for tap, seen in enumerate(_seen(segments, weight.shape[1])):
            window = slice(tap, tap + length)
            d_seen = d_pre if seen is None else d_pre * seen
            d_padded[:, window].addcmul_(d_seen, weight[:, tap])
            d_taps.append((d_seen * padded[:, window]).sum((0, 1)))
        return d_padded, torch.stack(d_taps, dim=1), d_pre.sum((0, 1)), None

"""Mamba's short convolution: depthwise, causal, followed by SiLU, and split into what the scan reads."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_nano.mamba.kernels import MambaKernels, cuda_conv_silu
from nemotron_nano.mamba.ssd import number_runs


def causal_conv_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    widths: Sequence[int],
    *,
    before: Tensor | None = None,
    segments: Tensor | None = None,
    kernels: MambaKernels = "torch",
) -> tuple[Tensor, ...]:
    """silu(bias + sum over d of weight[:, k-1-d] * x_{t-d}), as k shifted multiply-adds, split by channels.

    On a CPU the backward pass of a depthwise `conv1d` costs several times as much as this. Nothing of its own is
    kept for backward: x is a part of the projection's result, and the rest is computed again.

    Args:
        x: [b, S, channels], in any floating-point dtype and with any strides.
        weight: [channels, k]; bias: [channels]. In fp32 or fp64, which is what is computed in and returned.
        widths: how many channels each result has; they add up to all.
        before: [b, k-1, channels], the inputs before the first token; None: zeros.
        segments: [b, S] integers; no input from before a change of the number is seen. None: one segment. Not with
            `before`.
        kernels: "cuda" computes it by causal-conv1d's, in fp32; k 2 to 4 and a multiple of 8 channels.

    Returns:
        For each width [b, S, width].

    Raises:
        NemotronNanoConfigError: "cuda" without its package, on another device, or in fp64.
    """
    segments = None if segments is None else number_runs(segments)
    if kernels == "cuda" and 0 not in x.shape[:2]:
        return cuda_conv_silu(x, weight, bias, before=before, segments=segments).split(tuple(widths), dim=-1)
    taps = weight.t().contiguous()  # with strides the products are three times slower
    out: tuple[Tensor, ...] = _CausalConvSilu.apply(x, taps, bias, before, segments, tuple(widths))
    return out


_CACHED = 1 << 18
"""Numbers that a CPU works on at a time: k passes over them should read its cache, not its memory."""


class _CausalConvSilu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        taps: Tensor,
        bias: Tensor,
        before: Tensor | None,
        segments: Tensor | None,
        widths: tuple[int, ...],
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, taps, bias, before, segments)
        ctx.widths = widths
        results = tuple(x.new_empty(*x.shape[:2], width, dtype=taps.dtype) for width in widths)
        for rows, tokens in _blocks(x):
            pre = _convolved(_window(x, before, rows, tokens, taps), taps, bias, segments, rows, tokens)
            for result, part in zip(results, pre.split(widths, dim=-1), strict=True):
                torch.ops.aten.silu.out(part, out=result[rows, tokens])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, bias, before, segments = ctx.saved_tensors
        dx, d_before = torch.empty_like(x, memory_format=torch.contiguous_format), None
        d_taps, d_bias = torch.zeros_like(taps), torch.zeros_like(bias)
        if before is not None:
            d_before = torch.zeros_like(before)  # all that there is where no token follows
        kernel, after = taps.shape[0], taps.new_empty(0)
        for rows, tokens in reversed(_blocks(x)):
            window = _window(x, before, rows, tokens, taps)
            pre = _convolved(window, taps, bias, segments, rows, tokens)
            d_pre = pre.new_empty(pre.shape[0], pre.shape[1] + kernel - 1, pre.shape[2])
            d_own, d_after = d_pre[:, : pre.shape[1]], d_pre[:, pre.shape[1] :]
            _through_silu(grads, pre, ctx.widths, rows, tokens, out=d_own)
            if tokens.stop == x.shape[1]:
                d_after.zero_()
            else:
                d_after.copy_(after)
            after = d_pre[:, : kernel - 1]
            dx[rows, tokens] = _correlated(d_pre, taps, segments, rows, tokens)
            d_bias += d_own.sum((0, 1))
            d_taps += _by_tap(d_own, window, segments, rows, tokens)
            if d_before is not None and tokens.start == 0:
                d_before[rows] = _correlated(F.pad(after, (0, 0, kernel - 1, 0)), taps, None, rows, tokens)
        return dx, d_taps, d_bias, d_before, None, None


def _blocks(x: Tensor) -> list[tuple[slice, slice]]:
    """Rows and tokens of x [b, S, channels] that are worked on together."""
    batch, length, channels = x.shape
    if x.device.type != "cpu":
        return [(slice(0, batch), slice(0, length))]
    step = max(16, _CACHED // channels)
    starts = range(0, length, step)
    return [(slice(b, b + 1), slice(at, min(at + step, length))) for b in range(batch) for at in starts]


def _window(x: Tensor, before: Tensor | None, rows: slice, tokens: slice, taps: Tensor) -> Tensor:
    """These tokens of x and the k-1 before them, contiguous, in the dtype of the taps."""
    extra = taps.shape[0] - 1
    missing = max(0, extra - tokens.start)
    inside = x[rows, tokens.start - extra + missing : tokens.stop]
    if not missing:
        return inside.to(taps.dtype).contiguous()
    window = inside.new_zeros(inside.shape[0], missing + inside.shape[1], inside.shape[2], dtype=taps.dtype)
    if before is not None:
        window[:, :missing] = before[rows, extra - missing :]
    window[:, missing:] = inside
    return window


def _convolved(
    window: Tensor, taps: Tensor, bias: Tensor, segments: Tensor | None, rows: slice, tokens: slice
) -> Tensor:
    """Before the SiLU: [rows, tokens, channels] from a window of k-1 tokens more."""
    length = tokens.stop - tokens.start
    pre: Tensor | None = None
    for tap, seen in enumerate(_seen(segments, rows, tokens, len(taps))):
        part = window[:, tap : tap + length]
        part = part if seen is None else part * seen
        pre = torch.addcmul(bias, part, taps[tap]) if pre is None else pre.addcmul_(part, taps[tap])
    assert pre is not None
    return pre


def _by_tap(d_pre: Tensor, window: Tensor, segments: Tensor | None, rows: slice, tokens: slice) -> Tensor:
    """The gradient of the taps: [k, channels], the products of d_pre with each shifted window summed over tokens."""
    kernel = window.shape[1] - d_pre.shape[1] + 1
    shifted = window.unfold(1, d_pre.shape[1], 1).movedim(-1, 2)  # [rows, k, tokens, channels], a view
    products = d_pre.unsqueeze(1) * shifted
    for tap, seen in enumerate(_seen(segments, rows, tokens, kernel)):
        if seen is not None:
            products[:, tap] *= seen
    return products.sum((0, 2))


def _correlated(d_pre: Tensor, taps: Tensor, segments: Tensor | None, rows: slice, tokens: slice) -> Tensor:
    """The gradient of the inputs at the first tokens of `d_pre`, which has k-1 more than these."""
    kernel = len(taps)
    length = d_pre.shape[1] - kernel + 1
    dx = d_pre[:, :length] * taps[-1]
    for distance, seen in enumerate(_seen_later(segments, rows, tokens, kernel), start=1):
        part = d_pre[:, distance : distance + length]
        dx.addcmul_(part if seen is None else part * seen, taps[-1 - distance])
    return dx


def _through_silu(
    grads: tuple[Tensor, ...], pre: Tensor, widths: tuple[int, ...], rows: slice, tokens: slice, out: Tensor
) -> None:
    parts, outs = pre.split(widths, dim=-1), out.split(widths, dim=-1)
    for grad, part, result in zip(grads, parts, outs, strict=True):
        torch.ops.aten.silu_backward.grad_input(grad[rows, tokens], part, grad_input=result)


def _seen(segments: Tensor | None, rows: slice, tokens: slice, kernel: int) -> Iterator[Tensor | None]:
    """By tap: [rows, tokens, 1], 1 where the input that the tap looks at is in the token's own segment."""
    for distance in range(kernel - 1, -1, -1):
        yield None if segments is None else _same(segments, rows, tokens, -distance)


def _seen_later(segments: Tensor | None, rows: slice, tokens: slice, kernel: int) -> Iterator[Tensor | None]:
    """By distance 1 to k-1: [rows, tokens, 1], 1 where the token so far behind is in this one's segment."""
    for distance in range(1, kernel):
        yield None if segments is None else _same(segments, rows, tokens, distance)


def _same(segments: Tensor, rows: slice, tokens: slice, shift: int) -> Tensor:
    """Whether each token and the one `shift` behind it are in one segment; before and after all tokens is none."""
    shifted = F.pad(segments[rows], (max(0, -shift), max(0, shift)), value=-1)
    start = tokens.start + max(0, shift)
    return (shifted[:, start : start + tokens.stop - tokens.start] == segments[rows, tokens]).unsqueeze(-1)

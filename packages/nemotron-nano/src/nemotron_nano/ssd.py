"""The scan of Mamba-2 in plain torch: chunks of matrix products, and one step of the same recurrence.

For each head, with a scalar decay `exp(delta_t A)` and the state `S [P, N]`:

    S_t = exp(delta_t A) S_{t-1} + delta_t u_t (x) B_t,        y_t = S_t C_t

Letters: b sequences, S tokens, H heads of P channels, G groups of R = H / G heads that share B and C,
N state size, L tokens in a chunk, c chunks. Source: Dao and Gu, "Transformers are SSMs" (2024), section 6.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def ssd_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int = 128,
    segments: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """All `y_t`, and the state after the last token. The result does not depend on `chunk_size`.

    Inside a chunk the recurrence is written out as a masked product, `y = (C B^T * decay) (delta u)`; from
    chunk to chunk only the state travels. No head ever has an [S, S] matrix, and none of its [L, L] ones is
    kept for backward.

    Args:
        u: [b, S, H, P].
        delta: [b, S, H], not negative.
        A: [H], negative.
        B, C: [b, S, G, N]; head h reads group h // R.
        chunk_size: tokens in a chunk; S need not be a multiple of it.
        segments: [b, S] integers; the state is reset wherever the number changes. None: one segment.
        initial_state: [b, H, P, N] before the first token, which then continues its segment; None: zeros.

    Returns:
        y [b, S, H, P] and the state [b, H, P, N], in fp32 (fp64 for fp64 input), without the skip term `D u`.
    """
    dtype = torch.promote_types(u.dtype, torch.float32)
    tokens, length = u.shape[1], min(chunk_size, u.shape[1])
    delta = delta.to(dtype)
    x = _into_chunks(u.to(dtype) * delta.unsqueeze(-1), length).movedim(2, -2).contiguous()  # [b, c, H, L, P]
    log_decay = _into_chunks(delta * A.to(dtype), length).movedim(2, -1)  # [b, c, H, L]
    B = _into_chunks(B.to(dtype), length).movedim(2, -2).contiguous()  # [b, c, G, L, N]
    C = _into_chunks(C.to(dtype), length).movedim(2, -2).contiguous()
    reach = _reach(segments, length)

    added, from_start = _chunk_states(x, log_decay, B, reach)
    at_start, final = _pass_states_on(added, from_start[..., -1], initial_state)
    y = _WithinChunks.apply(x, log_decay, B, C, reach.within) + _from_before(C, at_start) * from_start.unsqueeze(-1)
    return y.movedim(-2, 2).flatten(1, 2)[:, :tokens], final


def ssd_step(state: Tensor, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the recurrence: state [b, H, P, N], u [b, H, P], delta [b, H], B, C [b, G, N] -> y, state."""
    dtype = state.dtype
    heads_per_group = u.shape[1] // B.shape[1]
    B, C = (x.to(dtype).repeat_interleave(heads_per_group, dim=1) for x in (B, C))  # [b, H, N]
    decay = (delta.to(dtype) * A.to(dtype)).exp()
    x = u.to(dtype) * delta.to(dtype).unsqueeze(-1)
    state = state * decay[..., None, None] + x.unsqueeze(-1) * B.unsqueeze(-2)
    return (state @ C.unsqueeze(-1)).squeeze(-1), state


class _Reach(NamedTuple):
    """Which tokens see which, 1 or 0, for a sequence of several segments; all None for a single one."""

    within: Tensor | None
    """[b, c, 1, L, L]: tokens t, s of a chunk are in one segment."""
    from_start: Tensor | None
    """[b, c, 1, L]: token t is in the segment that the chunk before ends with."""
    to_end: Tensor | None
    """[b, c, 1, L]: token s is in the segment that this chunk ends with."""


def _reach(segments: Tensor | None, length: int) -> _Reach:
    if segments is None:
        return _Reach(None, None, None)
    last = segments[:, -1:].expand(-1, -segments.shape[1] % length)  # padding continues the last segment
    chunks = torch.cat([segments, last], dim=1).unflatten(1, (-1, length))
    before = torch.cat([chunks[:, :1, 0], chunks[:, :-1, -1]], dim=1)
    within = chunks.unsqueeze(-1) == chunks.unsqueeze(-2)
    from_start = chunks == before.unsqueeze(-1)
    to_end = chunks == chunks[..., -1:]
    return _Reach(within.unsqueeze(2), from_start.unsqueeze(2), to_end.unsqueeze(2))


def _into_chunks(x: Tensor, length: int) -> Tensor:
    """[b, S, ...] -> [b, c, L, ...]; zeros at the end change nothing (delta = 0: no decay, no input)."""
    if padding := -x.shape[1] % length:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
    return x.unflatten(1, (-1, length))


def _chunk_states(x: Tensor, log_decay: Tensor, B: Tensor, reach: _Reach) -> tuple[Tensor, Tensor]:
    """What each chunk adds to the state at its end [b, c, H, P, N], and the decay from its start to each t."""
    # summed from the end, without the token itself; a difference of sums would lose what is small
    to_end = F.pad(log_decay[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1).exp()
    from_start = log_decay.cumsum(-1).exp()
    if reach.from_start is not None and reach.to_end is not None:
        from_start, to_end = from_start * reach.from_start, to_end * reach.to_end
    heads, channels = x.shape[2], x.shape[-1]
    weighted = (x * to_end.unsqueeze(-1)).movedim(-2, -1)  # [b, c, H, P, L]
    added = weighted.reshape(*B.shape[:3], -1, B.shape[-2]) @ B  # [b, c, G, R*P, N]
    return added.view(*B.shape[:2], heads, channels, -1), from_start


def _pass_states_on(added: Tensor, decay: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state before each chunk [b, c, H, P, N], and after the last one; `decay` [b, c, H] over a chunk."""
    state = torch.zeros_like(added[:, 0]) if initial is None else initial.to(added.dtype)
    before = []
    for new, kept in zip(added.unbind(1), decay[..., None, None].unbind(1), strict=True):
        before.append(state)
        state = torch.addcmul(new, state, kept)
    return torch.stack(before, dim=1), state


def _from_before(C: Tensor, states: Tensor) -> Tensor:
    """What the state before a chunk gives to each of its tokens, not decayed yet: [b, c, H, L, P]."""
    batch, chunks, groups, length, _ = C.shape
    heads, channels = states.shape[2:4]
    carried = C @ states.reshape(batch, chunks, groups, -1, states.shape[-1]).transpose(-1, -2)  # [.., L, R*P]
    return carried.unflatten(-1, (-1, channels)).movedim(-2, 3).reshape(batch, chunks, heads, length, channels)


_SMALLEST = -87.0
"""Exponents below are raised to it: e^-87 is the last power that is a normal number in fp32, and fast."""


class _WithinChunks(torch.autograd.Function):
    """y_t = sum over s <= t of decay(s, t) (C_t . B_s) x_s, chunk by chunk; recomputed in backward.

    All [L, L] masks act on C B^T, which a group's heads share. The gradient by the exponents needs no
    [L, L] sums either: with M = decay * C B^T it is row sums minus column sums of (dy x^T) * M, which are
    dy_t . y_t and x_s . dx_s.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, within: Tensor | None) -> Tensor:
        y = _mixing(log_decay, B, C, within)[0] @ x
        ctx.save_for_backward(x, log_decay, B, C, within, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, log_decay, B, C, within, y = ctx.saved_tensors
        dy = dy.contiguous()
        mixing, decay = _mixing(log_decay, B, C, within)
        dx = mixing.transpose(-1, -2) @ dy
        of_sum = (dy * y).sum(-1) - (x * dx).sum(-1)  # [b, c, H, L], by the running sum of log_decay
        d_log_decay = of_sum.flip(-1).cumsum(-1).flip(-1)
        d_scores = (dy @ x.transpose(-1, -2)).mul_(decay).unflatten(2, (B.shape[2], -1)).sum(3)
        d_scores = _causal(d_scores, within)
        return dx, d_log_decay, d_scores.transpose(-1, -2) @ C, d_scores @ B, None


def _mixing(log_decay: Tensor, B: Tensor, C: Tensor, within: Tensor | None) -> tuple[Tensor, Tensor]:
    """M and its factor decay(s, t), both [b, c, H, L, L]; above the diagonal M is 0 and decay at most 1."""
    decay = _differences(log_decay).clamp_(_SMALLEST, 0).exp_()
    scores = _causal(C @ B.transpose(-1, -2), within)  # [b, c, G, L, L]
    by_group = decay.unflatten(2, (scores.shape[2], -1))
    return (scores.unsqueeze(3) * by_group).flatten(2, 3), decay


def _causal(scores: Tensor, within: Tensor | None) -> Tensor:
    scores = scores.tril_()
    return scores if within is None else scores.mul_(within)


def _differences(log_decay: Tensor) -> Tensor:
    """sum of log_decay over s < r <= t, for all t, s of a chunk [..., L, L].

    A difference of running sums, which may be large where it is small, so each sum is kept as two numbers.
    """
    exact = log_decay.double().cumsum(-1)
    high = exact.to(log_decay.dtype)
    low = (exact - high).to(log_decay.dtype)
    return (high.unsqueeze(-1) - high.unsqueeze(-2)).add_(low.unsqueeze(-1)).sub_(low.unsqueeze(-2))

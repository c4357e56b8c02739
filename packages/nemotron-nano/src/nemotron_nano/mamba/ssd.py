"""The scan of Mamba-2 in plain torch: chunks of matrix products, and one step of the same recurrence.

For each head, with a scalar decay `exp(delta_t A)` and the state `S [P, N]`:

    S_t = exp(delta_t A) S_{t-1} + delta_t u_t (x) B_t,        y_t = S_t C_t

Letters: b sequences, S tokens, H heads of P channels, G groups of R = H / G heads that share B and C,
N state size, c chunks of L tokens, n = c*b. Source: Dao and Gu, "Transformers are SSMs" (2024), section 6.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_nano.mamba.kernels import MambaKernels, cuda_scan


def number_runs(ids: Tensor) -> Tensor:
    """Segments of rows that documents share: ids [b, S], any integers -> [b, S] int64, 0 for the first run of equal
    ids in each row, 1 for the next, ...; an id that comes back begins another segment.
    """
    if ids.shape[1] == 0:
        return ids.long()
    return F.pad(ids[:, 1:] != ids[:, :-1], (1, 0)).cumsum(1)


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
    kernels: MambaKernels = "torch",
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
        kernels: "cuda" computes it by mamba-ssm's, with the same arguments and results; no fp64 there.

    Returns:
        y [b, S, H, P] and the state [b, H, P, N], in fp32 (fp64 for fp64 input), without the skip term `D u`.
        All sizes may be 0 but those of a head.

    Raises:
        NemotronNanoConfigError: "cuda" without its package, on another device, or in fp64.
    """
    if 0 in u.shape[:2]:
        return _of_no_tokens(u, delta, A, B, C, initial_state)
    segments = None if segments is None else number_runs(segments)
    if kernels == "cuda":
        return cuda_scan(u, delta, A, B, C, chunk_size=chunk_size, segments=segments, initial_state=initial_state)
    dtype = torch.promote_types(u.dtype, torch.float32)
    batch, tokens = u.shape[:2]
    length = min(chunk_size, tokens)
    delta = delta.to(dtype)
    x = _into_chunks(u.to(dtype) * delta.unsqueeze(-1), length)
    log_decay = _into_chunks(delta * A.to(dtype), length)
    B, C = _into_chunks(B.to(dtype), length), _into_chunks(C.to(dtype), length)
    reach = _reach(segments, length)

    added, from_start = _chunk_states(x, log_decay, B, reach)
    at_start, final = _pass_states_on(added, from_start[..., -1], initial_state, batch)
    y = _WithinChunks.apply(x, log_decay, B, C, reach.within)
    y = torch.addcmul(y, _from_before(C, at_start), from_start.unsqueeze(-1))
    return _out_of_chunks(y, batch)[:, :tokens], final


def _of_no_tokens(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What `ssd_scan` returns, with a graph to all: a rank without rows has gradients of zero like any other."""
    dtype = torch.promote_types(u.dtype, torch.float32)
    graph = torch.stack([tensor.sum().to(dtype) for tensor in (delta, A, B, C)]).sum() * 0
    empty = (u.shape[0], u.shape[2], u.shape[3], B.shape[3])
    state = u.new_zeros(empty, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    return u.to(dtype) + graph, state + graph


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
    """[n, 1, L, L]: tokens t, s of a chunk are in one segment."""
    from_start: Tensor | None
    """[n, 1, L]: token t is in the segment that the chunk before ends with."""
    to_end: Tensor | None
    """[n, 1, L]: token s is in the segment that this chunk ends with."""


def _reach(segments: Tensor | None, length: int) -> _Reach:
    if segments is None:
        return _Reach(None, None, None)
    batch, padding = segments.shape[0], -segments.shape[1] % length
    padded = torch.cat([segments, segments[:, -1:].expand(-1, padding)], dim=1)  # continues the last segment
    before = torch.cat([segments[:, :1], padded[:, length - 1 : -1 : length]], dim=1)  # where each chunk begins
    chunks, before = padded.view(batch, -1, length).transpose(0, 1).flatten(0, 1), before.t().reshape(-1, 1)
    within = chunks.unsqueeze(-1) == chunks.unsqueeze(-2)
    return _Reach(within.unsqueeze(1), (chunks == before).unsqueeze(1), (chunks == chunks[:, -1:]).unsqueeze(1))


def _into_chunks(x: Tensor, length: int) -> Tensor:
    """[b, S, X, ...] -> [n, X, L, ...] with n = c*b, chunk by chunk.

    Zeros fill the last chunk and change nothing there: with delta = 0 nothing decays and nothing is added.
    """
    if padding := -x.shape[1] % length:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
    return x.unflatten(1, (-1, length)).transpose(0, 1).transpose(2, 3).flatten(0, 1).contiguous()


def _out_of_chunks(y: Tensor, batch: int) -> Tensor:
    """[n, H, L, P] -> [b, c*L, H, P]."""
    return y.unflatten(0, (-1, batch)).transpose(0, 1).transpose(2, 3).flatten(1, 2)


def _chunk_states(x: Tensor, log_decay: Tensor, B: Tensor, reach: _Reach) -> tuple[Tensor, Tensor]:
    """What each chunk adds to the state at its end [n, H, P, N], and the decay from its start to each t [n, H, L]."""
    # summed from the end, without the token itself; a difference of sums would lose what is small
    to_end = F.pad(log_decay[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1).exp()
    from_start = log_decay.cumsum(-1).exp()
    if reach.from_start is not None and reach.to_end is not None:
        from_start, to_end = from_start * reach.from_start, to_end * reach.to_end
    weighted = (x * to_end.unsqueeze(-1)).transpose(-1, -2)  # [n, H, P, L]
    added = weighted.reshape(*B.shape[:2], -1, B.shape[2]) @ B  # [n, G, R*P, N]
    return added.view(*weighted.shape[:3], -1), from_start


def _pass_states_on(added: Tensor, decay: Tensor, initial: Tensor | None, batch: int) -> tuple[Tensor, Tensor]:
    """The state before each chunk [n, H, P, N], and after the last [b, H, P, N]; `decay` [n, H] is a chunk's whole."""
    state = torch.zeros_like(added[:batch]) if initial is None else initial.to(added.dtype)
    before = []
    for new, kept in zip(added.split(batch), decay[..., None, None].split(batch), strict=True):
        before.append(state)
        state = torch.addcmul(new, state, kept)
    return torch.cat(before), state


def _from_before(C: Tensor, states: Tensor) -> Tensor:
    """What the state before a chunk gives to each of its tokens, not decayed yet: [n, H, L, P]."""
    carried = C @ states.reshape(*C.shape[:2], -1, C.shape[-1]).transpose(-1, -2)  # [n, G, L, R*P]
    return carried.unflatten(-1, (-1, states.shape[2])).transpose(2, 3).flatten(1, 2)


class _WithinChunks(torch.autograd.Function):
    """y_t = sum over s <= t of decay(s, t) (C_t . B_s) x_s, chunk by chunk; recomputed in backward.

    All [L, L] masks act on C B^T, which a group's heads share. The gradient by log_decay_r is the sum of
    G = (dy x^T) * decay * C B^T over s < r <= t. As a running sum of differences (dy_t . y_t - x_s . dx_s)
    it would take no [L, L] sums, but lose all digits where the decay is strong.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, within: Tensor | None) -> Tensor:
        y = torch.empty_like(x)
        for part in _parts(x):
            mixing = _decay(log_decay[part])
            _by_group(mixing, B).mul_(_scores(B[part], C[part], _of(within, part)).unsqueeze(2))
            y[part] = mixing @ x[part]
        ctx.save_for_backward(x, log_decay, B, C, within)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, log_decay, B, C, within = ctx.saved_tensors
        dy = dy.contiguous()
        dx, d_log_decay, dB, dC = (torch.empty_like(tensor) for tensor in (x, log_decay, B, C))
        for part in _parts(x):
            decay, scores = _decay(log_decay[part]), _scores(B[part], C[part], _of(within, part))
            d_mixing = (dy[part] @ x[part].transpose(-1, -2)).mul_(decay)
            d_scores = _causal(_by_group(d_mixing, B).sum(2), _of(within, part))
            dB[part], dC[part] = d_scores.transpose(-1, -2) @ C[part], d_scores @ B[part]
            mixing = decay
            _by_group(mixing, B).mul_(scores.unsqueeze(2))
            dx[part] = mixing.transpose(-1, -2) @ dy[part]
            _by_group(d_mixing, B).mul_(scores.unsqueeze(2))
            d_log_decay[part] = _sum_across(d_mixing)
        return dx, d_log_decay, dB, dC, None


_CACHED = 1 << 18
"""Numbers that a CPU works on at a time: matrices of [L, L] are slow once they leave its cache."""

_SMALLEST = -87.0
"""Exponents below are raised to it: e^-87 is the last power that is a normal number in fp32, and fast."""


def _parts(x: Tensor) -> list[slice]:
    """The chunks [n, H, L, P], a few at a time on a CPU, elsewhere all at once."""
    n, heads, length, _ = x.shape
    step = max(1, _CACHED // (heads * length * length)) if x.device.type == "cpu" else n
    return [slice(start, start + step) for start in range(0, n, step)]


def _of(within: Tensor | None, part: slice) -> Tensor | None:
    return None if within is None else within[part]


def _by_group(by_head: Tensor, B: Tensor) -> Tensor:
    """[n, H, ...] -> [n, G, R, ...], a view."""
    return by_head.unflatten(1, (B.shape[1], -1))


def _scores(B: Tensor, C: Tensor, within: Tensor | None) -> Tensor:
    """C_t . B_s where s <= t and both are in one segment, else 0: [n, G, L, L]."""
    return _causal(C @ B.transpose(-1, -2), within)


def _causal(scores: Tensor, within: Tensor | None) -> Tensor:
    scores = scores.tril_()
    return scores if within is None else scores.mul_(within)


def _sum_across(G: Tensor) -> Tensor:
    """For each r the sum of G_ts over s < r <= t: [n, H, L, L] -> [n, H, L]."""
    up_to_s = torch.cumsum(G, -1).tril_(-1).sum(-2)  # at s: over all t > s
    return F.pad(up_to_s[..., :-1], (1, 0))


def _decay(log_decay: Tensor) -> Tensor:
    """exp of the sum of log_decay over s < r <= t, for all t, s of a chunk: [n, H, L, L]; at most 1 where s > t.

    The sum is a difference of running sums, which may be large where it is small, so each is kept as two numbers.
    """
    exact = log_decay.double().cumsum(-1)
    high = exact.to(log_decay.dtype)
    low = (exact - high).to(log_decay.dtype)
    difference = (high.unsqueeze(-1) - high.unsqueeze(-2)).add_(low.unsqueeze(-1)).sub_(low.unsqueeze(-2))
    return difference.clamp_(_SMALLEST, 0).exp_()

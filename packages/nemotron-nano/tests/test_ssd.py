"""The chunked scan and the convolution against plain loops in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron_nano.mamba import conv
from nemotron_nano.mamba.ssd import ssd_scan, ssd_step


def recurrence(u, delta, A, B, C, segments=None, state=None):
    """One token after the other, in the dtype of the input."""
    b, S, H, P = u.shape
    B, C = (x[:, :, torch.arange(H) // (H // B.shape[2])] for x in (B, C))
    state = torch.zeros(b, H, P, B.shape[-1], dtype=u.dtype) if state is None else state
    outputs = []
    for t in range(S):
        if segments is not None and t > 0:
            state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        wrote = delta[:, t, :, None, None] * u[:, t, :, :, None] * B[:, t, :, None, :]
        state = state * torch.exp(delta[:, t] * A)[:, :, None, None] + wrote
        outputs.append((state * C[:, t, :, None, :]).sum(-1))
    return torch.stack(outputs, dim=1), state


def inputs(S: int, seed: int = 0, *, b=2, H=6, P=5, G=2, N=7, spread=2.0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(b, S, H, P, generator=g),
        F.softplus(spread * torch.randn(b, S, H, generator=g)),
        -torch.exp(3 * torch.rand(H, generator=g) - 1),
        torch.randn(b, S, G, N, generator=g),
        torch.randn(b, S, G, N, generator=g),
    ]


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def borders(S: int, chunk: int) -> Tensor:
    """Documents of one token and of many, borders inside chunks, and in one of the two rows at all their edges."""
    starts = torch.rand(2, S, generator=torch.Generator().manual_seed(S)) < 0.1
    starts[:, :: chunk if chunk > 1 else 9] |= torch.tensor([[True], [False]])
    return 4 - starts.cumsum(1) % 2  # two numbers that come back, each time for another document


@pytest.mark.parametrize(
    ("chunk", "packed"),
    [(1, False), (7, False), (64, False), (128, False), (256, False), (1, True), (7, True), (64, True)],
)
def test_scan_and_gradients_equal_the_recurrence_whatever_the_chunk(chunk, packed):
    """From almost no decay to almost no memory, where what A does is a small difference of large sums."""
    sizes, strengths = (chunk // 2 + 1, chunk, int(3.5 * chunk)), ((-2, 1), (0, 2.8), (2, 6))
    for S, strength in zip(sizes, strengths, strict=True):
        segments = borders(S, chunk) if packed else None
        args = inputs(S, seed=S)
        args[2] = -torch.linspace(*strength, 6).exp()
        g = torch.Generator().manual_seed(9)
        args.append(torch.randn(2, 6, 5, 7, generator=g))
        ours, exact = ([x.to(t).requires_grad_() for x in args] for t in (torch.float32, torch.float64))
        results = ssd_scan(*ours[:-1], chunk_size=chunk, segments=segments, initial_state=ours[-1])
        expected = recurrence(*exact[:-1], segments=segments, state=exact[-1])
        upstream = [torch.randn(x.shape, generator=g) for x in results]
        got = torch.autograd.grad(results, ours, upstream, allow_unused=True)
        wanted = torch.autograd.grad(expected, exact, [x.double() for x in upstream], allow_unused=True)
        names = ("y", "state", "u", "delta", "A", "B", "C", "start")
        for name, mine, theirs in zip(names, (*results, *got), (*expected, *wanted), strict=True):
            assert relative(mine, theirs) < (1e-5 if name == "A" else 2e-6), (S, name)


def test_a_sequence_of_one_token_forgets_nothing():
    args = [x.requires_grad_() for x in inputs(1)]
    grad = torch.autograd.grad(ssd_scan(*args, chunk_size=4)[0].sum(), args[2])[0]
    assert not grad.any()


@pytest.mark.parametrize(("b", "S"), [(0, 5), (2, 0), (0, 0)])
def test_no_tokens_give_nothing_and_gradients_of_zero(b, S):
    tensors = [tensor.requires_grad_() for tensor in inputs(S, b=b)]
    y, state = ssd_scan(*tensors, chunk_size=4)
    assert y.shape == tensors[0].shape
    assert state.shape == (b, 6, 5, 7)
    assert not state.any()
    (y.sum() + state.sum()).backward()
    assert all((tensor.grad == 0).all() for tensor in tensors)


def test_scan_in_float64_passes_gradcheck():
    args = [x.double().requires_grad_() for x in inputs(9, b=1, H=2, P=2, G=1, N=3, spread=1.0)]
    assert torch.autograd.gradcheck(lambda *xs: ssd_scan(*xs, chunk_size=4), args)


def test_scan_keeps_no_matrix_of_a_chunk_for_backward():
    args = [x.requires_grad_() for x in inputs(256, b=1)]
    largest = 0

    def note(saved: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        ssd_scan(*args, chunk_size=128)
    assert largest < 6 * 2 * 128 * 128  # one chunk matrix of each head


def test_half_precision_is_scanned_in_fp32():
    args = inputs(70)
    rounded = [x.bfloat16() if i in (0, 3, 4) else x for i, x in enumerate(args)]
    y, state = ssd_scan(*rounded, chunk_size=16)
    y_ref, _ = recurrence(*(x.double() for x in rounded))
    assert y.dtype == state.dtype == torch.float32
    assert relative(y, y_ref) < 1e-6


def test_steps_continue_a_scan():
    args = inputs(40)
    y_ref, state_ref = recurrence(*(x.double() for x in args))
    u, delta, A, B, C = args
    _, state = ssd_scan(u[:, :33], delta[:, :33], A, B[:, :33], C[:, :33], chunk_size=16)
    for t in range(33, 40):
        y, state = ssd_step(state, u[:, t], delta[:, t], A, B[:, t], C[:, t])
        assert relative(y, y_ref[:, t]) < 1e-6
    assert relative(state, state_ref) < 1e-6


DOCUMENTS = {
    "one": None,
    "inside the window": [[0, 0, 1, 2, 2, 2, 2, 2, 5, 5, 5], [0] * 11],
    "single tokens": [list(range(11)), [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2]],
    "numbers that come back": [[3, 8, 3, 8, 3, 3, 8, 3, 8, 8, 3], [0] * 11],
}


def conv_loop(x, weight, bias, before, documents):
    inputs = torch.cat([before, x], dim=1)
    rows = []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            out = bias
            for back in range(4):
                if documents is None or (t >= back and documents[b, t - back] == documents[b, t]):
                    out = out + weight[:, 3 - back] * inputs[b, 3 + t - back]
            rows.append(out * torch.sigmoid(out))
    return torch.stack(rows).view(*x.shape[:2], -1).split([3, 2, 1], dim=-1)


@pytest.mark.parametrize("cached", [1 << 17, 1])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_conv_and_gradients_equal_a_loop(monkeypatch, documents, cached):
    """With `cached` 1 in blocks of 16 tokens, so that the 44 tokens are cut in three."""
    monkeypatch.setattr(conv, "_CACHED", cached)
    g = torch.Generator().manual_seed(0)
    documents = documents and DOCUMENTS[documents]
    packed = None if documents is None else torch.tensor(documents).repeat(1, 4)
    numbers = None if packed is None else (packed.diff(prepend=packed[:, :1]) != 0).cumsum(1)
    shapes = ((2, 44, 6), (6, 4), (6,), (2, 3, 6))
    args = [torch.randn(*s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]
    if packed is not None:
        args[3] = torch.zeros(2, 3, 6, dtype=torch.float64, requires_grad=True)
    upstream = [torch.randn(2, 44, width, generator=g, dtype=torch.float64) for width in (3, 2, 1)]
    wide = torch.cat([args[0], args[0]], dim=-1)[..., :6]  # as from a projection: rows with more behind them
    got = conv.causal_conv_silu(wide, *args[1:3], [3, 2, 1], before=args[3], segments=packed)
    expected = conv_loop(*args, numbers)
    inputs = args if packed is None else args[:3]
    grads = torch.autograd.grad(got, inputs, upstream)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for mine, theirs in zip((*got, *grads), (*expected, *wanted), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("b", "S"), [(0, 5), (2, 0)])
def test_conv_of_no_tokens_has_gradients_of_zero(b, S):
    args = [torch.randn(*s).requires_grad_() for s in ((b, S, 6), (6, 4), (6,), (b, 3, 6))]
    segments = torch.zeros(b, S, dtype=torch.int64)
    outputs = conv.causal_conv_silu(*args[:3], [3, 2, 1], segments=segments)
    assert [tuple(y.shape) for y in outputs] == [(b, S, 3), (b, S, 2), (b, S, 1)]
    outputs = conv.causal_conv_silu(*args[:3], [3, 2, 1], before=args[3])
    grads = torch.autograd.grad(torch.cat(outputs, -1).sum(), args)
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in args]
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("S", [1, 2, 3])
def test_conv_of_fewer_tokens_than_its_window(S):
    g = torch.Generator().manual_seed(S)
    args = [torch.randn(*s, generator=g, dtype=torch.float64).requires_grad_() for s in ((2, S, 6), (6, 4), (6,))]
    before = torch.randn(2, 3, 6, generator=g, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w, b, before: conv.causal_conv_silu(x, w, b, [3, 2, 1], before=before), [*args, before]
    )
    got = conv.causal_conv_silu(*args, [3, 2, 1], before=before)
    for mine, theirs in zip(got, conv_loop(*args, before, None), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12, rtol=0)


def test_conv_of_half_precision_is_that_of_its_values_in_fp32():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 6, generator=g).bfloat16().requires_grad_()
    exact = x.detach().float().requires_grad_()
    weight, bias = torch.randn(6, 4, generator=g), torch.randn(6, generator=g)
    got, expected = (torch.cat(conv.causal_conv_silu(each, weight, bias, [4, 2]), -1) for each in (x, exact))
    assert torch.equal(got, expected)
    grads = [torch.autograd.grad(y.square().sum(), each)[0] for y, each in ((got, x), (expected, exact))]
    assert torch.equal(grads[0], grads[1].bfloat16())

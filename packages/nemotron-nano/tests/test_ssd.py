"""The chunked scan and the convolution against plain loops in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron_nano.conv import causal_conv_silu
from nemotron_nano.ssd import ssd_scan, ssd_step


def recurrence(u, delta, A, B, C, segments=None, state=None):
    """One token after the other, in the dtype of the input."""
    b, S, H, P = u.shape
    group = torch.arange(H) // (H // B.shape[2])
    state = torch.zeros(b, H, P, B.shape[-1], dtype=u.dtype) if state is None else state
    outputs = []
    for t in range(S):
        if segments is not None and t > 0:
            state = state * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        wrote = delta[:, t, :, None, None] * u[:, t, :, :, None] * B[:, t, group, None, :]
        state = state * torch.exp(delta[:, t] * A)[:, :, None, None] + wrote
        outputs.append((state * C[:, t, group, None, :]).sum(-1))
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


@pytest.mark.parametrize("chunk", [1, 7, 64, 256])
@pytest.mark.parametrize("S", [1, 5, 64, 101, 224])
@pytest.mark.parametrize("packed", [False, True])
def test_scan_equals_the_recurrence_whatever_the_chunk(S, chunk, packed):
    args = inputs(S, seed=S)
    segments = None
    if packed:  # documents of one token and of many, borders inside chunks and at their edges
        starts = torch.rand(2, S, generator=torch.Generator().manual_seed(S)) < 0.1
        starts[:, :: chunk if chunk > 1 else 9] |= torch.tensor([[True], [False]])
        segments = starts.cumsum(1)
    y, state = ssd_scan(*args, chunk_size=chunk, segments=segments)
    y_ref, state_ref = recurrence(*(x.double() for x in args), segments=segments)
    assert relative(y, y_ref) < 1e-6
    assert relative(state, state_ref) < 1e-6


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_scan_gradients_equal_the_recurrences(chunk, packed):
    args = [x.requires_grad_() for x in inputs(101, seed=3)]
    start = torch.randn(2, 6, 5, 7, generator=torch.Generator().manual_seed(9)).requires_grad_()
    segments = (torch.rand(2, 101, generator=torch.Generator().manual_seed(4)) < 0.06).cumsum(1) if packed else None
    exact = [x.detach().double().requires_grad_() for x in (*args, start)]
    y, state = ssd_scan(*args, chunk_size=chunk, segments=segments, initial_state=start)
    y_ref, state_ref = recurrence(*exact[:-1], segments=segments, state=exact[-1])
    g = torch.Generator().manual_seed(5)
    dy, dstate = torch.randn(y.shape, generator=g), torch.randn(state.shape, generator=g)
    got = torch.autograd.grad([y, state], [*args, start], [dy, dstate], allow_unused=True)
    expected = torch.autograd.grad([y_ref, state_ref], exact, [dy.double(), dstate.double()], allow_unused=True)
    for name, ours, theirs in zip(("u", "delta", "A", "B", "C", "start"), got, expected, strict=True):
        assert relative(ours, theirs) < 1e-5, name


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


@pytest.mark.parametrize("packed", [False, True])
def test_conv_equals_a_loop(packed):
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((2, 11, 6), (6, 4), (6,)))
    documents = torch.tensor([[0, 0, 1, 2, 2, 2, 2, 2, 5, 5, 5], [0] * 11]) if packed else None
    expected = torch.zeros_like(x)
    for b in range(2):
        for t in range(11):
            out = bias.clone()
            for back in range(4):
                if t - back >= 0 and (documents is None or documents[b, t - back] == documents[b, t]):
                    out += weight[:, 3 - back] * x[b, t - back]
            expected[b, t] = out * torch.sigmoid(out)
    got = causal_conv_silu(F.pad(x, (0, 0, 3, 0)), weight, bias, documents)
    assert torch.allclose(got, expected, atol=1e-12)
    args = [F.pad(x, (0, 0, 3, 0)).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    assert torch.autograd.gradcheck(lambda *xs: causal_conv_silu(*xs, documents), args)

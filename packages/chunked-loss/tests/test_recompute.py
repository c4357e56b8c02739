"""The recomputing variant: the same values, and derivatives of any order."""

import pytest
import torch
import torch.nn.functional as F

from chunked_loss import ChunkedCLMCrossEntropyLoss, compiled, linear_cross_entropy

T, D, V = 5, 3, 7


def inputs():
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(T, D, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(V, generator=g, dtype=torch.float64, requires_grad=True)
    return hidden, weight, bias, torch.tensor([3, -100, 0, 6, 2])


OPTIONS = {
    "label_smoothing": 0.1,
    "z_loss": 0.05,
    "softcap": 2.0,
    "class_weight": torch.linspace(0.5, 2, V, dtype=torch.float64),
    "token_weight": torch.linspace(1, 2, T, dtype=torch.float64),
    "vocab_size": 7,
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_first_and_second_derivatives_are_those_of_finite_differences(reduction):
    hidden, weight, bias, labels = inputs()

    def loss(hidden, weight, bias):
        return linear_cross_entropy(
            hidden, weight, labels, bias=bias, chunk_tokens=2, reduction=reduction, recompute=True, **OPTIONS
        )

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))
    assert torch.autograd.gradgradcheck(loss, (hidden, weight, bias))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_agrees_with_the_gradients_of_forward(reduction):
    hidden, weight, bias, labels = inputs()
    results = []
    for recompute in (False, True):
        loss, stats = linear_cross_entropy(
            hidden, weight, labels, bias=bias, chunk_tokens=2, reduction=reduction, recompute=recompute,
            return_stats=True, **OPTIONS,
        )  # fmt: skip
        results.append((loss.detach(), tuple(stats), torch.autograd.grad((3 * loss).sum(), (hidden, weight, bias))))
    torch.testing.assert_close(results[1], results[0])


def test_bf16_gradients_add_up_in_fp32_over_the_chunks():
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(256, 24, generator=g).bfloat16().requires_grad_()
    weight = torch.randn(61, 24, generator=g).bfloat16().requires_grad_()
    labels = torch.randint(0, 61, (256,), generator=g)
    exact_weight = weight.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(F.cross_entropy(hidden.detach().double() @ exact_weight.T, labels), exact_weight)
    for num_chunks in (1, 64):
        loss = linear_cross_entropy(hidden, weight, labels, num_chunks=num_chunks, recompute=True)
        (got,) = torch.autograd.grad(loss, weight)
        rounded = float((exact.bfloat16().double() - exact).norm())
        assert float((got.double() - exact).norm()) == pytest.approx(rounded, rel=0.05)


@pytest.mark.parametrize("tokens", [0, 4])
def test_nothing_to_count_is_zero_with_a_graph(tokens):
    hidden, weight = torch.randn(tokens, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.full((tokens,), -100), recompute=True)
    assert loss == 0
    loss.backward()
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


def test_there_is_no_core_to_compile():
    with pytest.raises(ValueError, match="recompute = True: it has no core"):
        compiled(ChunkedCLMCrossEntropyLoss(recompute=True))

"""The three products in low precision, in each of the ways that a device may have for them."""

import pytest
import torch
import torch.nn.functional as F

from chunked_loss import _chunk, linear_cross_entropy

T, D, V = 256, 24, 61


@pytest.fixture(params=[False, True], ids=["without instructions", "with instructions"])
def has_instructions(request, monkeypatch):
    """Whether the CPU is taken to multiply in bf16; torch can either way, only slowly."""
    monkeypatch.setattr(_chunk, "_cpu_multiplies_bf16", lambda: request.param)
    return request.param


def problem(dtype):
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(T, D, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (T,), generator=g)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    loss = F.cross_entropy(exact[0] @ exact[1].T, labels)
    return hidden, weight, labels, loss.detach(), torch.autograd.grad(loss, exact)


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("tile_rows", [8192, 16])
def test_the_error_of_bf16_does_not_grow_with_the_chunks(has_instructions, tile_rows, monkeypatch):
    monkeypatch.setattr(_chunk, "_TILE_ROWS", tile_rows)
    hidden, weight, labels, exact, exact_grads = problem(torch.bfloat16)
    rounding = [error(gradient.bfloat16(), gradient) for gradient in exact_grads]
    errors = {}
    for num_chunks in (1, 16, 64, 256):
        loss = linear_cross_entropy(hidden, weight, labels, num_chunks=num_chunks)
        assert abs(loss.double() - exact) <= 1e-5 * exact
        got = torch.autograd.grad(loss, (hidden, weight))
        assert [gradient.dtype for gradient in got] == [torch.bfloat16] * 2
        errors[num_chunks] = [error(*pair) for pair in zip(got, exact_grads, strict=True)]
    for of_hidden, of_weight in errors.values():
        # the one rounding of the result; in native products that of what they multiply as well
        assert of_hidden <= (1.5 if has_instructions else 1.01) * rounding[0]
        assert of_weight <= 1.01 * rounding[1]


# what is tested is torch's attribute, which 2.11 may lack; the pinned torch has it, so CI skips nothing here
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch without grad_dtype")
def test_a_weight_that_asks_for_an_fp32_gradient_gets_it_unrounded(has_instructions):
    hidden, weight, labels, _, (_, exact) = problem(torch.bfloat16)
    weight.grad_dtype = torch.float32
    linear_cross_entropy(hidden, weight, labels, num_chunks=16).backward()
    assert weight.grad.dtype == torch.float32
    assert error(weight.grad, exact) <= 1e-6


def test_which_products_are_taken(has_instructions):
    bf16, fp16, fp32 = (torch.ones(2, 2, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32))
    assert _chunk.products_for(bf16, bf16, torch.float32).native_d_rows == has_instructions
    for operands in ((fp32, fp32, torch.float32), (bf16, fp32, torch.float32), (bf16, bf16, torch.float64)):
        assert _chunk.products_for(*operands) == _chunk.Products()
    assert not _chunk.products_for(fp16, fp16, torch.float32).native_d_rows


def test_small_gradients_of_fp16_do_not_underflow():
    hidden, weight, labels, _, exact_grads = problem(torch.float16)
    # what a loss scaler does: tiny gradients of the logits inside, and back in range outside
    loss = linear_cross_entropy(hidden, weight, labels, denominator=1e7, chunk_tokens=32)
    got = torch.autograd.grad(loss * 1e7 / T, (hidden, weight))
    for mine, want in zip(got, exact_grads, strict=True):
        assert error(mine, want) <= 1e-3


def test_fp64_accumulation_of_fp32_inputs():
    hidden, weight, labels, exact, exact_grads = problem(torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels, accumulate_dtype=torch.float64, chunk_tokens=7)
    assert loss.dtype == torch.float64
    assert abs(loss - exact) <= 1e-12
    got = torch.autograd.grad(loss, (hidden, weight))
    for mine, want in zip(got, exact_grads, strict=True):
        assert mine.dtype == torch.float32
        assert error(mine, want) <= 1e-7

"""Plain tensors in one process: torch.nn.utils is the reference, bit for bit."""

import inspect
import math

import pytest
import torch
from torch import nn

import grad_clip_multimesh
from grad_clip_multimesh import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

SHAPES = [(5, 7), (3,), (1, 2, 9), (64,), (129,)]


def _parameters(dtype=torch.float32, without_gradient=()):
    generator = torch.Generator().manual_seed(4)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for index, parameter in enumerate(parameters):
        if index not in without_gradient:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return parameters


@pytest.mark.parametrize("norm_type", [0.5, 1, 2, 3, math.inf, "inf"])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("without_gradient", [(), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bit_identical_to_torch(norm_type, foreach, without_gradient, dtype):
    ours, theirs = (_parameters(dtype, without_gradient) for _ in range(2))
    norm = clip_grad_norm_(ours, 0.7, norm_type, foreach=foreach)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.7, float(norm_type), foreach=foreach)
    assert norm.dtype == dtype
    assert torch.equal(norm, expected)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_bf16_gradients_have_an_fp32_norm():
    parameters = _parameters(torch.bfloat16)
    expected = math.sqrt(sum((p.grad.double() ** 2).sum().item() for p in parameters))
    norm = clip_grad_norm_(parameters, 0.5)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    clipped = math.sqrt(sum((p.grad.double() ** 2).sum().item() for p in parameters))
    assert clipped == pytest.approx(0.5, rel=1e-2)
    ones = nn.Parameter(torch.zeros(300_000, dtype=torch.bfloat16))
    ones.grad = torch.ones_like(ones)
    assert get_total_norm(ones.grad).item() == pytest.approx(math.sqrt(300_000), rel=1e-6)


def test_mixed_dtypes_count_together():
    low, high = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(9))
    low.grad, high.grad = torch.full_like(low, 2.0), torch.ones_like(high)
    assert clip_grad_norm_([low, high], 1.0).item() == 5.0
    assert torch.allclose(high.grad, torch.full((9,), 0.2), rtol=1e-5)


def test_what_may_be_passed():
    (single, *_) = _parameters()
    expected = torch.linalg.vector_norm(single.grad)
    assert torch.equal(clip_grad_norm_(single, math.inf), expected)
    assert torch.equal(clip_grad_norm_((p for p in [single]), math.inf), expected)
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_([nn.Parameter(torch.zeros(3))], 1.0).item() == 0.0
    assert get_total_norm([]).item() == 0.0
    empty = nn.Parameter(torch.zeros(0, 3))
    empty.grad = torch.zeros(0, 3)
    for norm_type in (0.5, 2, math.inf):
        assert get_total_norm([empty.grad, torch.ones(1)], norm_type).item() == 1.0


def test_nothing_is_scaled_without_a_limit_nor_below_it():
    for max_norm in (None, 1e6):
        parameters, untouched = _parameters(), _parameters()
        parameters[0].grad[0, 0] = untouched[0].grad[0, 0] = 3.0
        assert clip_grad_norm_(parameters, max_norm).item() > 0
        assert all(torch.equal(one.grad, other.grad) for one, other in zip(parameters, untouched, strict=True))
    parameters[0].grad[0, 0] = math.nan
    assert clip_grad_norm_(parameters, None).isnan()
    assert parameters[1].grad.isfinite().all()


def test_a_norm_that_is_given():
    parameters = _parameters()
    before = [parameter.grad.clone() for parameter in parameters]
    clip_grads_with_norm_(parameters, 1.0, torch.tensor(4.0))
    for parameter, gradient in zip(parameters, before, strict=True):
        assert torch.allclose(parameter.grad, gradient / 4, rtol=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_nonfinite(value, norm_type):
    parameters = _parameters()
    parameters[1].grad[0] = value
    before = parameters[0].grad.clone()
    with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
        clip_grad_norm_(parameters, 1.0, norm_type, error_if_nonfinite=True)
    assert torch.equal(parameters[0].grad, before), "scaled before the error"
    assert not clip_grad_norm_(parameters, 1.0, norm_type).isfinite()


@pytest.mark.parametrize("norm_type", [0, -1, math.nan])
def test_p_is_above_zero(norm_type):
    with pytest.raises(ValueError, match="norm_type"):
        get_total_norm([torch.ones(2)], norm_type)


@pytest.mark.parametrize("name", ["clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_"])
def test_the_signature_begins_with_that_of_torch(name):
    ours = inspect.signature(getattr(grad_clip_multimesh, name)).parameters.values()
    theirs = inspect.signature(getattr(torch.nn.utils, name)).parameters.values()
    added = list(ours)[len(theirs) :]
    assert [(p.name, p.kind, p.default) for p in ours if p not in added] == [
        (p.name, p.kind, p.default) for p in theirs
    ]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in added)


def _no_gradients(parameters):
    for parameter in parameters:
        parameter.grad = None
    return parameters


@pytest.mark.parametrize(
    "make",
    [
        list,
        lambda: _no_gradients(_parameters()),
        lambda: _parameters()[0],
        lambda: (parameter for parameter in _parameters()),
        lambda: dict(enumerate(_parameters())).values(),
        lambda: set(_parameters()[:1]),
    ],
)
def test_every_form_of_parameters_gives_what_torch_gives(make):
    norm, expected = clip_grad_norm_(make(), 0.7), torch.nn.utils.clip_grad_norm_(make(), 0.7)
    assert (norm.shape, norm.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(norm, expected)


def test_a_used_up_generator_is_warned_of_as_torch_does():
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        with pytest.warns(UserWarning, match="empty generator") as caught:
            assert clip((p for p in []), 1.0).item() == 0.0
        assert caught[0].filename == __file__


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("max_norm", [0.0, 0.3, 1e9, math.inf])
@pytest.mark.parametrize("total", [0.0, 2.5, math.inf, math.nan])
def test_scaling_by_a_given_norm_is_that_of_torch(foreach, max_norm, total):
    ours, theirs = _parameters(without_gradient=(1,)), _parameters(without_gradient=(1,))
    clip_grads_with_norm_(ours, max_norm, torch.tensor(total), foreach)
    torch.nn.utils.clip_grads_with_norm_(theirs, max_norm, torch.tensor(total), foreach)
    for one, other in zip(ours, theirs, strict=True):
        if other.grad is not None:
            assert torch.allclose(one.grad, other.grad, rtol=0, atol=0, equal_nan=True)


def test_complex_and_half_precision_gradients():
    for dtype, norm_dtype in [(torch.complex64, torch.float32), (torch.complex128, torch.float64)]:
        gradient = torch.tensor([3 + 4j, 12j], dtype=dtype)
        norm = get_total_norm([gradient])
        assert (norm.item(), norm.dtype) == (13.0, norm_dtype)
    norm = get_total_norm(torch.full((9,), 4e4, dtype=torch.float16))  # beyond what fp16 can hold
    assert (norm.item(), norm.dtype) == (1.2e5, torch.float32)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_a_limit_that_would_turn_gradients_is_refused(max_norm):
    parameters = _parameters()
    before = parameters[0].grad.clone()
    for call in (
        lambda: clip_grad_norm_(parameters, max_norm),
        lambda: clip_grads_with_norm_(parameters, max_norm, torch.tensor(1.0)),
    ):
        with pytest.raises(ValueError, match=r"max_norm = .*must be at least 0"):
            call()
    assert torch.equal(parameters[0].grad, before)


def test_local_to_names_tensors_that_are_given():
    parameters = _parameters()
    mesh = object()  # not looked at before the keys are
    with pytest.raises(ValueError, match=r"shape \[3\] that is not among those"):
        clip_grad_norm_(parameters[2:], 1.0, local_to={parameters[1]: mesh})
    with pytest.raises(ValueError, match="for `get_total_norm` the gradients"):
        get_total_norm([p.grad for p in parameters], local_to={parameters[1]: mesh})

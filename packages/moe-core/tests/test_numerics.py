"""What a row comes to does not depend on the rows beside it, nor on how many threads share the work."""

import pytest
import torch
import torch.nn.functional as F

from moe_core import GroupedExperts
from moe_core._numerics import elementwise

FUNCTIONS = [F.silu, F.gelu, torch.sigmoid, torch.tanh]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def forward_and_backward(function, rows, grad):
    rows = rows.detach().clone().requires_grad_()
    out = elementwise(function, rows)
    out.backward(grad)
    return out.detach(), rows.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [48, 64, 130])
def test_elementwise_functions_on_any_number_of_threads(threads, dtype, width):
    """Torch gives each thread a part of the elements, which may end within a vector."""
    torch.manual_seed(0)
    rows, grad = torch.randn(2, 1100, width).to(dtype)
    for function in FUNCTIONS:
        threads(1)
        alone = [forward_and_backward(function, rows[i : i + 11], grad[i : i + 11]) for i in range(0, 1100, 11)]
        expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
        for number in (2, 3, 5, 8):
            threads(number)
            for one, other in zip(expected, forward_and_backward(function, rows, grad), strict=True):
                assert torch.equal(one, other), (function, number)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "sigmoid", "tanh"])
def test_a_gated_token_alone_at_its_expert(activation):
    """The gate is a part of wider rows, and of one row alone a matrix like any other."""
    torch.manual_seed(0)
    experts = GroupedExperts(2, 16, 64, activation=activation, gated=True)
    hidden, weights = torch.randn(2, 16), torch.ones(2, 1)
    ids = torch.tensor([[0], [1]])
    both = experts(hidden, ids, weights)
    for token in range(2):
        alone = slice(token, token + 1)
        assert torch.equal(experts(hidden[alone], ids[alone], weights[alone]), both[alone])

"""Large results of the CPU lie in memory of their own, and are tensors like any other."""

import gc
import resource
from pathlib import Path

import pytest
import torch

from moe_core import GroupedExperts, _large_pages

_LARGE = (65, 512, 512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_an_ordinary_tensor_that_outlives_its_maker(dtype):
    like = torch.empty(0, dtype=dtype)
    made = _large_pages.new_empty(like, _LARGE)
    gc.collect()
    expected = torch.randn(_LARGE).to(dtype)
    made.copy_(expected)
    assert torch.equal(made, expected)
    assert (made.dtype, made.shape, made.is_contiguous(), made.requires_grad) == (dtype, _LARGE, True, False)
    made.add_(1).mul_(2)
    assert torch.equal(made, (expected + 1) * 2)


def test_small_ones_and_those_of_other_devices_are_torch_s_own():
    assert _large_pages.new_empty(torch.empty(0), (0, 4)).shape == (0, 4)
    assert _large_pages.new_empty(torch.empty(0), (3, 4)).untyped_storage().resizable()
    assert _large_pages.new_empty(torch.empty(0, device="meta"), _LARGE).is_meta


def test_its_first_touch_takes_a_fault_a_large_page():
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    large = enabled.exists() and "[never]" not in enabled.read_text()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _large_pages.new_empty(torch.empty(0), (64, 512, 512)).fill_(1)  # 64 MiB: 16384 small pages, 32 large ones
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    # the system may be short of large pages, and without them the memory is as good as any
    assert faults < (8000 if large else 20000)


@pytest.mark.parametrize("grouped_gemm", ["grouped_mm", "loop"])
def test_gradients_of_large_stacks_accumulate_and_can_be_stepped(grouped_gemm):
    torch.manual_seed(0)
    experts = GroupedExperts(33, 512, 512, grouped_gemm=grouped_gemm)
    hidden, ids = torch.randn(10, 512), torch.randint(32, (10, 2))  # the last expert has no rows
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1, momentum=0.9)
    weights = {name: weight.detach().double().clone() for name, weight in experts.named_parameters()}
    for _ in range(2):
        experts(hidden, ids, torch.ones(10, 2)).sum().backward()

    up, down = (weights[name].requires_grad_() for name in ("up_proj", "down_proj"))
    for _ in range(2):
        inner = torch.einsum("td,tkfd->tkf", hidden.double(), up[ids]).relu().square()
        torch.einsum("tkf,tkdf->td", inner, down[ids]).sum().backward()
    for weight, right in ((experts.up_proj, up), (experts.down_proj, down)):
        assert not weight.grad.untyped_storage().resizable(), "not in large pages"
        assert (weight.grad.double() - right.grad).norm() < 1e-6 * right.grad.norm()
        assert not weight.grad[-1].any()
    before = experts.up_proj.detach().clone()
    optimizer.step()
    moved = before - experts.up_proj
    assert (moved - 0.1 * experts.up_proj.grad).norm() < 1e-5 * moved.norm()

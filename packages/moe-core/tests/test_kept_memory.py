"""Large results of the CPU lie in memory that is used again, and are tensors like any other."""

import gc
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from moe_core import GroupedExperts, _kept_memory

_LARGE = (65, 512, 512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_an_ordinary_tensor_that_outlives_its_maker(dtype):
    like = torch.empty(0, dtype=dtype)
    made = _kept_memory.new_empty(like, _LARGE)
    gc.collect()
    expected = torch.randn(_LARGE).to(dtype)
    made.copy_(expected)
    assert torch.equal(made, expected)
    assert (made.dtype, made.shape, made.is_contiguous(), made.requires_grad) == (dtype, _LARGE, True, False)
    made.add_(1).mul_(2)
    assert torch.equal(made, (expected + 1) * 2)


def test_small_ones_and_those_of_other_devices_are_torch_s_own():
    assert _kept_memory.new_empty(torch.empty(0), (0, 4)).shape == (0, 4)
    assert _kept_memory.new_empty(torch.empty(0), (3, 4)).untyped_storage().resizable()
    assert _kept_memory.new_empty(torch.empty(0, device="meta"), _LARGE).is_meta


def test_a_block_is_used_again_once_nothing_reads_it_and_then_takes_no_page_fault():
    first = _kept_memory.new_empty(torch.empty(0), _LARGE).fill_(1)
    address, part = first.data_ptr(), first[3:, 1]
    del first
    beside = _kept_memory.new_empty(torch.empty(0), _LARGE).fill_(2)
    assert beside.data_ptr() != address
    assert part.eq(1).all(), "another tensor was given memory that a view still reads"

    del part
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    again = _kept_memory.new_empty(torch.empty(0), _LARGE).fill_(3)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert again.data_ptr() == address
    assert faults < 1000, "16640 pages of 4 KiB"
    assert beside.eq(2).all()


def test_a_block_of_another_size_is_not_taken():
    first = _kept_memory.new_empty(torch.empty(0), (66, 512, 512)).fill_(1)
    address = first.data_ptr()
    del first
    assert _kept_memory.new_empty(torch.empty(0), (67, 512, 512)).data_ptr() != address
    assert _kept_memory.new_empty(torch.empty(0, dtype=torch.bfloat16), (132, 512, 512)).data_ptr() == address


def test_the_system_may_take_the_pages_of_a_block_that_waits():
    size = (97, 512, 512)
    first = _kept_memory.new_empty(torch.empty(0), size).fill_(1)
    address = first.data_ptr()
    before = _lazily_free(address)
    del first
    assert _lazily_free(address) - before > 0.9 * 97 * 1024  # KiB


def _lazily_free(address: int) -> int:
    """KiB that the system may take of the mapping at the address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            inside = start <= address < end
        elif inside and line.startswith("LazyFree:"):
            return int(line.split()[1])
    raise AssertionError("no such mapping")


_UNDER_A_LIMIT = """
import resource, torch
from moe_core._kept_memory import new_empty

def mebibytes(count):
    return new_empty(torch.empty(0), (count << 18,)).fill_(1)

def used():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) >> 10

torch.ones(1 << 20).sum()
at_start = used()
resource.setrlimit(resource.RLIMIT_AS, (at_start + 400 << 20,) * 2)
"""


@pytest.mark.parametrize(
    "work",
    [
        # one at a time, of 40 sizes
        """for size in range(40, 80):
    mebibytes(size)
    assert used() - at_start < 160, used()""",
        # 240 wait and 150 are taken, so that 50 take the place of those that wait
        """three = [mebibytes(100) for _ in range(3)]
del three
mebibytes(40)
other = torch.ones(150 << 18)
assert used() - at_start > 350, used()
mebibytes(50)""",
    ],
)
def test_what_waits_leaves_room_for_what_is_asked_for(work):
    run = [sys.executable, "-c", _UNDER_A_LIMIT + work]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


def test_threads_never_share_a_block():
    """Each writes its own number and reads it back, while others free and take blocks of the same size."""

    def work(number: int) -> bool:
        right = True
        for _ in range(6):
            mine = _kept_memory.new_empty(torch.empty(0), _LARGE).fill_(number)
            right &= bool(mine.eq(number).all())
            del mine
        return right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


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
        assert not weight.grad.untyped_storage().resizable(), "not in memory that is kept"
        assert (weight.grad.double() - right.grad).norm() < 1e-6 * right.grad.norm()
        assert not weight.grad[-1].any()
    before = experts.up_proj.detach().clone()
    optimizer.step()
    moved = before - experts.up_proj
    assert (moved - 0.1 * experts.up_proj.grad).norm() < 1e-5 * moved.norm()

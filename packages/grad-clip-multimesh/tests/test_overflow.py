"""Finite gradients whose powers overflow: the norm is finite all the same, wherever it fits. Reference: math.fsum."""

import math
from unittest import mock

import pytest
import torch
from torch import nn

from grad_clip_multimesh import _clip, clip_grad_norm_, get_total_norm
from moe_core.testing import count_host_syncs, run_ranks

LARGEST = torch.finfo(torch.float32).max


def reference(numbers, norm_type):
    largest = max(map(abs, numbers))
    if norm_type == math.inf or largest == 0:
        return largest
    return largest * math.fsum((abs(x) / largest) ** norm_type for x in numbers) ** (1 / norm_type)


def _by_way_of(way):
    """Of a "host" that looks at norms on its way, or of a "device", whose arithmetic is the same on the CPU."""
    return mock.patch.object(_clip, "_is_on_host", return_value=way == "host")


ONE_PROCESS = {
    "in one tensor": [[1e30] * 4, [3.0, -4.0], [1e-30]],
    "in one tensor of several": [[1e20, -3e30, 7e29, 0.0], [2e30], [-1e30] * 5, [1.0] * 9],
    "in the combination alone": [[6e18] * 5, [-5e18], *([[7e18, 1e18]] * 30)],
    "near the largest number": [[LARGEST / 3, LARGEST / 4], [LARGEST / 5]],
    "an empty one": [[], [1e30, 2e30], [0.0, 0.0]],
}


@pytest.mark.parametrize("way", ["host", "device"])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1.5, 2.0, 3.0, 6.5, 20.0, 300.0, math.inf])
@pytest.mark.parametrize("dtypes", [("float32",), ("bfloat16",), ("float32", "bfloat16"), ("float32", "float64")])
def test_the_norm_is_finite_and_clipping_scales(way, foreach, norm_type, dtypes):
    for values in ONE_PROCESS.values():
        parameters = []
        for index, numbers in enumerate(values):
            gradient = torch.tensor(numbers, dtype=getattr(torch, dtypes[index % len(dtypes)]))
            parameters.append(nn.Parameter(torch.zeros_like(gradient)))
            parameters[-1].grad = gradient
        everything = [x for parameter in parameters for x in parameter.grad.tolist()]
        expected = reference(everything, norm_type)
        with _by_way_of(way), count_host_syncs() as syncs:
            norm = clip_grad_norm_(parameters, 2.0, norm_type, foreach=foreach)
        assert norm.item() == pytest.approx(expected, rel=3e-6)
        assert syncs.total == 0 or way == "host"
        for parameter, numbers in zip(
            parameters, torch.tensor(everything).split([len(v) for v in values]), strict=True
        ):
            wanted = [x * 2.0 / expected for x in numbers.tolist()]
            tolerance = 1e-2 if parameter.dtype == torch.bfloat16 else 1e-5
            assert parameter.grad.tolist() == pytest.approx(wanted, rel=tolerance, abs=1e-30)


@pytest.mark.parametrize("norm_type", [8.0, 20.0])
def test_half_precision_and_complex_gradients(norm_type):
    half = torch.tensor([65504.0, -5e4, 1.0], dtype=torch.float16)
    assert get_total_norm(half, norm_type).item() == pytest.approx(reference(half.tolist(), norm_type), rel=3e-6)
    for dtype, size in ((torch.complex64, 1e30), (torch.complex128, 1e200)):
        numbers = torch.tensor([3 + 4j, 12j, -1.0], dtype=dtype) * size
        assert get_total_norm(numbers, norm_type).item() == pytest.approx(
            reference(numbers.abs().tolist(), norm_type), rel=3e-6
        )
    assert get_total_norm(torch.full((4,), 1e200, dtype=torch.float64)).item() == pytest.approx(2e200)


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0])
def test_a_norm_above_the_largest_number_is_infinite_and_clips_to_zero(norm_type):
    parameter = nn.Parameter(torch.zeros(8))
    parameter.grad = torch.full((8,), LARGEST * 0.9)
    with pytest.raises(RuntimeError, match="inf"):
        clip_grad_norm_(parameter, 1.0, norm_type, error_if_nonfinite=True)
    assert clip_grad_norm_(parameter, 1.0, norm_type).item() == math.inf
    assert parameter.grad.tolist() == [0.0] * 8


@pytest.mark.parametrize("way", ["host", "device"])
@pytest.mark.parametrize("foreach", [None, False])
def test_where_torch_is_finite_the_bits_are_its_own(way, foreach):
    """Just below the overflow, and in the underflow, where torch says 0."""
    for size in (1e-30, 1e-22, 1e17, 3e17):
        generator = torch.Generator().manual_seed(3)
        for norm_type in (0.5, 1.0, 2.0, 3.0):
            gradients = [torch.randn(n, generator=generator) * size for n in (5, 64, 129)]
            expected = torch.nn.utils.get_total_norm(gradients, norm_type, foreach=foreach)
            with _by_way_of(way):
                norm = get_total_norm(gradients, norm_type, foreach=foreach)
            assert torch.equal(norm, expected) or expected.isinf()
    assert get_total_norm(torch.full((4,), 1e-30)).item() == 0.0


HUGE, LARGE = 1e30, 1.2e19  # one of the first overflows as a square; of the second 2 do, on different ranks


def _over_ranks(norm_types, way):
    """{(layout, norm type): (norm, the numbers, the clipped ones, collectives, host syncs)}"""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from moe_core.testing import count_collectives

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard_mod_ep", "ep"))
    flat = grid["dp_shard_mod_ep", "ep"]._flatten("dp_shard")
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "shard"))
    three = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("pp", "stage_shard"))
    rank = dist.get_rank()

    def make(numbers, mesh=None, placements=None):
        gradient = torch.tensor(numbers)[:, None]
        if mesh is not None:
            gradient = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        return parameter

    def local(number):
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.tensor([number])
        return parameter

    shard = [Shard(0)]
    layouts = {
        "one rank overflows": [([HUGE, 1.0, 2.0, 3.0], flat, shard), ([1.0] * 4, flat, shard)],
        "each rank overflows": [([HUGE * k for k in (1, 2, 3, 4)] * 2, flat, shard)],
        "over the ranks alone": [([LARGE] * 4, flat, shard)],
        "over two meshes alone": [([1e19] * 3, flat, shard), ([1e19] * 2, grid["ep"], shard)],
        "an empty shard": [([HUGE, 2 * HUGE], flat, shard), ([5.0] * 5, flat, shard)],
        "HSDP": [([LARGE, LARGE, 3.0], other, [Replicate(), Shard(0)]), ([HUGE] * 2, flat, shard)],
        "one axis after the other": [([HUGE, 1.0, LARGE, 2.0, -HUGE], other, [Shard(0), Shard(0)])],
        "plain and two meshes": [([HUGE, 1.0],), ([LARGE] * 4, flat, shard), ([2.0, 3e30], grid["ep"], shard)],
        "ordinary": [([3.0, 4.0, 5.0, 6.0], flat, shard), ([1.0] * 5, flat, shard)],
    }
    found = {}
    for norm_type in norm_types:
        for name, made in layouts.items():
            parameters = [make(*arguments) for arguments in made]
            numbers = [x for arguments in made for x in arguments[0]]
            with _by_way_of(way), count_collectives() as collectives, count_host_syncs() as syncs:
                norm = clip_grad_norm_(parameters, 2.0, norm_type)
            clipped = []
            for parameter in parameters:
                gradient = parameter.grad
                clipped += (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).flatten().tolist()
            found[name, norm_type] = (norm.item(), numbers, clipped, dict(collectives.calls), syncs.total)
        # experts that differ from rank to rank, and stages of a pipeline
        mine = [HUGE, LARGE, 1.0, 7.0]
        parameter = local(mine[rank])
        norm = clip_grad_norm_(parameter, 2.0, norm_type, local_to={parameter: flat})
        found["local_to", norm_type] = (norm.item(), mine, None, None, None)
        stage = [HUGE, 3.0] if rank < 2 else [LARGE, LARGE, 2.0]
        norm = clip_grad_norm_(
            make(stage, three["stage_shard"], shard), None, norm_type, pipeline_group=three.get_group("pp")
        )
        found["pipeline", norm_type] = (norm.item(), [HUGE, 3.0, LARGE, LARGE, 2.0], None, None, None)
    return found


@pytest.mark.parametrize("way", ["host", "device"])
def test_over_ranks(way):
    norm_types = (1.5, 2.0, 3.0, 20.0, math.inf)
    by_rank = run_ranks(_over_ranks, 4, norm_types, way, timeout=60)
    for results in by_rank:
        for (name, norm_type), (norm, numbers, clipped, collectives, syncs) in results.items():
            expected = reference(numbers, norm_type)
            assert norm == pytest.approx(expected, rel=3e-6), (name, norm_type)
            assert norm == by_rank[0][name, norm_type][0], "ranks differ"
            if clipped is not None:
                assert clipped == pytest.approx([x * 2.0 / expected for x in numbers], rel=1e-5, abs=1e-30)
                assert set(collectives) <= {"allreduce"}
                several = ("over two meshes alone", "HSDP", "plain and two meshes", "one axis after the other")
                assert collectives["allreduce"] == (2 if name in several else 1)
                assert syncs == 0 or (way == "host" and norm_type != math.inf)


def _not_finite(cases, way):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    found = []
    for values, norm_type in cases:
        row = torch.tensor([[1e30, values[dist.get_rank()]]])
        parameter = nn.Parameter(DTensor.from_local(torch.zeros_like(row), mesh, [Shard(0)], run_check=False))
        parameter.grad = DTensor.from_local(row, mesh, [Shard(0)], run_check=False)
        with _by_way_of(way):
            try:
                clip_grad_norm_(parameter, 1.0, norm_type, error_if_nonfinite=True)
                raised = False
            except RuntimeError:
                raised = True
            found.append((get_total_norm(parameter.grad, norm_type).item(), raised))
    return found


@pytest.mark.parametrize("way", ["host", "device"])
def test_an_infinite_or_undefined_gradient_still_shows_on_all_ranks(way):
    cases = [
        ((bad, *[1.0] * 2), norm_type) for bad in (math.inf, -math.inf, math.nan) for norm_type in (1.0, 2.0, 20.0)
    ]
    cases += [((1.0, math.inf, math.nan), 2.0), ((LARGEST, 0.9 * LARGEST, 0.9 * LARGEST), 2.0)]
    wanted = [math.nan if math.nan in values else math.inf for values, _ in cases]
    for results in run_ranks(_not_finite, 3, cases, way, timeout=30):
        assert [norm for norm, _ in results] == pytest.approx(wanted, nan_ok=True)
        assert all(raised for _, raised in results)

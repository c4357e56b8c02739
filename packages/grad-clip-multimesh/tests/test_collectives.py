"""What a call costs in communication, and that no rank waits for another."""

import math

import pytest

from moe_core.testing import run_ranks


def _parameter(gradient):
    import torch
    from torch import nn

    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def _counted(call):
    """(result, {kind: number of collectives}, host syncs, groups created), with tensors taken for those of a device."""
    from unittest import mock

    from torch.distributed import distributed_c10d

    from grad_clip_multimesh import _clip
    from moe_core.testing import count_collectives, count_host_syncs

    before = distributed_c10d._world.group_count
    as_on_a_device = mock.patch.object(_clip, "_is_on_host", return_value=False)
    with as_on_a_device, count_collectives() as collectives, count_host_syncs() as syncs:
        result = call()
    kinds = {kind: n for kind, n in collectives.calls.items() if kind != "wrap_tensor_autograd"}  # moves no data
    return result, kinds, dict(syncs.calls), distributed_c10d._world.group_count - before


def _first_call(norm_type):
    """Three meshes with the same four ranks under four names, and two halves; meshes that nobody has used before."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from grad_clip_multimesh import clip_grad_norm_

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard_mod_ep", "ep"))
    flat = grid["dp_shard_mod_ep", "ep"]._flatten("dp_shard")
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",))
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    row = torch.full((1, 2), dist.get_rank() + 1.0)
    parameters = [
        _parameter(DTensor.from_local(row.clone(), mesh, placements, run_check=False))
        for mesh, placements in [
            (grid, [Shard(0), Shard(0)]),
            (flat, [Shard(0)]),
            (other, [Shard(0)]),
            (halves, [Shard(0), Shard(1)]),
            (grid, [Replicate(), Shard(0)]),  # each pair of neighbours holds the whole
            (halves, [Replicate(), Shard(0)]),
        ]
    ]
    norm, *cost = _counted(lambda: clip_grad_norm_(parameters, None, norm_type))
    return norm.item(), cost, dist.get_rank()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_one_all_reduce_for_each_distinct_group_from_the_first_call_on(norm_type):
    for norm, cost, rank in run_ranks(_first_call, 4, norm_type, timeout=30):
        all_four = 2 * (1 + 4 + 9 + 16)
        pair = 2 * (1 + 4) if rank < 2 else 2 * (9 + 16)
        assert norm == pytest.approx(4.0 if norm_type == math.inf else math.sqrt(4 * all_four + 2 * pair))
        assert cost == [{"allreduce": 2}, {}, 0]


def _partial(dtype_name):
    """A Partial gradient of each kind of parameter; the whole is 3 in every element of the first, and so on."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    from grad_clip_multimesh import clip_grad_norm_, get_total_norm

    dtype = getattr(torch, dtype_name)
    pair = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))

    def partial():
        mine = torch.full((4, 2), dist.get_rank() + 1.0, dtype=dtype)
        return DTensor.from_local(mine, pair, [Partial()], run_check=False)

    like = {}
    for placement in (Replicate(), Shard(0)):
        parameter = nn.Parameter(torch.zeros_like(partial().redistribute(placements=[placement])))
        parameter.grad = partial()
        like[type(placement).__name__] = parameter
    results = {name: _counted(lambda p=p: clip_grad_norm_(p, 1.0)) for name, p in like.items()}
    itself = partial()
    results["itself"] = _counted(lambda: get_total_norm(itself))
    whole = [parameter.grad.full_tensor() for parameter in like.values()]
    return {name: (norm.item(), cost) for name, (norm, cost, _, _) in results.items()}, whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_partial_gradient_is_reduced_first_and_counted_apart(dtype):
    for results, whole in run_ranks(_partial, 2, dtype, timeout=30):
        assert results == {
            "Replicate": (pytest.approx(math.sqrt(8 * 9)), {"all_reduce": 1}),
            "Shard": (pytest.approx(math.sqrt(8 * 9)), {"reduce_scatter_tensor": 1, "allreduce": 1}),
            "itself": (pytest.approx(math.sqrt(8 * 9)), {"all_reduce": 1}),
        }
        for gradient in whole:
            assert gradient.float().norm().item() == pytest.approx(1.0, rel=1e-2)


def _without_each_other(norm_type):
    """Rank r lacks every gradient but the r-th, on groups that overlap: what is reduced cannot follow gradients."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from grad_clip_multimesh import clip_grad_norm_

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard_mod_ep", "ep"))
    flat = grid["dp_shard_mod_ep", "ep"]._flatten("dp_shard")
    meshes = [grid["ep"], flat, grid["dp_shard_mod_ep"], flat]
    parameters = []
    for index, mesh in enumerate(meshes):
        parameters.append(_parameter(DTensor.from_local(torch.full((1, 4), 1.0), mesh, [Shard(0)], run_check=False)))
        if index != dist.get_rank():
            parameters[-1].grad = None
    norm = clip_grad_norm_(parameters, 1.0, norm_type)
    return norm.item(), [None if p.grad is None else p.grad.to_local()[0, 0].item() for p in parameters]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_ranks_with_other_gradients_reduce_in_the_same_order(norm_type):
    results = run_ranks(_without_each_other, 4, norm_type, timeout=30)
    for rank, (norm, gradients) in enumerate(results):
        # 0 and 1 share the first mesh, 0 and 2 the third; ranks 1 and 3 have a part of the two on all four
        parts = 2 + (rank < 2) + (rank in (0, 2))
        assert norm == pytest.approx({1.0: 4 * parts, 2.0: math.sqrt(4 * parts), math.inf: 1.0}[norm_type])
        assert [index for index, value in enumerate(gradients) if value is not None] == [rank]
        assert gradients[rank] == pytest.approx(1 / norm, rel=1e-5)


def _pipeline(norm_type):
    """Stages of 2 ranks; each shards its own layers, and the last has none."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from grad_clip_multimesh import clip_grad_norm_

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    stage, place = grid.get_coordinate()
    layers = [
        _parameter(DTensor.from_local(torch.full((1, 2), place + 1.0), grid["dp_shard"], [Shard(0)], run_check=False))
        for _ in range(3 * (1 - stage))
    ]
    group = grid.get_group("pp")
    norm, *cost = _counted(lambda: clip_grad_norm_((p for p in layers), 1.0, norm_type, pipeline_group=group))
    bad = [layer for layer in layers if dist.get_rank() == 1]
    for layer in bad:
        layer.grad.to_local()[0, 0] = math.nan
    try:
        clip_grad_norm_(layers, 1.0, norm_type, error_if_nonfinite=True, pipeline_group=group)
    except RuntimeError as error:
        return norm.item(), cost, "nan" in str(error)
    return norm.item(), cost, False


@pytest.mark.parametrize("norm_type", [0.5, 2.0, math.inf])
def test_stages_of_a_pipeline_get_one_norm(norm_type):
    results = run_ranks(_pipeline, 4, norm_type, timeout=30)
    powers = 3 * (2 * 1 + 2 * 2**norm_type)
    expected = 2.0 if norm_type == math.inf else powers ** (1 / norm_type)
    for rank, (norm, cost, raised) in enumerate(results):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert norm == results[0][0], "ranks differ"
        assert cost == [{"allreduce": 2 if rank < 2 else 1}, {}, 0]
        assert raised

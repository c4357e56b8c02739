"""Gradients on several meshes at once; the reference gathers every one and takes one float64 norm."""

import math

import pytest

from moe_core.testing import run_ranks

NORM_TYPES = (0.5, 1.0, 2.0, 3.0, math.inf)


def _mesh(dp_replicate, ep):
    """The axes and flattened names that expert parallelism uses, built with torch alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    shape = (dp_replicate, dist.get_world_size() // dp_replicate // ep, ep)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard_mod_ep", "ep"))
    flat = mesh["dp_shard_mod_ep", "ep"]._flatten("dp_shard")
    mesh._flatten("dp")
    hsdp = DeviceMesh._concatenate([mesh["dp_replicate"], flat])
    return mesh, flat, hsdp


def _gradients(dp_replicate, ep):
    """[(full gradient, parameter)]: every placement that training makes, and some that it does not."""
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, flat, hsdp = _mesh(dp_replicate, ep)
    experts = mesh["dp_shard_mod_ep", "ep"]
    generator = torch.Generator().manual_seed(11)
    made = []

    def add(full, device_mesh=None, placements=None, dtype=torch.float32):
        full = full.to(dtype)
        if device_mesh is None:
            gradient = full.clone()
        else:
            gradient = distribute_tensor(full, device_mesh, placements, src_data_rank=None)
        parameter = nn.Parameter(gradient.detach().clone().zero_())
        parameter.grad = gradient
        made.append((full.double(), parameter))

    def random(*shape):
        return torch.randn(shape, generator=generator)

    add(random(7, 3), flat, [Shard(0)])
    add(random(2, 5), flat, [Shard(0)])  # rows for two ranks at most: empty shards
    add(random(4, 8) * 3, hsdp, [Replicate(), Shard(0)])
    add(random(8, 5), experts, [Shard(0), Shard(0)])
    add(random(10, 3), mesh, [Replicate(), Shard(0), Replicate()])
    add(random(3, 3) * 2)  # plain, the same on all ranks
    add(random(5, 4), flat, [Replicate()])
    add(random(9, 4), flat, [Shard(0)], torch.bfloat16)
    if ep > 1 and mesh["dp_shard_mod_ep"].size() > 1:
        stack = random(8, 2, 3)
        placements = [_StridedShard(0, split_factor=ep), Shard(0)]
        # what FSDP holds: the ep split first, then rows of it over dp_shard_mod_ep
        mine = stack.chunk(ep)[experts.get_local_rank("ep")].chunk(experts.size(0))[experts.get_local_rank(0)]
        gradient = DTensor.from_local(mine, experts, placements, run_check=False)
        parameter = nn.Parameter(gradient.detach().clone().zero_())
        parameter.grad = gradient
        made.append((stack.double(), parameter))
    return made


def _norms(dp_replicate, ep):
    from unittest import mock

    import torch

    from grad_clip_multimesh import _clip, clip_grad_norm_, get_total_norm
    from moe_core.testing import count_collectives, count_host_syncs

    results = []
    for norm_type in NORM_TYPES:
        made = _gradients(dp_replicate, ep)
        parameters = [parameter for _, parameter in made]
        everything = torch.cat([full.flatten() for full, _ in made])
        expected = torch.linalg.vector_norm(everything, norm_type)
        foreach = None if norm_type == 2.0 else norm_type > 1
        alone = get_total_norm([p.grad for p in parameters], norm_type, foreach=foreach)
        as_on_a_device = mock.patch.object(_clip, "_is_on_host", return_value=False)
        with as_on_a_device, count_collectives() as collectives, count_host_syncs() as syncs:
            norm = clip_grad_norm_(parameters, 0.5, norm_type, foreach=foreach)
        assert torch.equal(norm, alone)
        assert type(norm) is torch.Tensor
        assert (norm.shape, norm.dtype) == ((), torch.float32)
        worst = {}
        for index, (full, parameter) in enumerate(made):
            clipped = getattr(parameter.grad, "full_tensor", lambda p=parameter: p.grad)().double()
            tolerance = 0.01 if parameter.dtype == torch.bfloat16 else 1e-6
            wanted = full * 0.5 / expected
            worst[index] = ((clipped - wanted).abs().max() / wanted.abs().max() / tolerance).item()
        error = ((norm - expected).abs() / expected).item()
        results.append((norm.item(), error, worst, dict(collectives.calls), syncs.total))
    return results


@pytest.mark.parametrize(
    ("world_size", "dp_replicate", "ep"), [(1, 1, 1), (2, 1, 2), (4, 1, 1), (4, 1, 2), (4, 1, 4), (4, 2, 1), (4, 2, 2)]
)
def test_equal_to_one_norm_over_everything(world_size, dp_replicate, ep):
    by_rank = run_ranks(_norms, world_size, dp_replicate, ep)
    for rank_results in by_rank:
        for norm_type, mine, first in zip(NORM_TYPES, rank_results, by_rank[0], strict=True):
            value, error, worst, collectives, syncs = mine
            assert value == first[0], "ranks differ"
            assert error < 2e-6, norm_type
            assert max(worst.values()) < 1.0, (norm_type, worst)
            assert syncs == 0
            assert set(collectives) <= {"allreduce"}
            # the groups of more than one rank: dp_shard, and dp_shard_mod_ep where it is another
            shard, mod_ep = world_size // dp_replicate, world_size // dp_replicate // ep
            distinct = (shard > 1) + (mod_ep > 1 and mod_ep != shard)
            assert collectives.get("allreduce", 0) == distinct


SHAPES = [(8, 4), (7, 7), (129, 4), (64, 4), (4, 8), (12, 7), (8, 8), (16, 12), (7, 4)]
"""None leaves a rank an empty shard, of which torch has no inf norm."""


def _torch_on_one_mesh(axes, flattened, rounding):
    """Ranks as these axes; each layout alone, and all of them mixed. What is further than `rounding` from torch's."""

    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from grad_clip_multimesh import clip_grad_norm_

    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("outer", "inner")[-len(axes) :])
    if flattened:
        mesh._flatten("both")
    layouts = {
        1: [[Shard(0)], [Shard(1)], [Replicate()]],
        2: [[Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(0), Replicate()]],
    }[len(axes)]
    different = []
    for norm_type in NORM_TYPES:
        for chosen in [*([layout] for layout in layouts), layouts]:
            sides = []
            for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
                generator = torch.Generator().manual_seed(2)
                parameters = []
                for index, shape in enumerate(SHAPES):
                    layout = chosen[index % len(chosen)]
                    gradient = distribute_tensor(torch.randn(shape, generator=generator), mesh, layout)
                    parameters.append(nn.Parameter(torch.zeros_like(gradient)))
                    parameters[-1].grad = gradient
                norm = clip(parameters, 0.3, norm_type)
                norm = getattr(norm, "full_tensor", lambda n=norm: n)()
                sides.append([norm, *(parameter.grad.to_local() for parameter in parameters)])
            # other powers round by where in a vector a number stands
            allowed = rounding if norm_type in (1.0, 2.0, math.inf) else 1e-6
            if not all(torch.allclose(*pair, rtol=allowed, atol=0.0) for pair in zip(*sides, strict=True)):
                different.append((norm_type, chosen, sides[0][0].item(), sides[1][0].item()))
    return different


@pytest.mark.parametrize(("axes", "flattened"), [((2,), False), ((2, 2), False)])
def test_bit_identical_to_torch_on_one_mesh(axes, flattened):
    """Of two ranks an axis: what more ranks add up to depends on the order that the back end adds in."""
    world = math.prod(axes)
    assert run_ranks(_torch_on_one_mesh, world, axes, flattened, 0.0) == [[]] * world


@pytest.mark.parametrize(("axes", "flattened"), [((4,), False), ((2, 2), True)])
def test_equal_to_torch_up_to_the_order_of_additions(axes, flattened):
    assert run_ranks(_torch_on_one_mesh, 4, axes, flattened, 1e-6) == [[]] * 4


def _missing(norm_type, values_by_rank):
    """Rank r has the gradient values_by_rank[r] of its row of a stack; None: no gradient at all."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import DTensor, Shard

    from grad_clip_multimesh import clip_grad_norm_

    _, flat, _ = _mesh(1, 1)
    rank = dist.get_rank()
    row = torch.zeros(1, 3) if values_by_rank[rank] != () else torch.zeros(0, 3)
    stack = DTensor.from_local(row, flat, [Shard(0)], shape=(dist.get_world_size(), 3), stride=(3, 1), run_check=False)
    parameter, plain, unused = nn.Parameter(stack), nn.Parameter(torch.zeros(2)), nn.Parameter(stack.clone())
    value = values_by_rank[rank]
    if value is not None:
        filled = row + value if value != () else row
        parameter.grad = DTensor.from_local(
            filled, flat, [Shard(0)], shape=stack.shape, stride=stack.stride(), run_check=False
        )
    plain.grad = torch.tensor([1.0, 1.0])
    return clip_grad_norm_([unused, parameter, plain], 1e9, norm_type).item()


@pytest.mark.parametrize(
    ("norm_type", "values", "expected"),
    [
        (2.0, (1.0, None, 2.0), math.sqrt(3 + 12 + 2)),  # 4.123
        (math.inf, (1.0, None, -2.0), 2.0),
        (2.0, (None, None, None), math.sqrt(2)),
        (2.0, (math.sqrt(6), None, 0.0), 4.4721),  # a rank whose experts got no token, one that has none
        (2.0, (1.0, 3.0, ()), math.sqrt(3 + 27 + 2)),
        (math.inf, (1.0, -3.0, ()), 3.0),
        (0.5, (1.0, 4.0, ()), (3 + 6 + 2) ** 2),
    ],
)
def test_none_on_some_ranks_and_empty_shards_do_not_hang(norm_type, values, expected):
    for norm in run_ranks(_missing, 3, norm_type, values, timeout=30):
        assert norm == pytest.approx(expected, rel=1e-4)


def _with(norm_type, cases):
    """For each (value, rank, index of the parameter): the norm without, and the error with `error_if_nonfinite`."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import DTensor, Shard

    from grad_clip_multimesh import clip_grad_norm_

    mesh, flat, _ = _mesh(1, 2)
    results = []
    for value, rank, where in cases:
        parameters = [
            nn.Parameter(DTensor.from_local(torch.zeros(2, 3), flat, [Shard(0)])),
            nn.Parameter(DTensor.from_local(torch.zeros(2, 3), mesh["dp_shard_mod_ep"], [Shard(0)])),
            nn.Parameter(torch.zeros(2, 3)),
        ]
        for index, parameter in enumerate(parameters):
            local = torch.full((2, 3), float(dist.get_rank()))
            # both holders of a replica have what was reduced
            ranks = (rank, rank ^ 1) if where == 1 else (rank,)
            if index == where and dist.get_rank() in ranks:
                local[0, 0] = value
            parameter.grad = local if index == 2 else DTensor.from_local(local, parameter.device_mesh, [Shard(0)])
        local_to = {parameters[2]: mesh["ep"]} if where != 2 else {parameters[2]: flat}
        norm = clip_grad_norm_(parameters, None, norm_type, local_to=local_to)
        try:
            clip_grad_norm_(parameters, 1.0, norm_type, error_if_nonfinite=True, local_to=local_to)
            results.append((norm.item(), "no error"))
        except RuntimeError as error:
            results.append((norm.item(), str(error)))
    return results


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_what_is_not_finite_on_any_rank_is_so_on_all_and_raises_on_all(norm_type):
    cases = [
        (value, rank, where) for value in (math.nan, math.inf, -math.inf) for rank in range(4) for where in range(3)
    ]
    for results in run_ranks(_with, 4, norm_type, cases, timeout=30):
        for (value, _, _), (norm, error) in zip(cases, results, strict=True):
            assert math.isnan(norm) if math.isnan(value) else norm == math.inf
            assert f"is {norm}, so they cannot be clipped" in error


def _others():
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    from grad_clip_multimesh import clip_grad_norm_
    from moe_core.testing import count_collectives

    rank = dist.get_rank()
    _, flat, _ = _mesh(1, 1)
    renamed = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    results = {}

    # rank r holds one plain row of r + 1 of an expert stack
    local, same = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))
    local.grad, same.grad = torch.full((3,), rank + 1.0), torch.full((4,), 2.0)
    results["local"] = clip_grad_norm_([same, local], None, local_to={local: flat}).item()

    # the ranks hold 1 and 2 of a sum of 3
    summed = DTensor.from_local(torch.full((2,), rank + 1.0), flat, [Partial()], run_check=False)
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), flat, [Replicate()], run_check=False))
    parameter.grad = summed
    results["partial"] = clip_grad_norm_([parameter], None).item()

    # equal ranks under another name are one group
    pair = []
    for device_mesh in (flat, renamed):
        gradient = DTensor.from_local(torch.full((1, 2), rank + 1.0), device_mesh, [Shard(0)])
        pair.append(nn.Parameter(torch.zeros_like(gradient)))
        pair[-1].grad = gradient
    with count_collectives() as count:
        results["renamed"] = clip_grad_norm_(pair, None).item()
    results["collectives"] = count.total

    # each rank is a pipeline stage with its own number of layers
    layers = [nn.Parameter(torch.zeros(2)) for _ in range(rank + 1)]
    for layer in layers:
        layer.grad = torch.full((2,), 2.0)
    group = dist.group.WORLD
    results["pipeline"] = [clip_grad_norm_(layers, None, p, pipeline_group=group).item() for p in (2.0, math.inf)]
    results["no layer"] = clip_grad_norm_(layers if rank else [], None, pipeline_group=group).item()
    return results


def test_local_partial_renamed_and_pipelined():
    for results in run_ranks(_others, 2, timeout=30):
        assert results["local"] == pytest.approx(math.sqrt(4 * 4 + 3 * 1 + 3 * 4))
        assert results["partial"] == pytest.approx(math.sqrt(2 * 9))
        assert results["renamed"] == pytest.approx(math.sqrt(2 * (2 * 1 + 2 * 4)))
        assert results["collectives"] == 1
        assert results["pipeline"] == pytest.approx([math.sqrt(3 * 8), 2.0])
        assert results["no layer"] == pytest.approx(math.sqrt(2 * 8))

"""Failures of other libraries, with the numbers that are right."""

import math

import pytest

from moe_core.testing import run_ranks


def _experts(form, cases):
    return [_experts_by_rank(form, values, norm_type) for values, norm_type, _ in cases]


def _experts_by_rank(form, values_by_rank, norm_type):
    """Rank r's experts have these gradients, one number an element; None: no gradient, (): no expert at all.

    Three forms: one stack, a DTensor; a plain tensor for this rank's experts; a plain tensor for each of them.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from grad_clip_multimesh import clip_grad_norm_
    from moe_core.testing import count_collectives

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    values = values_by_rank[dist.get_rank()]
    shape = (5 if values is None else len(values), 1)
    gradient = None if values is None else torch.tensor(values).reshape(shape)
    if form == "one each":
        parameters = [nn.Parameter(torch.zeros(1)) for _ in range(shape[0])] or [nn.Parameter(torch.zeros(0))]
        for index, parameter in enumerate(parameters if values else []):
            parameter.grad = gradient[index].clone()
    elif form == "stack":
        whole = {"shape": torch.Size((10, 1)), "stride": (1, 1), "run_check": False}
        parameters = [nn.Parameter(DTensor.from_local(torch.zeros(shape), mesh, [Shard(0)], **whole))]
        parameters[0].grad = None if gradient is None else DTensor.from_local(gradient, mesh, [Shard(0)], **whole)
    else:
        parameters = [nn.Parameter(torch.zeros(shape))]
        parameters[0].grad = gradient
    local_to = {} if form == "stack" else dict.fromkeys(parameters, mesh)
    with count_collectives() as collectives:
        norm = clip_grad_norm_(parameters, 1.0, norm_type, local_to=local_to)
    clipped = [getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in parameters if p.grad is not None]
    return norm.item(), torch.cat([g.flatten() for g in clipped]).tolist() if clipped else [], collectives.total


TWOS, FIVES = (2.0,) * 5, (5.0,) * 4  # norms 4.4721 and 10


EXPERT_CASES = [
    ((TWOS, FIVES), 2.0, 10.954),  # the mean over ranks is 7.236
    ((TWOS, ()), 2.0, 4.4721),
    ((TWOS, None), 2.0, 4.4721),
    (((), TWOS), 2.0, 4.4721),
    ((None, TWOS), 2.0, 4.4721),
    ((TWOS, (0.0,) * 5), 2.0, 4.4721),
    ((TWOS, ()), math.inf, 2.0),
    ((None, TWOS), math.inf, 2.0),
    ((TWOS, FIVES), math.inf, 5.0),
    ((TWOS, FIVES), 1.0, 30.0),
]


@pytest.mark.parametrize("form", ["stack", "one tensor", "one each"])
def test_experts_of_which_a_rank_may_have_none(form):
    for rank, results in enumerate(run_ranks(_experts, 2, form, EXPERT_CASES, timeout=30)):
        for (values, norm_type, expected), (norm, clipped, collectives) in zip(EXPERT_CASES, results, strict=True):
            assert norm == pytest.approx(expected, rel=1e-4), (values, norm_type)
            assert clipped == pytest.approx([value / expected for value in values[rank] or ()], rel=1e-4)
            assert collectives == 1


def _empty_shard(norm_types):
    """5 rows on 4 ranks: 2, 2, 1, 0."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from grad_clip_multimesh import clip_grad_norm_

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    gradient = distribute_tensor((torch.arange(10.0) - 4.5).reshape(5, 2), mesh, [Shard(0)])
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return [clip_grad_norm_(parameter, None, p).item() for p in norm_types], gradient.to_local().shape[0]


def test_empty_shard():
    results = run_ranks(_empty_shard, 4, (1.0, 2.0, 3.0, math.inf), timeout=30)
    assert [rows for _, rows in results] == [2, 2, 1, 0]
    for norms, _ in results:
        assert norms == pytest.approx([25.0, 9.0830, 6.7405, 4.5], rel=1e-5)


def _replicated():
    """Every element is 1: the norm is the root of the number of elements, each counted once."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from grad_clip_multimesh import clip_grad_norm_

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    def ones(rows, *placements):
        gradient = torch.ones(rows, 4)
        gradient = distribute_tensor(gradient, mesh, placements) if placements else gradient
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        return parameter

    return {
        "hsdp": clip_grad_norm_(ones(4, Replicate(), Shard(0)), None).item(),
        "experts sharded over ep, replicated over dp": clip_grad_norm_(ones(4, Shard(0), Replicate()), None).item(),
        "replicated everywhere": clip_grad_norm_(ones(4, Replicate(), Replicate()), None).item(),
        "plain": clip_grad_norm_(ones(4), None).item(),
        "all of them": clip_grad_norm_(
            [
                ones(4, Replicate(), Shard(0)),
                ones(4, Shard(0), Replicate()),
                ones(4, Replicate(), Replicate()),
                ones(4),
            ],
            None,
        ).item(),
    }


def test_replicas_are_counted_once():
    for norms in run_ranks(_replicated, 4, timeout=30):
        # a rank's root of 8 squared is 8 to one rounding, and how that goes depends on the processor
        assert norms.pop("all of them") == pytest.approx(8.0, rel=1e-6)
        # 5.66 where two replicas count, 8.0 where four do
        assert list(norms.values()) == pytest.approx([4.0] * len(norms), rel=1e-6), norms


def _fsdp_over_local_experts(norm_type):
    """Ranks (0, 2) and (1, 3) shard their own experts with FSDP, which knows nothing of ep; a router beside them."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from grad_clip_multimesh import clip_grad_norm_

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard_mod_ep", "ep"))
    experts, router = nn.Linear(3, 4, bias=False), nn.Linear(3, 8, bias=False)
    fully_shard(experts, mesh=mesh["dp_shard_mod_ep"])
    fully_shard(router, mesh=mesh["dp_shard_mod_ep", "ep"]._flatten("dp_shard"))
    weights = [experts.weight, router.weight]
    for weight in weights:
        weight.grad = torch.full_like(weight, dist.get_rank() + 1.0)
    ep = {experts.weight: mesh["ep"]}
    norm = clip_grad_norm_(weights, None, norm_type, local_to=ep)
    try:
        clip_grad_norm_(weights, None, norm_type, local_to={experts.weight: mesh["dp_shard_mod_ep"]})
    except ValueError as error:
        return norm.item(), str(error)
    return norm.item(), ""


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_experts_that_fsdp_shards_are_local_to_ep(norm_type):
    # each rank has 2 of 4 rows of its experts and 2 of 8 rows of the router
    powers = 2 * sum(2 * 3 * rank**norm_type for rank in (1, 2, 3, 4)) if norm_type < math.inf else 0
    expected = 4.0 if norm_type == math.inf else powers ** (1 / norm_type)
    for norm, error in run_ranks(_fsdp_over_local_experts, 4, norm_type, timeout=30):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert "name only the axes that its mesh lacks" in error


def _train(fused):
    """Clip, then AdamW, over two meshes and a plain parameter; the same in one process on whole tensors."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from grad_clip_multimesh import clip_grad_norm_

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard_mod_ep", "ep"))
    flat = mesh["dp_shard_mod_ep", "ep"]._flatten("dp_shard")
    layouts = [(flat, [Shard(0)]), (mesh, [Shard(0), Shard(0)]), (mesh, [Replicate(), Shard(1)]), None]
    generator = torch.Generator().manual_seed(3)
    whole = [nn.Parameter(torch.randn(7, 4 + index, generator=generator)) for index in range(len(layouts))]
    sharded = [
        nn.Parameter(w.detach().clone() if at is None else distribute_tensor(w.detach(), *at))
        for w, at in zip(whole, layouts, strict=True)
    ]
    settings = {"lr": 0.1, "weight_decay": 0.1, "fused": fused}
    # torch's optimizers take several meshes in a group of parameters, but no plain tensors beside DTensors
    mine = torch.optim.AdamW([{"params": sharded[:-1]}, {"params": sharded[-1:]}], **settings)
    reference = torch.optim.AdamW(whole, **settings)
    norms = []
    for _ in range(3):
        for w, s, at in zip(whole, sharded, layouts, strict=True):
            w.grad = torch.randn(w.shape, generator=generator)
            s.grad = w.grad.clone() if at is None else distribute_tensor(w.grad, *at)
        norms.append((clip_grad_norm_(sharded, 1.0).item(), nn.utils.clip_grad_norm_(whole, 1.0).item()))
        mine.step()
        reference.step()
    worst = max(
        (getattr(s, "full_tensor", lambda s=s: s)() - w).abs().max().item() for s, w in zip(sharded, whole, strict=True)
    )
    return norms, worst


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_after_clipping_over_several_meshes(fused):
    for norms, worst in run_ranks(_train, 4, fused, timeout=30):
        assert worst < 1e-5
        for norm, expected in norms:
            assert expected > 1.0, "clipping is not active"
            assert norm == pytest.approx(expected, rel=1e-6)

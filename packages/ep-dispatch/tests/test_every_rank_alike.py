"""Every rank issues the same collectives whatever its tokens, idle experts have gradients, and the values are right."""

import math

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from ep_dispatch import AllToAllDispatcher, shard_experts
from moe_core import GroupedExperts, MoE
from moe_core.testing import count_collectives, count_host_syncs, run_ranks

D, F, E, K = 6, 8, 5, 2


class Recorded(TorchDispatchMode):
    """All collectives in their order: kind, dtype, shape of a row, rows to and from each rank."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func._schema.name:
            rows, *splits = args[:3]
            self.calls.append((func._schema.name, rows.dtype, tuple(rows.shape[1:]), *splits))
        return func(*args, **(kwargs or {}))


@attrs.frozen
class Case:
    tokens: tuple[int, ...]
    """T by rank."""
    expert: int | None = None
    """All choices fall on it; None: random."""
    masked: tuple[int, ...] = ()
    """Ranks whose tokens are all padding."""
    grad: bool = True
    """Whether the hidden states need a gradient."""


CASES = {
    2: [
        Case((4, 3)),
        Case((0, 5)),
        Case((0, 0)),
        Case((4, 3), expert=0),
        Case((4, 3), expert=4),
        Case((4, 3), masked=(0,)),
        Case((4, 3), masked=(0, 1)),
        Case((3, 2), grad=False),
    ],
    4: [Case((2, 0, 1, 6), expert=0), Case((0, 0, 3, 0), expert=6), Case((2, 2, 2, 2), masked=(0, 1, 2, 3))],
}


def record(cases):
    """By case: the ops of forward and of backward, host syncs of both, and whether all experts have gradients."""
    rank, degree = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (degree,), mesh_dim_names=("ep",))
    num_experts = {2: 5, 4: 7}[degree]
    results = []
    for case in cases:
        torch.manual_seed(0)
        layer = shard_experts(GroupedExperts(num_experts, D, F), mesh)
        tokens = case.tokens[rank]
        ids = torch.rand(tokens, num_experts).argsort(1)[:, :K]
        if case.expert is not None:
            ids[:] = case.expert
        if rank in case.masked:
            ids[:] = num_experts
        hidden = torch.randn(tokens, D, requires_grad=case.grad)
        weights = torch.rand(tokens, K, requires_grad=True)
        result = []
        with Recorded() as forward, count_host_syncs() as syncs:
            out = layer(hidden, ids, weights)
        result += [forward.calls, syncs.total]
        with Recorded() as backward, count_host_syncs() as syncs:
            out.sum().backward()
        result += [backward.calls, syncs.total]
        gradients = [parameter.grad.to_local() for parameter in layer.parameters()]
        result.append(all(bool(torch.isfinite(gradient).all()) for gradient in gradients))
        if case.expert is not None:
            chunk = math.ceil(num_experts / degree)
            idle = [i for i in range(len(gradients[0])) if rank * chunk + i != case.expert]
            result[-1] &= all(bool((gradient[idle] == 0).all()) for gradient in gradients)
        if rank in case.masked:
            result[-1] &= bool((out == 0).all()) and bool((hidden.grad == 0).all())
        results.append(result)
    return results


@pytest.mark.parametrize("degree", [2, 4])
def test_the_same_collectives_in_the_same_order_whatever_the_tokens(degree):
    by_rank = run_ranks(record, degree, CASES[degree])
    for case, results in zip(CASES[degree], zip(*by_rank, strict=True), strict=True):
        forward, forward_syncs, backward, backward_syncs, gradients = zip(*results, strict=True)
        assert set(forward_syncs) == {1}, case
        assert set(backward_syncs) == {0}, case
        assert all(gradients), case
        assert {len(calls) for calls in forward} == {3}
        # also where hidden requires no gradient, as it may on some ranks only
        assert {len(calls) for calls in backward} == {2}
        for same_call in [*zip(*forward, strict=True), *zip(*backward, strict=True)]:
            kinds, received, sent = {call[:3] for call in same_call}, *zip(*[c[3:] for c in same_call], strict=True)
            assert len(kinds) == 1, case
            assert [list(row) for row in zip(*sent, strict=True)] == [list(row) for row in received], case


def plain_loop(hidden, ids, weights, up, down):
    """relu(x @ up.T)^2 @ down.T of each choice, token by token."""
    out = []
    for token in range(len(hidden)):
        total = torch.zeros(hidden.shape[1], dtype=hidden.dtype)
        for choice in range(ids.shape[1]):
            expert = int(ids[token, choice])
            if expert < len(up):
                inner = (hidden[token] @ up[expert].T).relu().square()
                total = total + weights[token, choice] * (inner @ down[expert].T)
        out.append(total)
    return torch.stack(out) if out else hidden.new_zeros(0, hidden.shape[1])


def all_to_expert_0():
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    layer = GroupedExperts(E, D, F, dtype=torch.float64)
    up, down = (p.detach().clone().requires_grad_() for p in (layer.up_proj, layer.down_proj))
    shard_experts(layer, mesh)
    hidden, weights, grad = (torch.randn(7, n, dtype=torch.float64) for n in (D, 1, D))
    ids, mine = torch.zeros(7, 1, dtype=torch.int64), slice(0, 4) if rank == 0 else slice(4, 7)
    x, part = hidden.clone().requires_grad_(), hidden[mine].clone().requires_grad_()
    expected, out = plain_loop(x, ids, weights, up, down), layer(part, ids[mine], weights[mine])
    expected.backward(grad)
    out.backward(grad[mine])
    torch.testing.assert_close(out, expected[mine])
    torch.testing.assert_close(part.grad, x.grad[mine])
    for stack, whole in ((layer.up_proj, up), (layer.down_proj, down)):
        torch.testing.assert_close(stack.grad.full_tensor(), whole.grad)
        assert bool((stack.grad.full_tensor()[1:] == 0).all())
    return whole.grad[0].abs().sum().item() > 0


def test_a_rank_that_receives_nothing_takes_part_and_its_experts_have_gradients_of_zero():
    assert run_ranks(all_to_expert_0, 2) == [True, True]


def every_gradient_of_one_process(replicated):
    """A whole MoE layer in float64 against loops; what is on all ranks has the sum over ranks as its gradient.

    With `replicated` these are DTensors, whose gradient must say itself that it is one part of a sum.
    """
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    layer = MoE(dim=D, num_experts=E, top_k=K, hidden_dim=F, shared_hidden_dim=4, scale=2.5).double()
    names = [name for name, _ in layer.named_parameters()]
    plain = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    shard_experts(layer, mesh)
    if replicated:
        weight = DTensor.from_local(layer.router.weight.detach(), mesh, [Replicate()])
        layer.router.weight = nn.Parameter(weight)
    hidden, grad = torch.randn(9, D, dtype=torch.float64), torch.randn(9, D, dtype=torch.float64)

    scores = (x := hidden.clone().requires_grad_()) @ plain["router.weight"].T
    ids = scores.sigmoid().topk(K).indices
    weights = scores.sigmoid().gather(1, ids)
    weights = 2.5 * weights / weights.sum(1, keepdim=True)
    expected = plain_loop(x, ids, weights, plain["experts.up_proj"], plain["experts.down_proj"])
    shared = (x @ plain["shared_experts.up_proj.weight"].T).relu().square()
    (expected + shared @ plain["shared_experts.down_proj.weight"].T).backward(grad)

    mine = slice(0, 6) if rank == 0 else slice(6, 9)
    part = hidden[mine].clone().requires_grad_()
    layer(part).backward(grad[mine])
    torch.testing.assert_close(part.grad, x.grad[mine])
    for name, parameter in layer.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        else:
            dist.all_reduce(gradient)
        torch.testing.assert_close(gradient, plain[name].grad, msg=name)
    return names == [name for name, _ in layer.named_parameters()]


@pytest.mark.parametrize("replicated", [False, True])
def test_router_input_and_shared_gradients_are_those_of_one_process(replicated):
    assert run_ranks(every_gradient_of_one_process, 2, replicated) == [True, True]


def asymmetric_experts():
    """Expert i multiplies by i + 1; integers and powers of 2, so that everything is exact."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    layer = GroupedExperts(E, D, D, activation=lambda rows: rows)
    with torch.no_grad():
        layer.up_proj.copy_(torch.eye(D).expand(E, D, D))
        layer.down_proj.copy_(torch.eye(D) * torch.arange(1.0, E + 1).view(-1, 1, 1))
    shard_experts(layer, mesh)
    torch.manual_seed(rank)
    tokens = 5 + rank
    ids = torch.rand(tokens, E).argsort(1)[:, :3]
    weights = torch.tensor([[0.5, 2.0, 0.125]]).repeat(tokens, 1).requires_grad_()
    hidden = torch.arange(1.0, tokens * D + 1).view(tokens, D).requires_grad_()
    out = layer(hidden, ids, weights)
    out.backward(torch.ones_like(out))
    factor = (weights * (ids + 1)).sum(1, keepdim=True)
    return [
        torch.equal(out, hidden * factor),
        torch.equal(hidden.grad, factor.expand(-1, D)),
        torch.equal(weights.grad, hidden.sum(1, keepdim=True) * (ids + 1)),
    ]


def test_each_choice_keeps_its_own_weight_and_expert():
    assert run_ranks(asymmetric_experts, 2) == [[True] * 3] * 2


def rows_that_travel():
    """Three tokens a rank, each to both experts of rank 0."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    dispatcher = AllToAllDispatcher(mesh)
    hidden = torch.full((3, D), 1.0 + dist.get_rank())
    ids, weights = torch.tensor([[1, 0]] * 3), torch.tensor([[0.25, 0.5]] * 3)
    with count_collectives() as there:
        dispatched = dispatcher.dispatch(hidden, ids, 4).wait()
    expert = torch.arange(2).repeat_interleave(dispatched.tokens_per_expert)
    with count_collectives() as back:
        out = dispatcher.combine(dispatched.rows * (expert + 1.0).unsqueeze(1), weights, dispatched.handle)
    assert torch.equal(out, hidden * (0.25 * 2 + 0.5 * 1))
    assert torch.equal(dispatched.handle.tokens_per_expert, dispatched.tokens_per_expert)
    return dict(there.bytes), dict(back.bytes), dispatched.handle.tokens_per_expert.tolist()


def test_a_token_with_two_experts_on_one_rank_travels_once_for_each():
    first, second = run_ranks(rows_that_travel, 2)
    # for each rank its two experts' counts and the number of invalid ids
    counts, row = 2 * 3 * 8, D * 4
    assert first[0] == second[0] == {"all_to_all_single": counts + 3 * K * row}
    # all 12 rows go home from rank 0
    assert first[1:] == ({"all_to_all_single": 2 * 3 * K * row}, [6, 6])
    assert second[1:] == ({"all_to_all_single": 0}, [0, 0])

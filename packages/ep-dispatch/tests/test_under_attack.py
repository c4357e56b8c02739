"""Lost ranks, odd inputs, repeated and second-order backward passes, and recomputation that would break a tie anew."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ep_dispatch import AllToAllDispatcher, LocalDispatcher, build_permute_indices, shard_experts
from ep_dispatch._permute import inverse_permutation, sort_by_expert
from moe_core import GroupedExperts, MoE
from moe_core.testing import RankFailed, count_collectives, run_ranks

D, F, E, K = 16, 16, 5, 2


def make_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def lose_a_rank(number, folder):
    """Rank 1 is killed as it is about to start its `number`-th exchange; the others write down how they end."""
    import ep_dispatch._exchange as exchange

    mesh, original, calls = make_mesh(), exchange.start, []
    layer = shard_experts(GroupedExperts(E, D, F), mesh)

    def start(*args):
        calls.append(None)
        if dist.get_rank() == 1 and len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    import ep_dispatch._dispatchers as dispatchers

    exchange.start = dispatchers.start = start
    hidden = torch.randn(4, D, requires_grad=True)
    begin = time.monotonic()
    try:
        layer(hidden, torch.tensor([[0, 4]] * 4), torch.rand(4, K)).sum().backward()
    except RuntimeError as error:
        Path(folder, str(dist.get_rank())).write_text(f"{time.monotonic() - begin} {error}")
        raise


@pytest.mark.parametrize("number", [1, 2, 5], ids=["counts", "rows", "backward"])
def test_the_others_end_with_an_error_when_a_rank_is_killed(number, tmp_path):
    with pytest.raises(RankFailed, match="rank 1 of 2 failed:\nkilled by signal 9"):
        run_ranks(lose_a_rank, 2, number, str(tmp_path), timeout=30)
    seconds, message = (tmp_path / "0").read_text().split(" ", 1)
    assert float(seconds) < 10
    assert "gloo" in message


def wait_for_a_rank_that_does_not_come():
    limit = timedelta(seconds=3)
    dist.barrier()  # the limit is for making the group as well
    mesh = DeviceMesh.from_group(dist.new_group([0, 1], timeout=limit), "cpu", mesh_dim_names=("ep",))
    dispatcher = AllToAllDispatcher(mesh)
    ids = torch.tensor([[0, 4]] * 3)
    dispatcher.dispatch(torch.randn(3, D), ids, E).wait()
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="Timed out waiting 3000ms"):
            dispatcher.dispatch(torch.randn(3, D), ids, E).wait()
    dist.barrier()  # only then rank 1 is there again


def test_a_dispatch_ends_at_the_time_limit_of_the_group():
    run_ranks(wait_for_a_rank_that_does_not_come, 2, timeout=30)


def make_layers(seed=0, **options):
    torch.manual_seed(seed)
    whole, layer = (GroupedExperts(E, D, F, **options) for _ in range(2))
    layer.load_state_dict(whole.state_dict())
    return whole, shard_experts(layer, make_mesh())


def odd_inputs():
    """By case: whether the layer equals the replicated one, whose input is the ordinary one."""
    rank = dist.get_rank()
    whole, layer = make_layers()
    hidden, weights = torch.randn(8, D), torch.rand(8, K)
    ids = torch.rand(8, E).argsort(1)[:, :K]
    mine = slice(0, 5) if rank == 0 else slice(5, 8)
    expected = whole(hidden, ids, weights)[mine]
    h, i, w = hidden[mine], ids[mine], weights[mine]
    wide = torch.zeros(len(h), 2 * D)
    wide[:, ::2] = h
    results = {
        "transposed": torch.equal(
            layer(h.t().contiguous().t(), i.t().contiguous().t(), w.t().contiguous().t()), expected
        ),
        "strided": torch.equal(layer(wide[:, ::2], i, w), expected),
        "expanded": torch.equal(layer(h[:1].expand(3, D), i[:1].expand(3, K), w[:1].expand(3, K))[0], expected[0]),
        "int32 ids": torch.equal(layer(h, i.int(), w), expected),
        "no choices": torch.equal(layer(h, i[:, :0], w[:, :0]), torch.zeros_like(h)),
        "inference": torch.equal(torch.inference_mode()(layer)(h, i, w), expected),
    }
    layer(h, i, w).sum().backward()
    gradients = [p.grad.full_tensor() for p in layer.parameters()]
    whole(hidden, ids, weights).sum().backward()
    results["hidden without gradient"] = all(
        torch.equal(one, other.grad) for one, other in zip(gradients, whole.parameters(), strict=True)
    )
    return [name for name, holds in results.items() if not holds]


def test_odd_inputs_have_the_bits_of_ordinary_ones():
    assert run_ranks(odd_inputs, 2) == [[], []]


def one_token_in_bf16():
    rank = dist.get_rank()
    whole, layer = make_layers(dtype=torch.bfloat16)
    hidden, weights = torch.randn(1, D).bfloat16(), torch.rand(1, K)
    results = []
    for module, tokens in ((whole, 1), (layer, 1 - rank)):
        x = hidden[:tokens].clone().requires_grad_()
        out = module(x, torch.tensor([[4, 0]])[:tokens], weights[:tokens])
        out.backward(torch.ones_like(out))
        results.append((out, x.grad))
    return [torch.equal(one[: 1 - rank], other) for one, other in zip(*results, strict=True)]


def test_one_token_in_bf16_and_none_on_the_other_rank():
    assert run_ranks(one_token_in_bf16, 2) == [[True, True]] * 2


def backward_again():
    _, layer = make_layers()
    hidden, weights = torch.randn(6, D, requires_grad=True), torch.rand(6, K, requires_grad=True)
    inputs = (hidden, weights, *layer.parameters())
    ids = torch.rand(6, E).argsort(1)[:, :K]
    losses = (lambda out: out.square().sum(), lambda out: out.sum())
    out = layer(hidden, ids, weights)
    retained = [torch.autograd.grad(loss(out), inputs, retain_graph=True) for loss in losses]
    # what an exchange holds of one pass must not reach the next
    apart = [torch.autograd.grad(loss(layer(hidden, ids, weights)), inputs) for loss in losses]
    pairs = [pair for both in zip(retained, apart, strict=True) for pair in zip(*both, strict=True)]
    return [torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b)) for a, b in pairs]


def test_a_second_backward_through_a_retained_graph_gives_its_own_gradients():
    assert run_ranks(backward_again, 2) == [[True] * 8] * 2


def gradient_of_a_gradient():
    _, layer = make_layers()
    hidden = torch.randn(6, D, requires_grad=True)
    out = layer(hidden, torch.rand(6, E).argsort(1)[:, :K], torch.rand(6, K))
    (gradient,) = torch.autograd.grad(out.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_gradient_of_a_gradient_is_refused():
    run_ranks(gradient_of_a_gradient, 2)


def marked(ctx, op, *args, **kwargs):
    keep = getattr(op, "must_save", False)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def ties_broken_otherwise_in_recomputation(keep_what_is_marked):
    """All logits equal; the router turns its scores' order around in its second call.

    Returns the gradients with checkpointing, those without, and how often the router chose.
    """
    torch.manual_seed(0)
    layer = shard_experts(MoE(dim=D, num_experts=4, top_k=K, hidden_dim=F), make_mesh())
    torch.nn.init.zeros_(layer.router.weight)
    hidden = torch.randn(5 + dist.get_rank(), D)
    choose, calls = layer.router._choose, []
    tilts = [torch.zeros(4), torch.linspace(0, 1e-6, 4)]

    def choose_otherwise(scores):
        calls.append(None)
        return choose(scores + tilts[len(calls) - 1])

    def gradients(run):
        x = hidden.clone().requires_grad_()
        layer.zero_grad()
        out = run(x)
        out.backward(torch.ones_like(out))
        stacks = [p.grad.to_local().clone() for p in layer.experts.parameters()]
        return [x.grad, layer.router.weight.grad.clone(), *stacks]

    def checkpointed(x):
        contexts = {"context_fn": lambda: create_selective_checkpoint_contexts(marked)}
        return checkpoint(layer, x, use_reentrant=False, **(contexts if keep_what_is_marked else {}))

    expected = gradients(layer)
    layer.router._choose = choose_otherwise
    return gradients(checkpointed), expected, len(calls)


def test_recomputation_breaks_no_tie_anew_if_what_is_marked_is_kept():
    for got, expected, calls in run_ranks(ties_broken_otherwise_in_recomputation, 2, True):
        assert calls == 2
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_without_the_mark_a_recomputation_sends_other_rows_and_fails():
    with pytest.raises(RankFailed, match="CheckpointError"):
        run_ranks(ties_broken_otherwise_in_recomputation, 2, False)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_permutation_and_its_inverse_leave_rows_as_they_were(data):
    """Also where tokens have other numbers of choices than their neighbours."""
    sources, experts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    counts = torch.tensor(
        data.draw(st.lists(st.integers(0, 4), min_size=sources * experts, max_size=sources * experts))
    )
    indices = build_permute_indices(counts.view(sources, experts))
    rows = torch.arange(len(indices))
    assert torch.equal(rows[indices][inverse_permutation(indices)], rows)
    assert torch.equal(indices.sort().values, rows)

    tokens, choices = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 4))
    drawn = data.draw(st.lists(st.integers(0, experts), min_size=tokens * choices, max_size=tokens * choices))
    ids = torch.tensor(drawn, dtype=torch.int64).view(tokens, choices)
    place, row, count, _ = sort_by_expert(ids, experts)
    assert torch.equal(place[row.flatten()], torch.arange(tokens * choices))
    by_expert = sorted(range(tokens * choices), key=lambda i: (drawn[i], i))
    assert place.tolist() == by_expert
    assert count.tolist() == [drawn.count(expert) for expert in range(experts)]


def dispatch_with(wrong_ids):
    """Rank 1 has the wrong ids; what every rank hears."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    layer = shard_experts(GroupedExperts(E, D, F), mesh)
    messages = []
    for wrong in wrong_ids:
        ids = torch.zeros(4, 2, dtype=torch.int64)
        if dist.get_rank() == 1:
            ids[2, 1] = wrong
        try:
            layer(torch.randn(4, D), ids, torch.rand(4, 2))
        except ValueError as error:
            messages.append(str(error))
    layer(torch.randn(4, D), torch.zeros(4, 2, dtype=torch.int64), torch.rand(4, 2))  # the ranks are still together
    return messages


def test_ids_that_name_no_expert_are_refused_on_all_ranks():
    results = run_ranks(dispatch_with, 2, [-1, E + 1, -(2**40), 2**40], timeout=30)
    for messages in results:
        assert len(messages) == 4
        for message in messages:
            assert f"0..num_experts = {E}" in message
            assert "1 on expert-parallel rank 1" in message


@pytest.mark.parametrize("wrong", [-1, E + 1])
def test_ids_that_name_no_expert_are_refused_where_all_experts_are_local(wrong):
    ids = torch.tensor([[0, 1], [wrong, 2]])
    for dispatcher in (None, LocalDispatcher()):
        layer = GroupedExperts(E, D, F, dispatcher=dispatcher)
        with pytest.raises(RuntimeError, match=f"num_experts = {E}"):
            layer(torch.randn(2, D), ids, torch.rand(2, 2))


@pytest.mark.parametrize(
    ("hidden", "ids", "weights"),
    [
        ((4, D), (3, 2), (3, 2)),
        ((3, D), (4, 2), (4, 2)),
        ((4, D), (4,), (4,)),
        ((4, D), (4, 2), (4, 1)),
        ((4, D + 1), (4, 2), (4, 2)),
    ],
)
def test_shapes_that_do_not_fit_are_refused_before_anything_is_sent(hidden, ids, weights):
    with pytest.raises(ValueError, match="must be"):
        GroupedExperts(E, D, F)(torch.randn(hidden), torch.zeros(ids, dtype=torch.int64), torch.rand(weights))
    if hidden[0] != ids[0] or len(ids) != 2:
        with pytest.raises(ValueError, match="must be"):
            LocalDispatcher().dispatch(torch.randn(hidden), torch.zeros(ids, dtype=torch.int64), E)


def test_ids_are_integers():
    with pytest.raises(ValueError, match="must be integers"):
        LocalDispatcher().dispatch(torch.randn(3, D), torch.zeros(3, 2), E)


def hidden_without_gradient(empty):
    """Rank 1 has hidden states that require no gradient, as those of no tokens may; rank 0's come home all the same."""
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), dist.get_rank()
    torch.manual_seed(0)
    whole = GroupedExperts(E, D, F)
    layer = GroupedExperts(E, D, F)
    layer.load_state_dict(whole.state_dict())
    shard_experts(layer, mesh)
    hidden, weights, ids = torch.randn(9, D), torch.rand(9, K), torch.randint(0, E, (9, K))
    parts = (slice(0, 5), slice(5, 5 if empty else 9))
    x = hidden[parts[rank]].clone().requires_grad_(rank == 0)
    with count_collectives() as backward:
        out = layer(x, ids[parts[rank]], weights[parts[rank]])
        backward.calls.clear()
        out.sum().backward()
    together = hidden[: parts[1].stop].clone().requires_grad_()
    whole(together, ids[: parts[1].stop], weights[: parts[1].stop]).sum().backward()
    same = [
        torch.equal(one.grad.to_local(), full.grad.chunk(2)[rank])
        for one, full in zip(layer.parameters(), whole.parameters(), strict=True)
    ]
    if rank == 0:
        same.append(torch.equal(x.grad, together.grad[parts[0]]))
    return backward.total, all(same)


@pytest.mark.parametrize("empty", [False, True])
def test_hidden_states_that_require_no_gradient_on_one_rank(empty):
    assert run_ranks(hidden_without_gradient, 2, empty, timeout=30) == [(2, True)] * 2

"""Dispatchers: order, pairing, collectives, host syncs, gradients, and ranks without tokens."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ep_dispatch import AllToAllDispatcher, LocalDispatcher, build_permute_indices, shard_experts
from moe_core import GroupedExperts, LocalDispatch
from moe_core.testing import count_collectives, count_host_syncs, run_ranks

D, E, K = 6, 5, 2


def make_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def routing(tokens, *, num_experts=E, top_k=K):
    return torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(tokens)])


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 1), (2, 3), (4, 2), (3, 5)])
def test_permute_indices_equal_a_plain_loop(shape):
    torch.manual_seed(0)
    counts = torch.randint(0, 4, shape)
    counts[0] = 0
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.flatten().cumsum(0)]).tolist()
    expected = []
    for expert, source in itertools.product(range(shape[1]), range(shape[0])):
        start = starts[source * shape[1] + expert]
        expected += range(start, start + int(counts[source, expert]))
    assert build_permute_indices(counts).tolist() == expected
    with count_host_syncs() as syncs:
        indices = build_permute_indices(counts, len(expected))
    assert syncs.total == 0
    assert indices.tolist() == expected


def test_permute_indices_of_nothing():
    assert build_permute_indices(torch.zeros(2, 3, dtype=torch.int64)).shape == (0,)


def test_local_rows_lie_by_expert_and_in_the_order_of_tokens():
    ids = torch.tensor([[2, 0], [0, 4], [E, E], [2, 1]])
    hidden = torch.arange(4.0).view(4, 1).expand(4, D)
    dispatched = LocalDispatcher().dispatch(hidden, ids, E).wait()
    assert dispatched.tokens_per_expert.tolist() == [2, 1, 2, 0, 1]
    assert dispatched.rows[:, 0].tolist()[:6] == [0, 1, 3, 0, 3, 1]


def test_local_equals_moe_cores_own_path_bit_for_bit():
    torch.manual_seed(0)
    ids, weights = routing(40, top_k=3), torch.rand(40, 3)  # of two choices the sum has no order
    ids[3] = ids[17, 1] = E
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        results = []
        for dispatcher in (LocalDispatcher(), LocalDispatch()):
            hidden = torch.randn(40, D, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
            w = weights.clone().requires_grad_()
            dispatched = dispatcher.dispatch(hidden, ids, E).wait()
            inside = torch.arange(len(dispatched.rows)) < dispatched.tokens_per_expert.sum()
            rows = torch.where(inside.unsqueeze(1), dispatched.rows * 1.37, 0)
            out = dispatcher.combine(rows, w, dispatched.handle)
            out.backward(torch.ones_like(out) * 0.71)
            results.append((dispatched.rows, dispatched.tokens_per_expert, out, hidden.grad, w.grad))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def send(tokens, ids_by_rank, num_experts):
    """Each row says where it came from: 100 * rank + token."""
    rank = dist.get_rank()
    dispatcher = AllToAllDispatcher(make_mesh(), check_splits=True)
    hidden = (100.0 * rank + torch.arange(float(tokens[rank]))).view(-1, 1).expand(-1, D)
    dispatched = dispatcher.dispatch(hidden, ids_by_rank[rank], num_experts)
    with pytest.raises(RuntimeError, match=r"call wait\(\) first"):
        _ = dispatched.rows
    dispatched.wait()
    assert dispatched.wait().rows is dispatched.rows
    factor = torch.repeat_interleave(torch.arange(len(dispatched.tokens_per_expert)), dispatched.tokens_per_expert)
    chunk = -(-num_experts // dist.get_world_size())
    scaled = dispatched.rows * (rank * chunk + factor + 1).unsqueeze(1)
    home = dispatcher.combine(scaled, torch.full(ids_by_rank[rank].shape, 0.5), dispatched.handle)
    return {
        "rows": dispatched.rows[:, 0].tolist(),
        "tokens_per_expert": dispatched.tokens_per_expert.tolist(),
        "host": dispatched.host_tokens_per_expert.tolist(),
        "sent": dispatched.handle.local_tokens_per_expert.tolist(),
        "home": home[:, 0].tolist(),
    }


def test_rows_arrive_by_expert_then_source_then_token_and_come_home_to_their_choice():
    ids = [torch.tensor([[4, 0], [0, 3], [4, 1]]), torch.tensor([[0, 4], [E, E]])]
    first, second = run_ranks(send, 2, (3, 2), ids, E)
    # rank 0 holds experts 0, 1, 2 and rank 1 holds 3, 4
    assert first["rows"] == [0, 1, 100, 2]
    assert first["tokens_per_expert"] == first["host"] == [3, 1, 0]
    assert second["rows"] == [1, 0, 2, 100]
    assert second["tokens_per_expert"] == second["host"] == [1, 3]
    assert first["sent"] == [2, 1, 0, 1, 2]
    assert second["sent"] == [1, 0, 0, 0, 1]
    # expert i multiplies by i + 1; both weights are a half
    assert first["home"] == [0.0, (1 * 1 + 1 * 4) / 2, (2 * 5 + 2 * 2) / 2]
    assert second["home"] == [(100 + 500) / 2, 0.0]


def test_all_tokens_of_all_ranks_to_one_expert():
    ids = [torch.full((t, 3), 2) for t in (2, 5, 0, 1)]
    results = run_ranks(send, 4, (2, 5, 0, 1), ids, 4)
    assert [len(result["rows"]) for result in results] == [0, 0, 24, 0]


def gradients_pass_gradcheck(num_experts):
    """With as many tokens on all ranks, which perturb the same element at the same time."""
    dispatcher = AllToAllDispatcher(make_mesh())
    torch.manual_seed(dist.get_rank())
    ids = routing(4, num_experts=num_experts)
    ids[1] = ids[2, 0] = num_experts
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, K, dtype=torch.float64, requires_grad=True)

    def there_and_back(x, w):
        dispatched = dispatcher.dispatch(x, ids, num_experts).wait()
        return dispatcher.combine(dispatched.rows.tanh(), w, dispatched.handle)

    return torch.autograd.gradcheck(there_and_back, (hidden, weights))


@pytest.mark.parametrize(("degree", "num_experts"), [(1, 5), (2, 5), (4, 7)])
def test_gradients_pass_gradcheck(degree, num_experts):
    assert run_ranks(gradients_pass_gradcheck, degree, num_experts) == [True] * degree


def count_step(tokens, backend, policy):
    """Forward and backward counted apart; `policy` checkpoints the layer."""
    mesh, rank = make_mesh(), dist.get_rank()
    torch.manual_seed(0)
    layer = shard_experts(GroupedExperts(E, D, 8, grouped_gemm=backend, dtype=torch.float32), mesh)
    ids = routing(tokens[rank]) if tokens[rank] else torch.empty(0, K, dtype=torch.int64)
    hidden, weights = torch.randn(tokens[rank], D, requires_grad=True), torch.rand(tokens[rank], K)

    def run(x):
        return layer(x, ids, weights)

    def forward(x):
        if policy == "none":
            return run(x)
        contexts = {"context_fn": lambda: create_selective_checkpoint_contexts(policies[policy])}
        return checkpoint(run, x, use_reentrant=False, **({} if policy == "plain" else contexts))

    def marked(ctx, op, *args, **kwargs):
        keep = getattr(op, "must_save", False)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def exchanges_too(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op.namespace == "_c10d_functional" else marked(ctx, op)

    policies = {"marked": marked, "exchanges": exchanges_too}
    counts = []
    with count_host_syncs() as syncs, count_collectives() as collectives:
        out = forward(hidden)
    counts += [syncs.total, collectives.total]
    with count_host_syncs() as syncs, count_collectives() as collectives:
        out.backward(torch.ones_like(out))
    counts += [syncs.total, collectives.total]
    return counts, hidden.grad, [p.grad.to_local() for p in layer.parameters()]


@pytest.mark.parametrize("backend", ["auto", "loop"])
@pytest.mark.parametrize("tokens", [(7, 4), (0, 9)])
def test_one_host_sync_in_forward_none_in_backward_and_equal_collectives(tokens, backend):
    for counts, _, _ in run_ranks(count_step, 2, tokens, backend, "none"):
        assert counts == [1, 3, 0, 2]


@pytest.mark.parametrize(
    ("policy", "backward"),
    [("plain", [1, 5]), ("marked", [0, 5]), ("exchanges", [0, 2])],
)
def test_recomputation_reads_nothing_back_if_what_is_marked_is_kept(policy, backward):
    expected = run_ranks(count_step, 2, (7, 4), "auto", "none")
    results = run_ranks(count_step, 2, (7, 4), "auto", policy)
    for (counts, grad, stacks), (_, grad_without, stacks_without) in zip(results, expected, strict=True):
        assert counts[:2] == [1, 3]
        # the last all-to-all of forward is not needed again, unless nothing stops the recomputation early
        assert counts[2] == backward[0]
        assert counts[3] <= backward[1]
        assert torch.equal(grad, grad_without)
        assert all(torch.equal(one, other) for one, other in zip(stacks, stacks_without, strict=True))


def overlap():
    """What runs between dispatch and wait finds the exchange under way, in forward and in backward."""
    dispatcher = AllToAllDispatcher(make_mesh())
    torch.manual_seed(dist.get_rank())
    events = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            events.append("between")
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            events.append("between")
            return grad

    import ep_dispatch._exchange as exchange

    original = exchange.start, exchange.wait
    exchange.start = lambda *a: (events.append("start"), original[0](*a))[1]
    exchange.wait = lambda *a: (events.append("wait"), original[1](*a))[1]
    try:
        hidden = torch.randn(5, D, requires_grad=True)
        ids = routing(5)
        dispatched = dispatcher.dispatch(hidden, ids, E)
        other = Note.apply(hidden)
        rows = dispatched.wait().rows
        out = dispatcher.combine(rows, torch.rand(5, K), dispatched.handle) + other
        forward, events[:] = list(events), []
        out.sum().backward()
    finally:
        exchange.start, exchange.wait = original
    return forward, events


def test_work_in_between_overlaps_in_forward_and_backward():
    for forward, backward in run_ranks(overlap, 2):
        assert forward == ["start", "between", "wait", "start", "wait"]
        assert backward == ["start", "wait", "start", "between", "wait"]


def twice():
    results = []
    for _ in range(2):
        torch.manual_seed(dist.get_rank())
        dispatcher = AllToAllDispatcher(make_mesh())
        hidden = torch.randn(33, D).bfloat16().requires_grad_()
        dispatched = dispatcher.dispatch(hidden, routing(33), E).wait()
        out = dispatcher.combine(dispatched.rows.sin(), torch.rand(33, K), dispatched.handle)
        out.backward(torch.randn(33, D).bfloat16())
        results.append((out, hidden.grad))
    return [torch.equal(one, other) for one, other in zip(*results, strict=True)]


def test_the_same_step_twice_has_the_same_bits():
    assert run_ranks(twice, 2) == [[True, True]] * 2


def the_sum_over_k_in_fp32():
    """256 + 1 + 1 = 258; a sum in bf16 stays at 256."""
    dispatcher = AllToAllDispatcher(make_mesh())
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    dispatched = dispatcher.dispatch(hidden, torch.tensor([[0, 1, 2]]), 4).wait()
    scale = torch.ones_like(dispatched.rows)
    if dist.get_rank() == 0:
        scale[: int(dispatched.tokens_per_expert[0])] = 256
    out = dispatcher.combine(dispatched.rows * scale, torch.ones(1, 3), dispatched.handle)
    out.backward(torch.ones_like(out))
    return out.item(), hidden.grad.item()


def test_sums_over_k_do_not_round_in_between():
    assert run_ranks(the_sum_over_k_in_fp32, 2) == [(258.0, 258.0)] * 2


def disagree_on_width():
    dispatcher = AllToAllDispatcher(make_mesh(), check_splits=True)
    try:
        dispatcher.dispatch(torch.randn(3, D + dist.get_rank()), routing(3), E)
    except ValueError as error:
        return str(error)


def test_check_splits_names_what_differs_instead_of_hanging():
    message = "width D differs over the expert-parallel ranks 0..1: [6, 7]"
    assert run_ranks(disagree_on_width, 2, timeout=20) == [message] * 2


def disagree_on_splits():
    from ep_dispatch._dispatchers import _check
    from ep_dispatch._exchange import Splits

    rank = dist.get_rank()
    splits = Splits([1, 2], [1, 9], dist.group.WORLD) if rank == 0 else Splits([3, 0], [2, 0], dist.group.WORLD)
    try:
        _check(splits, torch.zeros(3, D), E)
    except ValueError as error:
        return str(error)


def test_check_splits_names_the_rank():
    message = "expert-parallel rank 1 sends 3 rows to rank 0, which expects 9"
    assert run_ranks(disagree_on_splits, 2) == [message] * 2


def test_options_that_do_not_exist_are_refused():
    def construct():
        mesh = make_mesh()
        messages = []
        for options in ({"dedup": "always"}, {"exact": False}):
            try:
                AllToAllDispatcher(mesh, **options)
            except ValueError as error:
                messages.append(str(error))
        two = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        try:
            AllToAllDispatcher(two)
        except ValueError as error:
            messages.append(str(error))
        return messages

    (messages,) = run_ranks(construct, 1)
    assert [message.split(":")[0] for message in messages] == [
        "dedup = 'always'",
        "exact = False",
        "ep_mesh has 2 axes",
    ]

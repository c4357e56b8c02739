"""The router against a plain loop in float64, and the cases in which routers elsewhere went wrong."""

import math

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_core import TopKRouter

D, E = 12, 6


def make_router(top_k=2, *, dim=D, num_experts=E, bias=None, **options):
    router = TopKRouter(dim, num_experts, top_k, **options)
    if bias is not None:
        router.bias.copy_(torch.as_tensor(bias))
    return router


def with_logits(router, logits):
    """Hidden states that make the router see exactly these logits."""
    with torch.no_grad():
        router.weight.copy_(torch.eye(*router.weight.shape))
    hidden = torch.zeros(len(logits), router.dim)
    hidden[:, : router.num_experts] = torch.as_tensor(logits)
    return hidden


def reference(hidden, router):
    """Token by token, expert by expert, in float64."""
    weight, bias = router.weight.detach().double(), router.bias.double()
    ids, weights = [], []
    for token in hidden.double():
        logits = [float(token @ row) for row in weight]
        if router.score == "sigmoid":
            scores = [1 / (1 + math.exp(-x)) for x in logits]
        else:
            exps = [math.exp(x - max(logits)) for x in logits]
            scores = [x / sum(exps) for x in exps] if router.score == "softmax" else logits
        choice = [s + float(b) for s, b in zip(scores, bias, strict=True)]
        size = len(logits) // router.num_groups
        groups = [range(g * size, (g + 1) * size) for g in range(router.num_groups)]
        groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:2]))
        allowed = sorted(e for group in groups[: router.top_groups] for e in group)
        best = sorted(allowed, key=lambda e: -choice[e])[: router.top_k]
        chosen = [scores[e] for e in best]
        if router.score == "softmax_topk":
            chosen = [math.exp(x - max(chosen)) for x in chosen]
            chosen = [x / sum(chosen) for x in chosen]
        if router.normalize:
            chosen = [x / (sum(chosen) + 1e-20) for x in chosen]
        ids.append(best)
        weights.append([x * router.scale for x in chosen])
    return torch.tensor(ids), torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize("score", ["sigmoid", "softmax", "softmax_topk"])
@pytest.mark.parametrize("groups", [(1, 1), (3, 2), (2, 1)])
@pytest.mark.parametrize(("normalize", "scale"), [(True, 2.5), (False, 1.0)])
def test_choice_and_weights_equal_a_plain_loop(score, groups, normalize, scale):
    torch.manual_seed(0)
    router = make_router(
        3,
        score=score,
        num_groups=groups[0],
        top_groups=groups[1],
        normalize=normalize,
        scale=scale,
        bias=torch.randn(E) * 0.3,
    )
    hidden = torch.randn(37, D)
    routing = router(hidden)
    ids, weights = reference(hidden, router)
    assert torch.equal(routing.expert_ids, ids)
    torch.testing.assert_close(routing.expert_weights.double(), weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(routing.logits, hidden @ router.weight.t())
    assert routing.tokens_per_expert.tolist() == [int((ids == e).sum()) for e in range(E)]
    dtypes = [t.dtype for t in routing]
    assert dtypes == [torch.int64, torch.float32, torch.int64, torch.float32]


def test_bias_changes_which_experts_and_never_how_much():
    router = make_router(2, num_experts=4, bias=[9.0, 0, 0, 0])
    hidden = with_logits(router, [[-3.0, 1.0, 2.0, -1.0]])
    routing = router(hidden)
    assert routing.expert_ids.tolist() == [[0, 2]]
    s = torch.tensor([-3.0, 2.0]).sigmoid()
    torch.testing.assert_close(routing.expert_weights[0], s / s.sum())
    assert not router.bias.requires_grad


def test_a_group_that_is_out_loses_to_negative_scores():
    router = make_router(2, num_experts=4, num_groups=2, top_groups=1, bias=[-10.0] * 4)
    routing = router(with_logits(router, [[0.0, 1.0, 3.0, 2.0], [3.0, 2.0, 0.0, 1.0]]))
    assert routing.expert_ids.tolist() == [[2, 3], [0, 1]]


@pytest.mark.parametrize("deterministic", [False, True])
def test_loads_are_integers_counted_the_same_in_deterministic_mode(deterministic):
    torch.manual_seed(0)
    router = make_router(3, num_experts=11).train()
    hidden = torch.randn(1000, D)
    torch.use_deterministic_algorithms(deterministic)
    try:
        routing = router(hidden)
    finally:
        torch.use_deterministic_algorithms(False)
    assert routing.tokens_per_expert.dtype == torch.int64
    expected = [sum(row.count(expert) for row in routing.expert_ids.tolist()) for expert in range(11)]
    assert routing.tokens_per_expert.tolist() == router.tokens_per_expert.tolist() == expected


def test_ties_go_to_the_lowest_id():
    router = make_router(3, num_experts=40, dim=40)
    routing = router(with_logits(router, torch.zeros(5, 40)))
    assert routing.expert_ids.tolist() == [[0, 1, 2]] * 5
    grouped = make_router(2, num_experts=40, dim=40, num_groups=20, top_groups=3)
    assert grouped(with_logits(grouped, torch.zeros(5, 40))).expert_ids.tolist() == [[0, 1]] * 5


def test_weight_and_bias_stay_fp32_and_exact():
    router = make_router(1, num_experts=4, normalize=False, bias=[64.0, 64.1, 64.2, 63.9])
    before = router.weight.detach().clone()
    torch.nn.Sequential(router).to(torch.bfloat16)
    assert router.weight.dtype == router.bias.dtype == torch.float32
    assert torch.equal(router.weight, before)
    routing = router(torch.zeros(3, D, dtype=torch.bfloat16))
    assert routing.expert_ids.tolist() == [[2]] * 3
    assert routing.logits.dtype == torch.float32
    router.double()
    assert router.weight.dtype == torch.float64


def test_logits_are_fp32_under_autocast():
    router = make_router()
    hidden = torch.randn(9, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = router(hidden).logits
    assert torch.equal(logits, router(hidden).logits)


def test_logits_from_bf16_hidden_states_are_those_of_fp32_arithmetic():
    router = make_router()
    hidden = torch.randn(50, D).bfloat16()
    exact = hidden.double() @ router.weight.double().t()
    assert (router(hidden).logits - exact).abs().max() < 1e-5


def test_a_padding_token_sends_nothing_counts_nowhere_and_gets_no_gradient():
    torch.manual_seed(1)
    router = make_router().train()
    hidden = torch.randn(7, D, requires_grad=True)
    mask = torch.tensor([False, True, False, False, True, True, False])
    routing = router(hidden, mask)
    assert (routing.expert_ids[mask] == E).all()
    assert (routing.expert_weights[mask] == 0).all()
    assert routing.tokens_per_expert.sum() == router.tokens_per_expert.sum() == 4 * 2
    (routing.expert_weights * torch.randn(7, 2)).sum().backward()
    assert (hidden.grad[mask] == 0).all()
    assert (hidden.grad[~mask] != 0).any(1).all()
    other = router(hidden[~mask])
    assert torch.equal(other.expert_ids, routing.expert_ids[~mask])


def test_counts_grow_in_training_only():
    router = make_router(3)
    hidden = torch.randn(5, D)
    router.eval()(hidden)
    assert router.tokens_per_expert.sum() == 0
    first = router.train()(hidden).tokens_per_expert
    second = router(torch.randn(4, D)).tokens_per_expert
    assert torch.equal(router.tokens_per_expert, first + second)
    assert router.tokens_per_expert.sum() == (5 + 4) * 3
    assert router.tokens_per_expert.dtype == torch.int64
    assert "tokens_per_expert" not in router.state_dict()
    assert "bias" in router.state_dict()


def keep_marked(ctx, op, *args, **kwargs):
    marked = getattr(op, "must_save", False)
    return CheckpointPolicy.MUST_SAVE if marked else CheckpointPolicy.PREFER_RECOMPUTE


def keep_products_too(ctx, op, *args, **kwargs):
    if op in (torch.ops.aten.mm.default, torch.ops.aten.sort.stable, torch.ops.aten.gather.default):
        return CheckpointPolicy.PREFER_SAVE
    return keep_marked(ctx, op)


@pytest.mark.parametrize("kind", ["plain", "reentrant", "marked", "selective"])
def test_a_recomputation_is_not_counted(kind):
    router = make_router().train()
    hidden = torch.randn(5, D, requires_grad=True)

    def forward(x):
        return router(x).expert_weights.square().sum()

    options = {"use_reentrant": kind == "reentrant"}
    if kind in ("marked", "selective"):
        policy = keep_marked if kind == "marked" else keep_products_too
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)
    checkpoint(forward, hidden, **options).backward()
    assert router.tokens_per_expert.sum() == 5 * 2


def test_a_recomputation_does_not_choose_again(monkeypatch):
    """The second time the same tokens are seen, ties would break the other way."""
    router = make_router(2).train()
    hidden = with_logits(router, torch.zeros(5, E)).requires_grad_()
    seen = []

    def forward(x):
        routing = router(x)
        seen.append(routing.expert_ids)
        return (routing.expert_weights * torch.arange(10.0).view(5, 2)).sum()

    original = torch.sort

    def sort_the_other_way(choice, **options):
        values, indices = original(choice.flip(-1), **options)
        return torch.return_types.sort((values, choice.shape[-1] - 1 - indices))

    loss = checkpoint(
        forward, hidden, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(keep_marked)
    )
    monkeypatch.setattr(torch, "sort", sort_the_other_way)
    assert router(hidden).expert_ids.tolist() == [[E - 1, E - 2]] * 5, "the replay does not flip ties"
    loss.backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])


@pytest.mark.filterwarnings("ignore:top_k = 1 with")
@pytest.mark.parametrize("score", ["sigmoid", "softmax", "softmax_topk"])
@pytest.mark.parametrize(("dim", "num_experts", "top_k"), [(24, 10, 2), (7, 5, 3), (33, 60, 5), (5, 2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_routing_does_not_depend_on_its_neighbours(score, dim, num_experts, top_k, dtype):
    """Neither on their number nor on where in memory they lie."""
    torch.manual_seed(0)
    router = make_router(top_k, dim=dim, num_experts=num_experts, score=score)
    hidden, grad, logit_grad = (torch.randn(300, width) for width in (dim, top_k, num_experts))
    hidden = hidden.to(dtype)

    def run(start, stop):
        part = hidden[start:stop].detach().requires_grad_()
        routing = router(part)
        (routing.expert_weights * grad[start:stop]).sum().backward(retain_graph=True)
        routing.logits.backward(logit_grad[start:stop])
        return routing.expert_ids, routing.logits, routing.expert_weights, part.grad

    everything = run(0, 300)
    for start, stop in [(0, 1), (0, 2), (1, 2), (3, 6), (5, 9), (5, 22), (30, 131), (299, 300)]:
        for alone, together in zip(run(start, stop), everything, strict=True):
            assert torch.equal(alone, together[start:stop])


def test_gradients_pass_gradcheck():
    router = make_router(3, num_groups=2, top_groups=2, scale=1.7).double()
    hidden = torch.randn(4, D, dtype=torch.float64, requires_grad=True)

    def weights(x, weight):
        return torch.func.functional_call(router, {"weight": weight}, (x,)).expert_weights

    assert torch.autograd.gradcheck(weights, (hidden, router.weight))


def test_meta_then_to_empty_leaves_nothing_uninitialised():
    with torch.device("meta"):
        router = TopKRouter(D, E, 2)
    assert router(torch.empty(5, D, device="meta")).expert_weights.shape == (5, 2)
    router.to_empty(device="cpu")
    for tensor in (router.weight.data, router.bias, router.tokens_per_expert):
        tensor.fill_(77)
    router.init_weights(0.02, torch.Generator().manual_seed(3))
    other = TopKRouter(D, E, 2)
    other.init_weights(0.02, torch.Generator().manual_seed(3))
    assert torch.equal(router.weight, other.weight)
    assert 0.01 < router.weight.std() < 0.03
    assert not router.bias.any()
    assert not router.tokens_per_expert.any()


def test_forced_balance_is_even_and_without_bias_there_is_no_buffer():
    router = make_router(2, forced_balance=True, selection_bias=False)
    routing = router(torch.randn(9, D))
    assert routing.tokens_per_expert.tolist() == [3] * E
    assert router.bias is None
    assert set(router.state_dict()) == {"weight"}


def test_no_tokens():
    routing = make_router()(torch.randn(0, D))
    assert routing.expert_ids.shape == (0, 2)
    assert routing.tokens_per_expert.tolist() == [0] * E


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"top_k": 7}, "top_k = 7"),
        ({"top_k": 0}, "top_k = 0"),
        ({"score": "tanh"}, "score = 'tanh'"),
        ({"num_groups": 4}, "num_groups = 4"),
        ({"num_groups": 3, "top_groups": 4}, "top_groups = 4"),
        ({"num_groups": 3, "top_groups": 1, "top_k": 3}, "at most 2"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options, key):
    with pytest.raises(ValueError, match=key):
        TopKRouter(D, E, **{"top_k": 2, **options})


def router_gradient(router):
    """What a loss of the weights leaves in the router."""
    hidden = torch.randn(50, router.dim, generator=torch.Generator().manual_seed(0))
    router(hidden).expert_weights.square().sum().backward()
    return router.weight.grad.abs().max().item()


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({}, "normalize=False"),
        ({"score": "softmax"}, "normalize=False"),
        ({"score": "softmax_topk", "normalize": False}, "score by 'sigmoid'"),
        ({"num_groups": 6, "top_groups": 1}, "normalize=False"),
        ({"score": "softmax", "num_experts": 1, "normalize": False}, "over several experts"),
    ],
    ids=["sigmoid", "softmax", "softmax of one", "groups of one expert", "one expert"],
)
def test_a_weight_that_is_always_one_is_warned_of(options, fix):
    with pytest.warns(UserWarning, match="top_k = 1 with .*learns nothing") as warned:
        router = make_router(1, **options)
    assert fix in str(warned[0].message)
    assert warned[0].filename == __file__
    assert router_gradient(router) < 1e-6


@pytest.mark.parametrize(
    "options", [{"normalize": False}, {"normalize": False, "score": "softmax"}, {"normalize": False, "num_groups": 6}]
)
def test_one_expert_with_a_weight_of_its_own_is_no_mistake(options):
    assert router_gradient(make_router(1, **options)) > 1e-2

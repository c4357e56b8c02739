"""N1: the layer on n ranks has the bits of one replicated layer on the ranks' batches one after the other."""

import itertools

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ep_dispatch import shard_experts
from moe_core import GroupedExperts, MoE
from moe_core.testing import run_ranks


@attrs.frozen
class Case:
    tokens: tuple[int, ...]
    """T by rank."""
    num_experts: int = 10
    top_k: int = 2
    dim: int = 24
    hidden_dim: int = 20
    routing: str = "random"
    masked: bool = False
    gated: bool = False
    activation: str = "relu2"
    backend: str = "auto"
    dtype: str = "float32"
    fsdp: bool = False
    """Whether FSDP, over one shard, gathers and reduces the experts' weights."""
    seed: int = 0


def draw_routing(case, total):
    expert, top_k, degree = case.num_experts, case.top_k, len(case.tokens)
    chunk = -(-expert // degree)
    ids = torch.rand(total, expert).argsort(1)[:, :top_k]
    if case.routing == "all_to_one":
        ids[:] = expert - 1
    elif case.routing == "first_rank_only":
        ids %= chunk
    elif case.routing == "second_rank_only":
        first = chunk % expert
        ids = first + ids % min(chunk, expert - first)
    elif case.routing == "last_rank_idle":
        ids %= max(1, chunk * (degree - 1))
    if case.masked:
        ids[torch.rand(total) < 0.3] = expert
        ids[torch.rand(ids.shape) < 0.1] = expert
    return ids


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def differences(case, mesh):
    """On every rank: what of the layer under expert parallelism has other bits than the replicated one."""
    rank, degree = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    options = {"gated": case.gated, "activation": case.activation, "grouped_gemm": case.backend, "dtype": dtype}
    whole, layer = (GroupedExperts(case.num_experts, case.dim, case.hidden_dim, **options) for _ in range(2))
    layer.load_state_dict(whole.state_dict())
    shard_experts(layer, mesh["ep"])
    if case.fsdp:
        # the weights of a unit have one storage dtype, and so have the layer's without FSDP
        fully_shard(layer, mesh=mesh["shard"], mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    total, mine = sum(case.tokens), slice(sum(case.tokens[:rank]), sum(case.tokens[: rank + 1]))
    hidden, weights = torch.randn(total, case.dim).to(dtype), torch.rand(total, case.top_k)
    ids, grad = draw_routing(case, total), torch.randn(total, case.dim).to(dtype)

    def step(module, part):
        x, w = (t[part].clone().requires_grad_() for t in (hidden, weights))
        out = module(x, ids[part], w)
        out.backward(grad[part])
        return out, x.grad, w.grad

    names = ("output", "hidden", "expert_weights")
    expected, got = step(whole, slice(None)), step(layer, mine)
    wrong = [n for n, a, b in zip(names, expected, got, strict=True) if not torch.equal(a[mine], b)]
    for (name, full), sharded in zip(whole.named_parameters(), layer.parameters(), strict=True):
        if not torch.equal(full.grad.chunk(degree)[rank], local(sharded.grad)):
            wrong.append(name)
    return wrong


def all_differences(cases):
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("shard", "ep"))
    return [(case, wrong) for case in cases if (wrong := differences(case, mesh))]


SIZES = {1: (4, 5, 6, 7, 10, 16, 60), 2: (4, 5, 6, 7, 10, 16, 60), 4: (4, 7, 10, 16, 60)}
"""Numbers of experts by degree; 5 and 6 leave one of 4 ranks without an expert."""
TOKENS = {
    1: [(9,), (0,), (1,), (300,)],
    2: [(13, 5), (0, 31), (300, 1), (64, 0)],
    4: [(7, 0, 3, 30), (0, 0, 1, 0), (41, 300, 2, 17), (1, 64, 0, 16)],
}
ROUTINGS = ("random", "all_to_one", "first_rank_only", "second_rank_only", "last_rank_idle")
BACK_ENDS = (
    (("float32", "loop"), ("bfloat16", "grouped_mm")),
    (("bfloat16", "loop"), ("float32", "grouped_mm")),
)
ACTIVATIONS = ((False, "relu2"), (True, "silu"))


def choices(num_experts):
    few = {1, 2, 7, num_experts - 1, num_experts}
    return range(1, num_experts + 1) if num_experts <= 10 else sorted(few)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_any_number_of_experts_and_choices(degree):
    """All numbers of choices up to 10 experts; what is not crossed with them takes turns."""
    turns = itertools.cycle(itertools.product(TOKENS[degree], ROUTINGS, (False, True), ACTIVATIONS))
    sizes = [(num_experts, top_k) for num_experts in SIZES[degree] for top_k in choices(num_experts)]
    cases = []
    for number, (num_experts, top_k) in enumerate(sizes):
        for dtype, backend in BACK_ENDS[number % 2]:
            # every seventh, so that each value meets each other one soon; 80 combinations do not divide by 7
            tokens, routing, masked, (gated, activation) = next(itertools.islice(turns, 6, None))
            tokens = TOKENS[degree][0] if top_k > 10 else tokens  # few rows where each token makes many
            options = {"dim": 32, "hidden_dim": 32, "dtype": dtype, "backend": backend}
            options |= {"routing": routing, "masked": masked, "gated": gated, "activation": activation}
            cases.append(Case(tokens, num_experts, top_k, **options))
    for name, values in {"tokens": TOKENS[degree], "routing": ROUTINGS, "masked": (False, True)}.items():
        assert {getattr(case, name) for case in cases} == set(values)
    assert run_ranks(all_differences, degree, cases) == [[]] * degree


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_any_routing_in_fp32_and_bf16_with_both_back_ends(degree):
    tokens = TOKENS[degree][0]
    cases = [
        Case(
            tokens, top_k=3, dim=dim, routing=routing, dtype=dtype, backend=backend, gated=gated, activation=activation
        )
        for routing in ROUTINGS
        for dtype, backend, dim in (
            ("float32", "loop", 24),
            ("float32", "grouped_mm", 24),
            ("bfloat16", "loop", 24),
            ("bfloat16", "auto", 24),  # a loop: hidden_dim is no multiple of 8
        )
        for gated, activation in ACTIVATIONS
    ]
    assert run_ranks(all_differences, degree, cases) == [[]] * degree


@pytest.mark.parametrize("degree", [2, 4])
def test_widths_that_leave_rows_unaligned_and_vectors_incomplete(degree):
    """BLAS and vectorised functions round otherwise there, unless the layer prevents it."""
    cases = [
        Case(TOKENS[degree][0], dim=7, hidden_dim=5, gated=True, activation=activation, dtype=dtype)
        for activation in ("silu", "gelu", "tanh")
        for dtype in ("float32", "bfloat16")
    ]
    assert run_ranks(all_differences, degree, cases) == [[]] * degree


def test_no_tokens_anywhere_and_on_all_ranks_but_one():
    cases = [Case((0, 0)), Case((0, 6)), Case((6, 0), routing="first_rank_only"), Case((0, 6), routing="all_to_one")]
    cases += [attrs.evolve(case, fsdp=True, dtype=dtype) for case in cases for dtype in ("float32", "bfloat16")]
    assert run_ranks(all_differences, 2, cases) == [[]] * 2


@pytest.mark.parametrize("degree", [2, 4])
def test_whatever_hypothesis_draws(degree):
    @settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(data=st.data())
    def property_holds(data):
        cases = []
        for _ in range(10):
            num_experts = data.draw(st.sampled_from(SIZES[degree]))
            drawn = st.builds(
                Case,
                tokens=st.tuples(*[st.sampled_from([0, 1, 2, 3, 5, 16, 17, 40, 150])] * degree),
                num_experts=st.just(num_experts),
                top_k=st.integers(1, min(num_experts, 8)),
                dim=st.sampled_from([7, 16, 24]),
                hidden_dim=st.sampled_from([5, 16, 20]),
                routing=st.sampled_from(ROUTINGS),
                masked=st.booleans(),
                gated=st.booleans(),
                activation=st.sampled_from(["relu2", "silu"]),
                dtype=st.sampled_from(["float32", "bfloat16"]),
                fsdp=st.booleans(),
                seed=st.integers(0, 1000),
            )
            cases.append(data.draw(drawn))
        assert run_ranks(all_differences, degree, cases) == [[]] * degree

    property_holds()


@attrs.frozen
class LayerCase:
    tokens: tuple[int, ...]
    num_experts: int
    top_k: int
    dtype: str
    shared_hidden_dim: int = 32
    masked: bool = False
    bias: float = 0.0
    """On expert 0: large enough, every token chooses it."""


def whole_layer(case, mesh):
    """Router and shared expert included; their gradients are summed over ranks, in another order."""
    rank, degree = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    options = {"dim": 24, "num_experts": case.num_experts, "top_k": case.top_k, "hidden_dim": 16}
    options |= {"shared_hidden_dim": case.shared_hidden_dim, "dtype": getattr(torch, case.dtype)}
    whole, layer = MoE(**options), MoE(**options)
    whole.router.bias[0] = case.bias
    layer.load_state_dict(whole.state_dict())
    names = [name for name, _ in layer.named_parameters()]
    shard_experts(layer, mesh)
    assert [name for name, _ in layer.named_parameters()] == names
    total, mine = sum(case.tokens), slice(sum(case.tokens[:rank]), sum(case.tokens[: rank + 1]))
    hidden, grad = (torch.randn(total, 24).to(options["dtype"]) for _ in range(2))
    mask = torch.rand(total) < 0.3 if case.masked else torch.zeros(total, dtype=torch.bool)
    x, part = hidden.clone().requires_grad_(), hidden[mine].clone().requires_grad_()
    expected, out = whole(x, mask), layer(part, mask[mine])
    expected.backward(grad)
    out.backward(grad[mine])
    result = {"output": torch.equal(out, expected[mine]), "hidden": torch.equal(part.grad, x.grad[mine])}
    for (name, one), full in zip(layer.named_parameters(), whole.parameters(), strict=True):
        if name.startswith("experts."):
            result[name] = torch.equal(local(one.grad), full.grad.chunk(degree)[rank])
        else:
            total = one.grad.double()
            dist.all_reduce(total)
            error = (total - full.grad.double()).norm() / full.grad.double().norm().clamp_min(1e-30)
            result[name] = error.item() < (1e-6 if full.grad.dtype == torch.float32 else 2e-2)
    return [name for name, holds in result.items() if not holds]


def whole_layers(cases):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    return [(case, wrong) for case in cases if (wrong := whole_layer(case, mesh))]


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_whole_layer_and_the_router_gradients_summed_over_the_ranks(degree):
    """Router gradients to 1e-6; in bf16 the router is fp32 too, and the shared expert's gradients are bf16."""
    # one choice, normalised, has the weight 1 whatever the router does, and no gradient
    sizes = ((4, 2), (7, 7), (10, 3), (16, 16), (60, 6))
    cases = [
        LayerCase(tokens, num_experts, top_k, ("float32", "bfloat16")[(i + j) % 2], masked=i == 2, bias=9.0 * (j == 2))
        for i, tokens in enumerate(TOKENS[degree])
        for j, (num_experts, top_k) in enumerate(sizes)
    ]
    assert run_ranks(whole_layers, degree, cases) == [[]] * degree

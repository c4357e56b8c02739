"""Grouped experts against a plain loop in float64, both back ends, and rows that belong to no expert."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from moe_core import GroupedExperts, _grouped_gemm
from moe_core.testing import count_host_syncs, run_ranks

E, D, H, T, K = 5, 24, 16, 11, 3

ACTIVATIONS = {
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
}


def make_case(tokens=T, *, dim=D, num_experts=E, top_k=K, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, dim).to(dtype).requires_grad_()
    choices = [torch.randperm(num_experts)[:top_k] for _ in range(tokens)]
    ids = torch.stack(choices) if tokens else torch.empty(0, top_k, dtype=torch.int64)
    weights = torch.rand(tokens, top_k).requires_grad_()
    return hidden, ids, weights, torch.randn(tokens, dim).to(dtype)


def make_experts(seed=0, *, num_experts=E, dim=D, hidden_dim=H, dtype=torch.float32, **options):
    experts = GroupedExperts(num_experts, dim, hidden_dim, dtype=dtype, **options)
    experts.init_weights(0.3, generator=torch.Generator().manual_seed(seed))
    return experts


def reference(experts, hidden, ids, weights, grad, activation):
    """Expert outputs token by token in float64; returns the output and the gradients of inputs and weights."""
    hidden, weights = (t.detach().double().requires_grad_() for t in (hidden, weights))
    parameters = [p.detach().double().requires_grad_() for p in experts.parameters()]
    up, down = parameters
    outputs = []
    for t in range(len(hidden)):
        total = torch.zeros(hidden.shape[1], dtype=torch.float64)
        for k in range(ids.shape[1]):
            expert = int(ids[t, k])
            if expert == experts.num_experts:
                continue
            inner = up[expert] @ hidden[t]
            if experts.gated:
                gate, inner = inner.split(len(inner) // 2)
                inner = activation(gate) * inner
            else:
                inner = activation(inner)
            total = total + weights[t, k] * (down[expert] @ inner)
        outputs.append(total)
    out = torch.stack(outputs)
    inputs = (hidden, weights, *parameters)
    grads = torch.autograd.grad(out, inputs, grad.double(), materialize_grads=True)
    return out, *grads


def run(experts, hidden, ids, weights, grad):
    for leaf in (hidden, weights, *experts.parameters()):
        leaf.grad = None
    out = experts(hidden, ids, weights)
    out.backward(grad)
    return out, hidden.grad, weights.grad, *(p.grad for p in experts.parameters())


@pytest.mark.parametrize("backend", ["auto", "loop", "grouped_mm"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["relu2", "silu", "gelu"])
def test_output_and_gradients_equal_a_plain_loop(backend, gated, activation):
    experts = make_experts(activation=activation, gated=gated, grouped_gemm=backend)
    case = make_case()
    for ours, exact in zip(run(experts, *case), reference(experts, *case, ACTIVATIONS[activation]), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_bf16_is_close_to_exact_and_accumulates_in_fp32(backend):
    experts = make_experts(dtype=torch.bfloat16, grouped_gemm=backend)
    case = make_case(dtype=torch.bfloat16)
    results = run(experts, *case)
    assert results[0].dtype == torch.bfloat16
    assert results[2].dtype == torch.float32
    for ours, exact in zip(results, reference(experts, *case, ACTIVATIONS["relu2"]), strict=True):
        error = (ours.double() - exact).norm() / exact.norm()
        assert error < 1e-2


def test_the_sum_over_k_does_not_round_to_bf16_in_between():
    """256 + 1 + 1 is 258 in bf16; rounding after each addition leaves 256."""
    experts = GroupedExperts(3, 1, 1, activation=lambda x: x, dtype=torch.bfloat16)
    torch.nn.init.ones_(experts.up_proj)
    with torch.no_grad():
        experts.down_proj.copy_(torch.tensor([256.0, 1.0, 1.0]).view(3, 1, 1))
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    out = experts(hidden, torch.tensor([[0, 1, 2]]), torch.ones(1, 3))
    assert out.item() == 258.0
    out.backward(torch.ones_like(out))
    assert hidden.grad.item() == 258.0


def test_back_ends_give_the_same_bits():
    case = make_case()
    looped, grouped = (make_experts(grouped_gemm=backend) for backend in ("loop", "grouped_mm"))
    for one, other in zip(run(looped, *case), run(grouped, *case), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("instructions", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cpu_without_16_bit_instructions_multiplies_in_fp32_to_the_same_values(dtype, instructions, monkeypatch):
    monkeypatch.setattr(_grouped_gemm, "_has_instructions", lambda _: instructions)
    case = make_case(dtype=dtype)
    results = {b: run(make_experts(dtype=dtype, grouped_gemm=b), *case) for b in ("auto", "loop", "grouped_mm")}
    exact = reference(make_experts(dtype=dtype), *case, ACTIVATIONS["relu2"])
    for backend, result in results.items():
        assert result[0].dtype == dtype
        for ours, expected in zip(result, exact, strict=True):
            assert (ours.double() - expected).norm() < 1e-2 * expected.norm(), backend
    if not instructions:
        for one, other, third in zip(*results.values(), strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, third)


def test_each_choice_meets_its_own_expert_and_weight():
    """Expert i multiplies by i + 1, so any mix-up shows."""
    experts = GroupedExperts(E, D, D, activation=lambda x: x)
    with torch.no_grad():
        experts.up_proj.copy_(torch.eye(D).expand(E, D, D))
        experts.down_proj.copy_(torch.arange(1.0, E + 1).view(E, 1, 1) * torch.eye(D))
    hidden, ids, weights, _ = make_case()
    factor = (weights * (ids + 1)).sum(1, keepdim=True)
    torch.testing.assert_close(experts(hidden, ids, weights), hidden * factor)


@pytest.fixture
def poisoned_memory():
    """Whatever torch allocates without filling it holds NaN, in its own kernels too."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", ["auto", "loop", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_idle_experts_get_gradients_of_exactly_zero(backend, dtype, poisoned_memory):
    """256 experts, and tokens for three of them."""
    experts = make_experts(num_experts=256, dtype=dtype, grouped_gemm=backend)
    hidden, _, weights, grad = make_case(tokens=3, top_k=2, dtype=dtype)
    ids = torch.tensor([[3, 254], [254, 7], [256, 256]])
    results = run(experts, hidden, ids, weights, grad)
    assert all(torch.isfinite(result).all() for result in results)
    idle = [e for e in range(256) if e not in (3, 7, 254)]
    for parameter in experts.parameters():
        assert (parameter.grad[idle] == 0).all()
        assert (parameter.grad[[3, 7, 254]] != 0).flatten(1).any(1).all()


@pytest.mark.parametrize("backend", ["auto", "loop", "grouped_mm"])
def test_no_tokens_still_give_every_gradient(backend):
    experts = make_experts(grouped_gemm=backend)
    out, hidden_grad, weights_grad, *grads = run(experts, *make_case(tokens=0))
    assert out.shape == hidden_grad.shape == (0, D)
    assert weights_grad.shape == (0, K)
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_a_share_without_experts_gives_zeros(backend):
    gemm = _grouped_gemm.resolve(backend)
    rows, weight = torch.randn(5, 16, requires_grad=True), torch.randn(0, 32, 16, requires_grad=True)
    out = gemm(rows, weight, torch.zeros(0, dtype=torch.int64))
    out.sum().backward()
    assert out.shape == (5, 32)
    assert not out.any()
    assert not rows.grad.any()
    assert weight.grad.shape == weight.shape


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_rows_past_the_last_expert_give_zeros_whatever_they_hold(backend):
    multiply = {"loop": _grouped_gemm.loop, "grouped_mm": _grouped_gemm.grouped_mm}[backend]
    rows, weight = torch.randn(9, D), torch.randn(3, H, D, requires_grad=True)
    rows[6:] = float("nan")
    rows.requires_grad_()
    out = multiply(rows, weight, torch.tensor([2, 0, 4]))
    assert (out[6:] == 0).all()
    torch.testing.assert_close(out[2:6], F.linear(rows[2:6], weight[2]))
    grad = torch.randn(9, H)
    grad[6:] = float("inf")
    out.backward(grad)
    assert (rows.grad[6:] == 0).all()
    assert (weight.grad[1] == 0).all()
    torch.testing.assert_close(weight.grad[2], grad[2:6].t() @ rows[2:6].detach())


def test_what_lies_past_the_last_expert_is_dropped_even_if_it_is_nan():
    """`F.grouped_mm` leaves those rows of its result as the allocator gave them."""
    rows = torch.full((4, 3), float("nan"))
    rows[:2] = 1.0
    assert _grouped_gemm._zero_past(rows, torch.tensor(2)).tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2


@pytest.mark.parametrize("backend", ["auto", "loop", "grouped_mm"])
def test_masked_choices_equal_a_plain_loop_without_them(backend):
    experts = make_experts(grouped_gemm=backend)
    hidden, ids, weights, grad = make_case()
    ids[2], ids[5], ids[7, 1] = E, E, E
    with torch.no_grad():
        hidden[2] = 1e30  # padding may hold anything
    exact = reference(experts, hidden, ids, weights, grad, ACTIVATIONS["relu2"])
    for ours, expected in zip(run(experts, hidden, ids, weights, grad), exact, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)
    assert (hidden.grad[[2, 5]] == 0).all()
    assert (weights.grad[[2, 5]] == 0).all()


@pytest.mark.parametrize(("dim", "hidden_dim"), [(6, 5), (7, 16), (24, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_auto_takes_the_loop_where_grouped_mm_cannot_go(dim, hidden_dim, dtype):
    experts = make_experts(dim=dim, hidden_dim=hidden_dim, dtype=dtype)
    case = make_case(dim=dim, dtype=dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-6}[dtype]
    for ours, exact in zip(run(experts, *case), reference(experts, *case, ACTIVATIONS["relu2"]), strict=True):
        assert (ours.double() - exact).norm() <= tolerance * exact.norm()


def test_auto_takes_grouped_mm_where_it_can_and_then_reads_nothing_back():
    experts = make_experts(dim=32, hidden_dim=16)
    case = make_case(dim=32)
    with count_host_syncs() as syncs:
        run(experts, *case)
    assert syncs.total == 0
    looped = make_experts(dim=32, hidden_dim=16, grouped_gemm="loop")
    with count_host_syncs() as syncs:
        run(looped, *case)
    assert syncs.total == 1


def test_expanded_gradients_are_fine():
    for backend in ("loop", "grouped_mm"):
        experts = make_experts(grouped_gemm=backend)
        hidden, ids, weights, _ = make_case()
        experts(hidden, ids, weights).sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in experts.parameters())
        rows = torch.randn(4, D, requires_grad=True)
        multiply = getattr(_grouped_gemm, backend)
        multiply(rows, experts.up_proj, torch.tensor([1, 0, 2, 1, 0])).sum().backward()
        assert torch.isfinite(rows.grad).all()
        experts.zero_grad()
        none = torch.randn(0, D, requires_grad=True)
        multiply(none, experts.up_proj, torch.zeros(E, dtype=torch.int64)).sum().backward()
        assert none.grad.shape == (0, D)
        assert (experts.up_proj.grad == 0).all()


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_pass_gradcheck(gated):
    experts = make_experts(dim=4, hidden_dim=3, dtype=torch.float64, gated=gated, activation="silu")
    hidden, ids, weights, _ = make_case(tokens=4, dim=4, dtype=torch.float64)
    ids[1, 2] = E
    names = [name for name, _ in experts.named_parameters()]

    def call(x, w, *parameters):
        return torch.func.functional_call(experts, dict(zip(names, parameters, strict=True)), (x, ids, w))

    inputs = (hidden, weights.double().detach().requires_grad_(), *experts.parameters())
    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("activation", ["silu", "gelu", "sigmoid", "tanh", "gelu_tanh", "relu", "relu2"])
def test_a_tokens_output_does_not_depend_on_its_neighbours(activation):
    """Each expert sees the same rows in the same order, with and without other experts' rows around them."""
    experts = make_experts(dim=7, hidden_dim=5, activation=activation)
    hidden, _, _, grad = make_case(tokens=40, dim=7)
    ids = torch.arange(40).view(-1, 1) % E
    weights = torch.rand(40, 1)
    out, together, _, *stacks = run(experts, hidden, ids, weights.requires_grad_(), grad)
    for expert in range(E):
        mine = ids[:, 0] == expert
        alone = hidden.detach()[mine].clone().requires_grad_()
        result = run(experts, alone, ids[mine], weights[mine].detach().requires_grad_(), grad[mine])
        assert torch.equal(result[0], out[mine])
        assert torch.equal(result[1], together[mine])
        for stack, full in zip(result[3:], stacks, strict=True):
            assert torch.equal(stack[expert], full[expert])


def test_the_same_step_twice_has_the_same_bits():
    experts = make_experts()
    case = make_case()
    first = [result.clone() for result in run(experts, *case)]
    assert all(torch.equal(one, other) for one, other in zip(first, run(experts, *case), strict=True))


def test_meanwhile_runs_between_dispatch_and_the_experts():
    events = []

    class Recorder:
        def dispatch(self, hidden, expert_ids, num_experts):
            from moe_core._experts import LocalDispatch

            events.append("dispatch")
            dispatched = LocalDispatch().dispatch(hidden, expert_ids, num_experts)

            class Pending:
                def wait(self):
                    events.append("wait")
                    return dispatched

            return Pending()

        def combine(self, rows, expert_weights, handle):
            from moe_core._experts import LocalDispatch

            events.append("combine")
            return LocalDispatch().combine(rows, expert_weights, handle)

    hidden, ids, weights, _ = make_case()
    experts = make_experts(dispatcher=Recorder())
    out = experts(hidden, ids, weights, meanwhile=lambda: events.append("meanwhile"))
    assert events == ["dispatch", "meanwhile", "wait", "combine"]
    assert torch.equal(out, make_experts()(hidden, ids, weights))


def test_a_third_party_gemm_gets_three_arguments():
    def plain(rows, weight, tokens_per_expert):
        return torch.cat([r @ w.t() for r, w in zip(rows.split(tokens_per_expert.tolist()), weight, strict=True)])

    case = make_case()
    for one, other in zip(
        run(make_experts(grouped_gemm=plain), *case), run(make_experts(grouped_gemm="loop"), *case), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_autocast_computes_in_its_dtype_and_returns_the_input_dtype():
    experts = make_experts()
    hidden, ids, weights, _ = make_case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = experts(hidden, ids, weights)
    assert out.dtype == torch.float32
    low = make_experts(dtype=torch.bfloat16)
    assert torch.equal(out, low(hidden.bfloat16(), ids, weights).float())
    out.sum().backward()
    assert experts.up_proj.grad.dtype == torch.float32


def test_meta_shapes_then_initialised_alike_everywhere():
    with torch.device("meta"):
        experts = GroupedExperts(E, D, H, gated=True)
        out = experts(torch.empty(T, D), torch.empty(T, K, dtype=torch.int64), torch.empty(T, K))
    assert out.shape == (T, D)
    experts.to_empty(device="cpu")
    for parameter in experts.parameters():
        parameter.data.fill_(float("nan"))
    experts.init_weights(0.02, 0.01, torch.Generator().manual_seed(5))
    assert torch.isfinite(experts.gate_up_proj).all()
    assert experts.gate_up_proj.shape == (E, 2 * H, D)
    assert 0.018 < experts.gate_up_proj.std() < 0.022
    assert 0.009 < experts.down_proj.std() < 0.011
    for one, other in itertools.combinations(range(E), 2):
        assert not torch.equal(experts.down_proj[one], experts.down_proj[other])
    low = GroupedExperts(E, D, H, gated=True, dtype=torch.bfloat16)
    low.init_weights(0.02, 0.01, torch.Generator().manual_seed(5))
    assert torch.equal(low.down_proj, experts.down_proj.bfloat16()), "drawn in bf16 instead of cast"


@pytest.mark.parametrize("gated", [False, True])
def test_a_tokens_weights_multiply_all_that_its_experts_add(gated):
    """A bias beside the gate would be added K times in full; there is none, and none is taken for one."""
    experts = make_experts(gated=gated)
    hidden, ids, weights, _ = make_case()
    once = experts(hidden, ids, weights)
    torch.testing.assert_close(experts(hidden, ids, 2 * weights), 2 * once, rtol=0, atol=0)
    assert (experts(hidden, ids, torch.zeros_like(weights)) == 0).all()
    assert (experts(torch.zeros_like(hidden), ids, weights) == 0).all()
    assert len(list(experts.parameters())) == 2
    biased = {**experts.state_dict(), "down_proj_bias": torch.ones(E, D)}
    with pytest.raises(RuntimeError, match="down_proj_bias"):
        experts.load_state_dict(biased)
    with pytest.raises(TypeError, match="bias"):
        GroupedExperts(E, D, H, bias=True)


def test_gate_rows_come_first():
    experts = GroupedExperts(1, 1, 1, activation=lambda x: x * 0 + 1, gated=True)
    with torch.no_grad():
        experts.gate_up_proj.copy_(torch.tensor([[[5.0], [3.0]]]))
        experts.down_proj.fill_(1.0)
    assert experts(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)).item() == 3.0


def train_placed(placement_names):
    """Experts as DTensors on a mesh of two axes, each rank with tokens of its own for the experts that it holds."""
    import torch.distributed as dist

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "ep"))
    placements = [Shard(0) if name == "shard" else Replicate() for name in placement_names]
    torch.manual_seed(0)
    plain = GroupedExperts(E, D, H, gated=True)
    parts = {name: distribute_tensor(p.detach().clone(), mesh, placements) for name, p in plain.named_parameters()}
    held = parts["down_proj"].to_local().shape[0]
    first = 3 * mesh.get_local_rank("ep") if placement_names[1] == "shard" else 0

    # without a dispatcher tokens name the experts of this rank by their local numbers
    experts = GroupedExperts(held, D, H, gated=True)
    for name, part in parts.items():
        experts.register_parameter(name, torch.nn.Parameter(part))
    torch.manual_seed(1 + dist.get_rank())
    hidden, weights = torch.randn(T, D), torch.rand(T, 2)
    ids = torch.stack([torch.randperm(held)[:2] for _ in range(T)])
    experts(hidden, ids, weights).square().sum().backward()
    plain(hidden, ids + first, weights).square().sum().backward()
    results = []
    for name, whole in plain.named_parameters():
        # each rank's share of the gradient of the whole stack
        dist.all_reduce(whole.grad)
        gradient = experts.get_parameter(name).grad
        results.append([str(p) for p in gradient.placements])
        torch.testing.assert_close(gradient.full_tensor(), whole.grad, rtol=1e-5, atol=1e-5)
    return results


@pytest.mark.parametrize(
    ("placed", "gradients"),
    [
        (("replicate", "replicate"), ["P(sum)", "P(sum)"]),
        (("replicate", "shard"), ["P(sum)", "S(0)"]),
    ],
)
def test_weights_that_are_dtensors_get_the_gradient_of_all_ranks_tokens(placed, gradients):
    assert run_ranks(train_placed, 4, placed) == [[gradients] * 2] * 4


def draw_sharded(axes, num_experts):
    """Experts on (replicas, FSDP shards, ep), poisoned and then drawn: placement, rows here, whole stacks."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("replicate", "shard", "ep"))
    experts = GroupedExperts(num_experts, D, H)
    if mesh["ep"].size() > 1:
        for name, parameter in list(experts.named_parameters()):
            sharded = distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)])
            experts.register_parameter(name, torch.nn.Parameter(sharded))
    if mesh["replicate"].size() > 1:
        fully_shard(experts, mesh=mesh["replicate", "shard"])
    elif mesh["shard"].size() > 1:
        fully_shard(experts, mesh=mesh["shard"])
    for parameter in experts.parameters():
        parameter.detach().to_local().fill_(float("nan"))
    experts.init_weights(0.02, 0.01, torch.Generator().manual_seed(5))
    placements = [type(placement).__name__ for placement in experts.up_proj.placements]
    return placements, len(experts.up_proj.to_local()), [p.full_tensor().detach() for p in experts.parameters()]


STRIDED = ["_StridedShard", "Shard"]


@pytest.mark.parametrize(
    ("axes", "num_experts", "placements", "rows"),
    [
        ((1, 1, 4), 10, ["Shard"], [3, 3, 3, 1]),
        ((1, 4, 1), 5, ["Shard"], [2, 2, 1, 0]),
        ((1, 2, 2), 10, STRIDED, [3, 3, 2, 2]),
        ((1, 2, 2), 5, STRIDED, [2, 1, 1, 1]),
        ((2, 2, 1), 5, ["Replicate", "Shard"], [3, 2, 3, 2]),
        ((2, 1, 2), 5, ["Replicate", *STRIDED], [3, 2, 3, 2]),
        ((4, 1, 1), 5, ["Replicate", "Shard"], [5, 5, 5, 5]),
    ],
)
def test_every_layout_draws_the_same_global_stack_from_one_seed(axes, num_experts, placements, rows):
    whole = GroupedExperts(num_experts, D, H)
    whole.init_weights(0.02, 0.01, torch.Generator().manual_seed(5))
    results = run_ranks(draw_sharded, 4, axes, num_experts)
    assert [result[0] for result in results] == [placements] * 4
    assert [result[1] for result in results] == rows
    for _, _, stacks in results:
        assert all(torch.equal(one, other) for one, other in zip(stacks, whole.parameters(), strict=True))
    for stack in whole.parameters():
        assert all(not torch.equal(one, other) for one, other in itertools.combinations(stack, 2))


def test_experts_that_are_cut_across_are_not_drawn():
    def draw():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        experts = GroupedExperts(3, D, H)
        experts.up_proj = torch.nn.Parameter(distribute_tensor(experts.up_proj.detach(), mesh, [Shard(1)]))
        with pytest.raises(ValueError, match=r"Shard\(dim=1\).*only its first dim may be sharded"):
            experts.init_weights(0.02)

    run_ranks(draw, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GroupedExperts(0, D, H), "num_experts = 0"),
        (lambda: GroupedExperts(E, D, H, activation="swish"), "activation = 'swish'"),
        (lambda: GroupedExperts(E, D, H, grouped_gemm="cutlass"), "grouped_gemm = 'cutlass'"),
        (lambda: make_experts(dim=6, grouped_gemm="grouped_mm")(*make_case(dim=6)[:3]), "not a multiple of 4"),
        (lambda: make_experts(dtype=torch.bfloat16)(*make_case()[:3]), "mixed-precision policy"),
    ],
)
def test_mistakes_are_told(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")  # which backend fits
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # and this
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_experts_with_aligned_widths_equal_eager_ones(dtype):
    torch.manual_seed(0)
    experts = GroupedExperts(8, 64, 64, dtype=dtype)
    compiled = torch.compile(experts, backend="aot_eager")
    hidden = torch.randn(20, 64, dtype=dtype, requires_grad=True)
    ids, weights = torch.randint(7, (20, 2)), torch.rand(20, 2)
    results = []
    for layer in (experts, compiled):
        out = layer(hidden, ids, weights)
        results.append((out, *torch.autograd.grad(out.sum(), [hidden, *experts.parameters()])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

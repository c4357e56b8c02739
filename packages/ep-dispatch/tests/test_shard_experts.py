"""`shard_experts` on meta and real models, what it refuses, and the wrapper for foreign experts."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ep_dispatch import AllToAllDispatcher, ExpertParallelGroupedExperts, LocalDispatcher, shard_experts
from ep_dispatch._dispatchers import chunk_size, owned_experts
from moe_core import GroupedExperts, MoE, TopKRouter
from moe_core.testing import RankFailed, run_ranks

D, F = 12, 8


class Model(nn.Module):
    def __init__(self, num_experts=5):
        super().__init__()
        options = {"dim": D, "top_k": 2, "hidden_dim": F, "shared_hidden_dim": 6}
        sizes = (num_experts, num_experts + 1)
        self.layers = nn.ModuleList([MoE(num_experts=n, **options) for n in sizes])

    def forward(self, hidden):
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


def make_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def shard_a_real_model():
    mesh = make_mesh()
    torch.manual_seed(0)
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    frozen = model.layers[0].experts.up_proj
    frozen.requires_grad_(False)
    assert shard_experts(model, mesh) is model
    checks = [list(model.state_dict()) == list(before)]
    for name, value in model.state_dict().items():
        if ".experts." in name:
            checks.append(isinstance(value, DTensor) and value.placements == (Shard(0),))
            checks.append(torch.equal(value.full_tensor(), before[name]))
            checks.append(torch.equal(value.to_local(), before[name].chunk(2)[dist.get_rank()]))
            checks.append(value.to_local().untyped_storage().nbytes() == value.to_local().nbytes)
        else:
            checks.append(torch.equal(value, before[name]) and not isinstance(value, DTensor))
    experts = model.layers[0].experts
    checks += [not experts.up_proj.requires_grad, experts.down_proj.requires_grad]
    checks.append(isinstance(experts.dispatcher, AllToAllDispatcher))
    checks.append(experts.num_experts == 5)
    return checks


def test_a_real_model_keeps_names_values_and_flags():
    assert all(all(checks) for checks in run_ranks(shard_a_real_model, 2))


def shard_a_meta_model():
    with torch.device("meta"):
        model = Model(num_experts=7)
    shard_experts(model, make_mesh())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    model.to_empty(device="cpu")
    for layer in model.layers:
        layer.init_weights(0.1, 0.1, torch.Generator().manual_seed(1))
    model(torch.randn(5, D)).sum().backward()
    local = model.layers[0].experts.up_proj.to_local()
    return shapes, tuple(local.shape), all(p.grad is not None for p in model.parameters())


def test_a_meta_model_keeps_global_shapes():
    results = run_ranks(shard_a_meta_model, 3)
    assert [result[1] for result in results] == [(3, F, D), (3, F, D), (1, F, D)]
    for shapes, _, has_gradients in results:
        assert shapes["layers.0.experts.up_proj"] == (7, F, D)
        assert shapes["layers.1.experts.down_proj"] == (8, D, F)
        assert has_gradients


def on_one_rank():
    model = Model()
    parameters = list(model.parameters())
    shard_experts(model, make_mesh())
    same = all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    return same, model.layers[0].experts.dispatcher is None


def test_one_rank_changes_nothing():
    assert run_ranks(on_one_rank, 1) == [(True, True)]


class Misnamed(nn.Module):
    """Experts that say neither how many they are nor how tokens come to them."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, D, F))


def mistakes():
    degree = dist.get_world_size()
    mesh = make_mesh()
    messages = {}

    def attempt(name, model, on=mesh, **options):
        parameters = list(model.parameters())
        try:
            shard_experts(model, on, **options)
        except ValueError as error:
            assert all(map(lambda one, other: one is other, parameters, model.parameters()))
            messages[name] = str(error)

    attempt("dense", nn.Linear(3, 3))
    attempt("misnamed", nn.ModuleList([Misnamed()]))
    attempt("foreign alone", nn.ModuleList([ForeignExperts(4, D, F)]))
    attempt("foreign beside", nn.ModuleList([GroupedExperts(4, D, F), ForeignExperts(4, D, F)]))
    attempt("foreign, not required", nn.ModuleList([ForeignExperts(4, D, F)]), require_experts=False)
    attempt("fully sharded", fully_shard(Model(num_experts=4), mesh=mesh))
    again = GroupedExperts(4, D, F)
    again.up_proj = nn.Parameter(distribute_tensor(again.up_proj.detach(), mesh, [Shard(0)]))
    attempt("again", nn.ModuleList([again]))
    odd = GroupedExperts(4, D, F)
    odd.scale = nn.Parameter(torch.ones(1))
    attempt("odd", nn.ModuleList([odd]))
    attempt("two axes", Model(), init_device_mesh("cpu", (degree, 1), mesh_dim_names=("ep", "x")))
    attempt("too few", nn.ModuleList([GroupedExperts(1, D, F)]))
    attempt("none expected", nn.Linear(3, 3), require_experts=False)
    attempt("a router and no experts", TopKRouter(D, 4, 2), require_experts=False)
    return messages


@pytest.mark.parametrize("degree", [1, 2])
def test_mistakes_are_told_on_all_ranks_at_every_degree(degree):
    for messages in run_ranks(mistakes, degree):
        for name in ("dense", "misnamed"):
            assert "no expert stack" in messages[name]
            assert "require_experts = False" in messages[name]
        for name in ("foreign alone", "foreign beside", "foreign, not required"):
            assert "ForeignExperts has 4 experts and no attribute `dispatcher`" in messages[name]
        assert messages["foreign beside"].startswith("1: ")
        assert "call shard_experts before it" in messages["fully sharded"]
        assert "0.up_proj is sharded already" in messages["again"]
        assert "0.scale is [1]: every parameter of an expert stack must be [4, ...]" in messages["odd"]
        assert "ep_mesh has 2 axes" in messages["two axes"]
        assert ("too few" in messages) == (degree == 2)
        assert degree == 1 or "0: num_experts = 1 on ep = 2" in messages["too few"]
        assert {"none expected", "a router and no experts"}.isdisjoint(messages)


def parts_of_a_model():
    """Stages of a pipeline, of which one has no experts; and an expert module of which only some are to be split."""
    mesh = make_mesh()
    stages = [nn.ModuleList([nn.Linear(D, D)]), nn.ModuleList([GroupedExperts(4, D, F)])]
    for stage in stages:
        shard_experts(stage, mesh, require_experts=False)
    mixed = nn.ModuleList([GroupedExperts(4, D, F), ForeignExperts(4, D, F)])
    shard_experts(mixed[0], mesh)
    return [isinstance(p, DTensor) for module in (*stages, mixed) for p in module.parameters()]


def test_parts_of_a_model_are_split_where_they_have_experts():
    assert run_ranks(parts_of_a_model, 2) == [[False, False, True, True, True, True, False, False]] * 2


def from_config(**fields):
    from ep_dispatch._plugin import ExpertParallelizedConfig, expert_parallelized
    from moe_core.plugins import Run

    run = Run({}, world_size=1, rank=0, sub_mesh=lambda mesh, name: mesh).with_part("mesh", make_mesh())
    return expert_parallelized(ExpertParallelizedConfig(**fields), run.with_part("model", nn.Linear(3, 3)))


def test_a_config_says_that_none_is_expected():
    with pytest.raises(RankFailed, match="no expert stack"):
        run_ranks(from_config, 1)
    assert isinstance(run_ranks(lambda: from_config(require_experts=False), 1)[0], nn.Linear)


def test_the_split_is_torch_chunks_and_leaves_nobody_empty():
    for num_experts in range(1, 70):
        for degree in range(1, 12):
            pieces = [len(piece) for piece in torch.arange(num_experts).chunk(degree)]
            if len(pieces) < degree:
                with pytest.raises(ValueError, match="degrees that work: 1"):
                    chunk_size(num_experts, degree)
            else:
                size = chunk_size(num_experts, degree)
                assert [len(owned_experts(num_experts, size, rank)) for rank in range(degree)] == pieces


def test_the_error_names_the_degrees_that_work():
    with pytest.raises(ValueError, match=r"5 on ep = 4 .*\(2, 2, 1, 0\).*degrees that work: 1, 2, 3, 5"):
        chunk_size(5, 4)


class ForeignExperts(nn.Module):
    """Touches only the experts that are hit, as eager code in the wild does."""

    def __init__(self, num_experts, dim, hidden_dim):
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * hidden_dim, dim) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(num_experts, dim, hidden_dim) * 0.3)
        self.act_fn = nn.SiLU()

    def forward(self, hidden, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden)
        assert self.gate_up_proj.shape[0] == self.num_experts
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            if len(token):
                gate, up = (hidden[token] @ self.gate_up_proj[expert].t()).chunk(2, dim=-1)
                rows = (self.act_fn(gate) * up) @ self.down_proj[expert].t()
                out = out.index_add(0, token, rows * top_k_weights[token, place, None])
        return out


def run_wrapped(tokens, idle):
    rank, degree = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    foreign, alone = ForeignExperts(5, D, F), ForeignExperts(5, D, F)
    alone.load_state_dict(foreign.state_dict())
    names = list(foreign.state_dict())
    wrapped = ExpertParallelGroupedExperts(foreign, make_mesh())
    assert list(wrapped.state_dict()) == names
    assert isinstance(wrapped.dispatcher, AllToAllDispatcher if degree > 1 else LocalDispatcher)
    total = sum(tokens)
    hidden, weights, grad = torch.randn(total, D), torch.rand(total, 2), torch.randn(total, D)
    ids = torch.stack([torch.randperm(2 if idle else 5)[:2] for _ in range(total)])
    ids[1] = 5
    mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    results = []
    for module, part in ((alone, slice(None)), (wrapped, mine)):
        x, w = hidden[part].clone().requires_grad_(), weights[part].clone().requires_grad_()
        out = module(x, ids[part], w)
        out.backward(grad[part])
        results.append((out, x.grad, w.grad))
    pairs = [(one[mine], other) for one, other in zip(*results, strict=True)]
    for one, other in zip(alone.parameters(), wrapped.parameters(), strict=True):
        local = other.grad.to_local() if degree > 1 else other.grad
        pairs.append((one.grad.chunk(degree)[rank], local))
    return [torch.allclose(one, other, rtol=1e-5, atol=1e-5) for one, other in pairs]


@pytest.mark.parametrize("tokens", [(9,), (5, 8), (7, 0)])
@pytest.mark.parametrize("idle", [False, True])
def test_foreign_experts_equal_themselves_and_idle_ones_have_gradients(tokens, idle):
    for checks in run_ranks(run_wrapped, len(tokens), tokens, idle):
        assert checks == [True] * 5


def shard_wrapped():
    model = nn.Sequential(ExpertParallelGroupedExperts(ForeignExperts(4, D, F)))
    shard_experts(model, make_mesh())
    model.to(torch.bfloat16)
    out = model[0](torch.randn(3, D).bfloat16(), torch.tensor([[0, 3]] * 3), torch.rand(3, 2))
    return isinstance(model[0].down_proj, DTensor), str(out.dtype)


def test_a_wrapped_module_is_a_stack_like_any_other():
    assert run_ranks(shard_wrapped, 2) == [(True, "torch.bfloat16")] * 2


def test_modules_that_cannot_be_wrapped_are_refused():
    with pytest.raises(ValueError, match="num_experts"):
        ExpertParallelGroupedExperts(nn.Linear(3, 3))
    nested = nn.Module()
    nested.num_experts, nested.inner = 3, nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"inner\.weight"):
        ExpertParallelGroupedExperts(nested)


def idle_rank():
    """Every rank's experts get a gradient, whatever the routing."""
    layer = shard_experts(GroupedExperts(4, D, F), make_mesh())
    hidden = torch.randn(3, D, requires_grad=True)
    layer(hidden, torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2)).sum().backward()
    return [p.grad is not None and bool((p.grad.to_local()[1:] == 0).all()) for p in layer.parameters()]


def test_experts_without_tokens_have_gradients_of_zero():
    assert run_ranks(idle_rank, 2) == [[True, True]] * 2

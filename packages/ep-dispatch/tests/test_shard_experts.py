"""`shard_experts` on meta and real models, what it refuses, and the wrapper for foreign experts."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ep_dispatch import AllToAllDispatcher, ExpertParallelGroupedExperts, LocalDispatcher, shard_experts
from ep_dispatch._split import chunk_size, owned_experts
from moe_core import GroupedExperts, MoE
from moe_core.testing import run_ranks

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


def mistakes():
    mesh = make_mesh()
    messages = []

    def attempt(model, on=mesh):
        try:
            shard_experts(model, on)
        except ValueError as error:
            messages.append(str(error))

    attempt(nn.Linear(3, 3))
    attempt(nn.ModuleList([GroupedExperts(1, D, F)]))
    attempt(fully_shard(Model(num_experts=4), mesh=mesh))
    sharded = shard_experts(Model(num_experts=4), mesh)
    attempt(sharded)
    attempt(Model(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "x")))
    return messages


def test_mistakes_are_told_on_all_ranks():
    for messages in run_ranks(mistakes, 2):
        no_stack, too_many, fsdp, again, two_axes = messages
        assert "no expert stack" in no_stack
        assert "0: num_experts = 1 on ep = 2" in too_many
        assert "call shard_experts before it" in fsdp
        assert "layers.0.experts.up_proj is sharded already" in again or "down_proj is sharded" in again
        assert "ep_mesh has 2 axes" in two_axes


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

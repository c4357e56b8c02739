"""The whole layer: its parts put together, masks, checkpointing, dtypes."""

import subprocess
import sys

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_core import MoE, MoEConfig
from moe_core._moe import SharedExpert

CONFIG = MoEConfig(dim=24, num_experts=5, top_k=2, hidden_dim=16, shared_hidden_dim=40, scale=2.5)


def make_layer(config=CONFIG, **options):
    layer = MoE(config, **options)
    layer.init_weights(0.3, generator=torch.Generator().manual_seed(0))
    layer.router.bias.copy_(torch.linspace(-0.2, 0.2, config.num_experts))
    return layer


def reference(layer, hidden):
    """A plain loop over tokens in float64, from the layer's weights alone."""
    p = {name: value.detach().double() for name, value in layer.state_dict().items()}
    config, out = layer.config, []

    def act(x):
        return F.silu(x) if config.activation == "silu" else x.relu() ** 2

    for token in hidden.detach().double().reshape(-1, config.dim):
        scores = (p["router.weight"] @ token).sigmoid()
        best = (scores + p["router.bias"]).sort(descending=True, stable=True).indices[: config.top_k]
        total = torch.zeros_like(token)
        for expert in best:
            if config.gated:
                gate, up = (p["experts.gate_up_proj"][expert] @ token).chunk(2)
                inner = act(gate) * up
            else:
                inner = act(p["experts.up_proj"][expert] @ token)
            weight = scores[expert] / scores[best].sum() * config.scale
            total += weight * (p["experts.down_proj"][expert] @ inner)
        if config.shared_hidden_dim:
            inner = p["shared_experts.up_proj.weight"] @ token
            if config.gated:
                inner = act(p["shared_experts.gate_proj.weight"] @ token) * inner
            else:
                inner = act(inner)
            total += p["shared_experts.down_proj.weight"] @ inner
        out.append(total)
    return torch.stack(out).view(hidden.shape)


@pytest.mark.parametrize(
    "fields", [{}, {"shared_hidden_dim": 0}, {"gated": True, "activation": "silu"}], ids=["shared", "bare", "swiglu"]
)
def test_layer_equals_a_plain_loop(fields):
    layer = make_layer(attrs.evolve(CONFIG, **fields))
    torch.manual_seed(1)
    hidden = torch.randn(3, 7, 24)
    out, routing = layer.forward_with_routing(hidden)
    assert out.shape == hidden.shape
    assert routing.expert_ids.shape == (21, 2)
    torch.testing.assert_close(out.double(), reference(layer, hidden), rtol=1e-4, atol=1e-5)


def test_fields_may_be_given_as_arguments_and_replace_those_of_a_config():
    layer = MoE(CONFIG, top_k=3, activation=torch.tanh)
    assert layer.config.top_k == layer.router.top_k == 3
    bare = MoE(dim=8, num_experts=4, top_k=2, hidden_dim=8)
    assert bare.shared_experts is None
    assert [name for name, _ in bare.named_parameters()] == ["router.weight", "experts.up_proj", "experts.down_proj"]


def test_names_of_parameters_and_buffers():
    assert sorted(make_layer().state_dict()) == [
        "experts.down_proj",
        "experts.up_proj",
        "router.bias",
        "router.weight",
        "shared_experts.down_proj.weight",
        "shared_experts.up_proj.weight",
    ]


def test_padding_comes_out_as_zero_and_changes_nothing_else():
    layer = make_layer()
    torch.manual_seed(2)
    hidden = torch.randn(2, 9, 24, requires_grad=True)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 4:], mask[1, 7] = True, True
    grad = torch.randn(2, 9, 24)

    out = layer(hidden, mask)
    out.backward(grad)
    got = [p.grad.clone() for p in layer.parameters()]
    assert (out[mask] == 0).all()
    assert (hidden.grad[mask] == 0).all()

    layer.zero_grad()
    short = hidden.detach()[~mask].requires_grad_()
    without = layer(short)
    without.backward(grad[~mask])
    torch.testing.assert_close(out[~mask], without, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad[~mask], short.grad, rtol=1e-5, atol=1e-5)
    for one, other in zip(got, layer.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-4, atol=1e-5)


def test_bf16_layer_routes_in_fp32():
    layer = make_layer().to(torch.bfloat16)
    hidden = torch.randn(50, 24).bfloat16()
    out, routing = layer.forward_with_routing(hidden)
    assert out.dtype == torch.bfloat16
    exact = hidden.float() @ layer.router.weight.t()
    torch.testing.assert_close(routing.logits, exact, rtol=1e-5, atol=1e-5)
    error = (out.double() - reference(layer, hidden)).norm() / out.double().norm()
    assert error < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "hidden_dim"), [(24, 40), (7, 5), (33, 17), (13, 64), (1, 9)])
@pytest.mark.parametrize(("activation", "gated"), [("relu2", False), ("silu", True), ("gelu", False)])
def test_a_tokens_shared_expert_does_not_depend_on_its_neighbours(dtype, dim, hidden_dim, activation, gated):
    """Slices begin at addresses that no allocator would hand out."""
    torch.manual_seed(0)
    shared = SharedExpert(dim, hidden_dim, activation=activation, gated=gated, dtype=dtype)
    hidden, grad = (torch.randn(141, dim).to(dtype) for _ in range(2))

    def run(part):
        rows = hidden[part].detach().requires_grad_()
        out = shared(rows)
        out.backward(grad[part])
        return out.detach(), rows.grad

    out, gradient = run(slice(141))
    for first in (0, 1, 3, 58, 107):
        for tokens in (1, 2, 3, 4, 17, 34):
            part = slice(first, first + tokens)
            alone = run(part)
            assert torch.equal(alone[0], out[part])
            assert torch.equal(alone[1], gradient[part])


class Addresses(TorchDispatchMode):
    """Where the operands of matrix products begin, modulo what BLAS asks for in order to repeat its bits."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.seen += [operand.data_ptr() % 64 for operand in args]
        return func(*args, **(kwargs or {}))


def test_products_of_the_shared_expert_read_from_aligned_memory():
    """In forward and backward, though input, weight and gradient begin anywhere."""

    def anywhere(*shape):
        return torch.randn(shape[0] * shape[1] + 3)[3:].view(shape)

    shared = SharedExpert(16, 32)
    for linear in (shared.up_proj, shared.down_proj):
        linear.weight = torch.nn.Parameter(anywhere(*linear.weight.shape))
    hidden, grad = anywhere(20, 16).requires_grad_(), anywhere(20, 16)
    with Addresses() as addresses:
        shared(hidden).backward(grad)
    assert addresses.seen == [0] * 12


def test_linears_of_the_shared_expert_are_ordinary_ones():
    """What wraps or replaces `nn.Linear`, adapters for example, finds them; they take any leading dims."""
    shared = SharedExpert(7, 5, gated=True)
    assert [name for name, child in shared.named_modules() if isinstance(child, torch.nn.Linear)] == [
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    assert list(shared.state_dict()) == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    hidden = torch.randn(2, 3, 7, requires_grad=True)
    out = shared.up_proj(hidden)
    torch.testing.assert_close(out, hidden @ shared.up_proj.weight.t())
    grad = torch.randn(2, 3, 5)
    ours = torch.autograd.grad(out, [hidden, shared.up_proj.weight], grad)
    torch.testing.assert_close(ours[0], grad @ shared.up_proj.weight)
    torch.testing.assert_close(ours[1], torch.einsum("abo,abi->oi", grad, hidden))
    assert shared.up_proj(torch.empty(0, 7)).shape == (0, 5)
    compiled = torch.compile(shared, backend="eager", fullgraph=True)
    rows = torch.randn(20, 7)
    torch.testing.assert_close(compiled(rows), shared(rows))


def keep_marked(ctx, op, *args, **kwargs):
    marked = getattr(op, "must_save", False)
    return CheckpointPolicy.MUST_SAVE if marked else CheckpointPolicy.PREFER_RECOMPUTE


def keep_products_too(ctx, op, *args, **kwargs):
    name = op._schema.name.partition("::")[2]
    if name in ("mm", "addmm", "bmm", "_grouped_mm"):
        return CheckpointPolicy.PREFER_SAVE
    return keep_marked(ctx, op)


@pytest.mark.parametrize("policy", [None, keep_marked, keep_products_too])
@pytest.mark.parametrize("grouped_gemm", ["loop", "grouped_mm"])
def test_checkpointing_changes_no_bit(policy, grouped_gemm):
    layer = make_layer(grouped_gemm=grouped_gemm).train()
    torch.manual_seed(3)
    hidden = torch.randn(13, 24, requires_grad=True)
    grad = torch.randn(13, 24)

    def step(forward):
        layer.zero_grad()
        layer.router.tokens_per_expert.zero_()
        hidden.grad = None
        forward(hidden).backward(grad)
        return [
            hidden.grad.clone(),
            layer.router.tokens_per_expert.clone(),
            *(p.grad.clone() for p in layer.parameters()),
        ]

    options = {} if policy is None else {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}
    plain = step(layer)
    for one, other in zip(plain, step(lambda x: checkpoint(layer, x, use_reentrant=False, **options)), strict=True):
        assert torch.equal(one, other)


def test_meta_to_empty_and_init_leaves_nothing_uninitialised():
    with torch.device("meta"):
        layer = MoE(CONFIG)
        assert layer(torch.empty(3, 24)).shape == (3, 24)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*layer.parameters(), layer.router.bias):
            tensor.fill_(float("nan"))
        layer.router.tokens_per_expert.fill_(99)
    layer.init_weights(0.02, 0.01, torch.Generator().manual_seed(0))
    assert all(torch.isfinite(tensor).all() for tensor in layer.state_dict().values())
    assert not layer.router.tokens_per_expert.any()


def test_the_config_needs_no_torch():
    code = (
        "import sys, moe_core; moe_core.MoEConfig(dim=8, num_experts=4, top_k=1, hidden_dim=8); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

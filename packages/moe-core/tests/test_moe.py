"""The whole layer: its parts put together, masks, checkpointing, dtypes."""

import subprocess
import sys

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_core import MoE, MoEConfig

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
    bare = MoE(dim=8, num_experts=4, top_k=1, hidden_dim=8)
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

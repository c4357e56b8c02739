"""The model itself: names, counts, documents, precision, auxiliary losses."""

import attrs
import pytest
import torch
import torch.nn.functional as F

from nemotron_nano import NemotronNano, count_parameters, presets

TINY = presets["tiny"]
SMALLER = attrs.evolve(
    TINY, pattern="ME*M-", hidden_size=48, vocab_size=61, num_experts=6, expert_hidden_size=24,
    shared_expert_hidden_size=32, mlp_hidden_size=40, mamba_num_heads=6, mamba_head_dim=8, chunk_size=8,
)  # fmt: skip


def randomised(config, seed=0):
    """Weights under which convolution, state and attention all reach far."""
    torch.manual_seed(seed)
    model = NemotronNano(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.uniform_(-2, 0)
            elif name.endswith("A_log"):
                parameter.uniform_(-4, -1)
            elif parameter.dim() > 1:
                parameter.normal_(0, 0.5 if "conv1d" in name else parameter.shape[-1] ** -0.5)
    return model


@pytest.mark.parametrize("name", presets)
def test_count_parameters_equals_the_model(name):
    config = presets[name]
    model = NemotronNano(config, device="meta")
    assert sum(p.numel() for p in model.parameters()) == count_parameters(config).total


def test_the_released_model_has_the_tensors_of_its_checkpoint():
    config = presets["nano-30b-a3b"]
    tensors = NemotronNano(config, device="meta", dtype=torch.bfloat16).state_dict()
    assert len(tensors) == 401
    stacks = [name for name in tensors if ".experts." in name]
    assert len(tensors) - len(stacks) + len(stacks) * config.num_experts == 6243
    first = [tensors[f"backbone.layers.1.mixer.experts.{name}"] for name in ("up_proj", "down_proj")]
    assert sum(stack.nbytes for stack in first) == 2_554_331_136
    assert tuple(tensors["backbone.layers.0.mixer.in_proj.weight"].shape) == (10304, 2688)
    assert tuple(tensors["backbone.layers.0.mixer.conv1d.weight"].shape) == (6144, 1, 4)


def test_parameter_names():
    names = set(NemotronNano(attrs.evolve(TINY, pattern="M*E-"), device="meta").state_dict())
    layer = "backbone.layers.{}.mixer.".format
    mamba = ("in_proj.weight", "conv1d.weight", "conv1d.bias", "ssm.A_log", "ssm.D", "ssm.dt_bias", "norm.weight")
    moe = ("router.weight", "router.bias", "experts.up_proj", "experts.down_proj")
    shared = ("shared_experts.up_proj.weight", "shared_experts.down_proj.weight")
    assert names == {
        "backbone.embeddings.weight",
        "backbone.norm_f.weight",
        "lm_head.weight",
        *(f"backbone.layers.{i}.norm.weight" for i in range(4)),
        *(layer(0) + name for name in (*mamba, "out_proj.weight")),
        *(layer(1) + name for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")),
        *(layer(2) + name for name in (*moe, *shared)),
        *(layer(3) + name for name in ("up_proj.weight", "down_proj.weight")),
    }


def test_logits_do_not_depend_on_the_chunk_size():
    reference = randomised(SMALLER)
    tokens = torch.randint(61, (2, 45))
    expected = reference(tokens)
    for chunk_size in (1, 7, 45, 64):
        model = NemotronNano(attrs.evolve(SMALLER, chunk_size=chunk_size))
        model.load_state_dict(reference.state_dict())
        assert (model(tokens) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    "lengths",
    [[45], [1, 44], [20, 25], [8, 16, 21], [3, 1, 1, 2, 38], [44, 1], [8, 0, 0, 37]],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
def test_packed_documents_equal_one_at_a_time(lengths):
    """Borders at the edge of a chunk (8) and inside it, and documents shorter than the
    convolution (4), one of them empty: an id that no token has."""
    model = randomised(SMALLER).eval()
    tokens = torch.randint(61, (1, 45))
    documents = torch.cat([torch.full((n,), 7 * (i % 2)) for i, n in enumerate(lengths)]).unsqueeze(0)
    other = torch.randint(61, (1, 45))  # a row of one document beside it
    packed = model(torch.cat([other, tokens]), document_ids=torch.cat([torch.zeros_like(documents), documents]))
    alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1) if part.numel()], dim=1)
    assert (packed[1:] - alone).norm() / alone.norm() < 1e-6
    assert (packed[:1] - model(other)).norm() / alone.norm() < 1e-6
    if len(lengths) > 1:
        assert (model(tokens) - alone).abs().max() > 1e-2


def test_a_token_sees_only_those_before():
    model = randomised(SMALLER).eval()
    tokens = torch.randint(61, (1, 30))
    changed = tokens.clone()
    changed[0, 17] = (changed[0, 17] + 1) % 61
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    # not exactly 0: the changed token goes to other experts, and a product's last bits depend on its rows
    assert difference[:17].max() < 1e-5
    assert difference[17:].min() > 1e-4


def test_half_precision_leaves_the_state_space_in_fp32():
    model = NemotronNano(SMALLER)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if ".ssm." in name}
    model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        fp32 = ".ssm." in name or ".router." in name
        assert parameter.dtype == (torch.float32 if fp32 else torch.bfloat16), name
    for name, value in before.items():
        assert torch.equal(model.get_parameter(name), value)  # kept, not rounded and widened again
    built = NemotronNano(SMALLER, device="meta", dtype=torch.bfloat16)
    kinds = {name: p.dtype for name, p in model.named_parameters()}
    assert {name: p.dtype for name, p in built.named_parameters()} == kinds
    assert model(torch.randint(61, (2, 9))).dtype == torch.float32


def test_return_hidden_is_what_the_head_reads():
    model = randomised(SMALLER).eval()
    tokens = torch.randint(61, (2, 9))
    hidden = model(tokens, return_hidden=True)
    assert hidden.shape == (2, 9, 48)
    assert torch.equal(F.linear(hidden, model.lm_head.weight), model(tokens))


def test_documents_with_a_cache_are_refused():
    model = NemotronNano(SMALLER)
    with pytest.raises(ValueError, match="document_ids with a cache"):
        model(torch.zeros(1, 3, dtype=torch.int64), document_ids=torch.zeros(1, 3), cache=model.new_cache())


def test_auxiliary_losses():
    config = attrs.evolve(SMALLER, pattern="MEE", aux_loss_coefficient=0.01, z_loss_coefficient=0.001)
    model = randomised(config)
    tokens = torch.randint(61, (2, 9))
    logits = []
    for module in model.modules():
        if type(module).__name__ == "TopKRouter":
            module.register_forward_hook(lambda _m, _i, routing: logits.append(routing.logits.detach().double()))
    model(tokens)
    losses = model.auxiliary_losses()
    assert set(losses) == {"balance", "router_z"}
    balance = z = 0.0
    for scores in logits:
        z += scores.exp().sum(-1).log().square().sum().item()
        for row in scores.view(2, 9, 6):
            p = row.sigmoid() / row.sigmoid().sum(-1, keepdim=True)
            counts = torch.zeros(6, dtype=torch.float64)
            for token in row:
                counts[token.topk(2).indices] += 1
            balance += 9 * (6 / (2 * 9**2) * (counts * p.sum(0)).sum()).item()
    assert losses["balance"].item() == pytest.approx(0.01 * balance, rel=1e-5)
    assert losses["router_z"].item() == pytest.approx(0.001 * z, rel=1e-5)
    sum(losses.values()).backward()
    assert model.backbone.layers[1].mixer.router.weight.grad.abs().sum() > 0
    assert model.auxiliary_losses() == {}  # taken once
    model.eval()(tokens)
    assert model.auxiliary_losses() == {}  # none in evaluation
    plain = randomised(SMALLER)
    plain(tokens)
    assert plain.auxiliary_losses() == {}

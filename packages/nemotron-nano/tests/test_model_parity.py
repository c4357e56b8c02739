"""Logits and gradients against transformers' `nemotron_h`, with weights under which every part matters."""

import attrs
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from nemotron_nano import NemotronNano, NemotronNanoConfig, NemotronNanoConfigError

CONFIG = NemotronNanoConfig(
    pattern="ME*M-E",
    vocab_size=61,
    hidden_size=48,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    mamba_num_heads=6,
    mamba_head_dim=16,
    mamba_num_groups=2,
    ssm_state_size=24,
    chunk_size=16,
    num_experts=12,
    top_k=3,
    expert_hidden_size=20,
    shared_expert_hidden_size=28,
    mlp_hidden_size=36,
)
GROUPED = attrs.evolve(
    CONFIG, router_num_groups=4, router_top_groups=2, normalize_top_k=False, routed_scaling_factor=1.5
)


def make_everything_matter(model: NemotronNano, seed: int = 0) -> None:
    """Large random weights: under usual ones the scan hardly moves the logits."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor, std):
        tensor.copy_(std * torch.randn(tensor.shape, generator=generator))

    def uniform(tensor, low, high):
        tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator))

    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(("norm.weight", "norm_f.weight")):
                uniform(tensor, 0.5, 1.5)
            elif name.endswith("conv1d.weight"):
                normal(tensor, 0.5)
            elif name.endswith(("conv1d.bias", "ssm.D")):
                normal(tensor, 0.3)
            elif name.endswith("dt_bias"):
                uniform(tensor, -1, 1)
            elif name.endswith("A_log"):
                uniform(tensor, -2, 1)
            elif name.endswith("router.bias"):
                uniform(tensor, -0.4, 0.4)
            else:
                normal(tensor, tensor.shape[-1] ** -0.5)


def theirs(name: str) -> str:
    for ours, hf in (
        ("backbone.", "model."),
        ("mixer.ssm.", "mixer."),
        ("mixer.router.weight", "mixer.gate.weight"),
        ("mixer.router.bias", "mixer.gate.e_score_correction_bias"),
    ):
        name = name.replace(ours, hf)
    return name


def as_transformers(model: NemotronNano) -> nn.Module:
    config = transformers.NemotronHConfig(**model.config.to_hf())
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    oracle = transformers.NemotronHForCausalLM(config)
    oracle.load_state_dict({theirs(name): tensor for name, tensor in model.state_dict().items()}, strict=True)
    for module in oracle.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))  # it clamps dt at time_step_min otherwise
    return oracle


def both(config: NemotronNanoConfig) -> tuple[NemotronNano, nn.Module]:
    model = NemotronNano(config)
    make_everything_matter(model)
    return model, as_transformers(model)


@pytest.mark.parametrize("config", [CONFIG, GROUPED], ids=["plain", "group-limited"])
@pytest.mark.parametrize("shape", [(1, 48), (2, 53)])
def test_logits_equal_transformers(config, shape):
    model, oracle = both(config)
    tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, hf = model.eval()(tokens), oracle.eval()(tokens, use_cache=False).logits
    assert ours.dtype == torch.float32
    assert ours.shape == (*shape, config.vocab_size)
    assert hf.std() > 0.3  # or there is nothing to compare
    assert (ours - hf).abs().max() < 1e-4


KEYS_OF = {
    "M": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"),
    "E": ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    "*": ("num_attention_heads", "num_key_value_heads", "head_dim"),
    "-": ("intermediate_size",),
}


@pytest.mark.parametrize("pattern", ["M", "E", "*", "-", "M*-", "-M"])
def test_only_the_kinds_of_layers_that_occur_ask_for_keys(pattern):
    model, oracle = both(attrs.evolve(CONFIG, pattern=pattern))
    saved = oracle.config.to_dict()
    absent = [key for kind, keys in KEYS_OF.items() if kind not in pattern for key in keys]
    without = {key: value for key, value in saved.items() if key not in absent}
    read = NemotronNanoConfig.from_hf(without)
    assert read.pattern == pattern
    tokens = torch.randint(CONFIG.vocab_size, (2, 37), generator=torch.Generator().manual_seed(1))
    again = NemotronNano(read)
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert (again.eval()(tokens) - oracle.eval()(tokens, use_cache=False).logits).abs().max() < 1e-4
    # whatever stands under the keys of other kinds plays no part, and comes back as it was
    nulls = NemotronNanoConfig.from_hf({**saved, **dict.fromkeys(absent)})
    assert nulls == read
    if "E" not in pattern:
        none = NemotronNanoConfig.from_hf({**saved, "n_routed_experts": 0, "n_shared_experts": 0})
        assert none.to_hf()["n_routed_experts"] == 0
    # the other direction: what is written is read by transformers as the same model
    written = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**read.to_hf()))
    assert {name: p.shape for name, p in written.named_parameters()} == {
        name: p.shape for name, p in oracle.named_parameters()
    }
    for key in (key for kind in pattern for key in KEYS_OF[kind]):
        with pytest.raises(NemotronNanoConfigError, match=rf"^{key} = None: is missing from the Hugging Face config$"):
            NemotronNanoConfig.from_hf({name: value for name, value in saved.items() if name != key})


def test_every_layer_gives_what_transformers_layer_gives():
    model, oracle = both(CONFIG)
    outputs = {"ours": [], "theirs": []}
    for name, layers in (("ours", model.backbone.layers), ("theirs", oracle.model.layers)):
        for layer in layers:
            layer.register_forward_hook(lambda _m, _i, out, kept=outputs[name]: kept.append(out))
    tokens = torch.randint(61, (2, 53), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.eval()(tokens), oracle.eval()(tokens, use_cache=False)
    assert len(outputs["ours"]) == len(CONFIG.pattern)
    report = {}
    for number, (letter, ours, hf) in enumerate(zip(CONFIG.pattern, *outputs.values(), strict=True)):
        hf = hf[0] if isinstance(hf, tuple) else hf
        report[f"layer {number} ({letter})"] = ((ours - hf).norm() / hf.norm()).item()
    assert max(report.values()) < 1e-5, report  # the first that is apart is the one to look into


def test_groups_are_limited_where_all_biased_scores_are_negative():
    model, _ = both(GROUPED)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("router.bias"):
                buffer.sub_(1.5)  # a masked group at 0 would then beat every group that is allowed
    tokens = torch.randint(61, (2, 53), generator=torch.Generator().manual_seed(1))
    oracle = as_transformers(model)
    with torch.no_grad():
        ours, hf = model.eval()(tokens), oracle.eval()(tokens, use_cache=False).logits
    assert (ours - hf).norm() / hf.norm() < 1e-5


def pair_up(model: NemotronNano, gap: float, offset: float) -> None:
    """Experts 2i and 2i+1 get one row of the router; their biases differ by `gap`, for the one or the other.

    Three of twelve are chosen, so that the last choice of every token is between the two of a pair.
    """
    with torch.no_grad():
        for layer in model.backbone.layers:
            if (router := getattr(layer.mixer, "router", None)) is not None:
                router.weight[1::2] = router.weight[::2]
                router.bias[1::2] = router.bias[::2] + gap * torch.tensor([1, -1, 1, -1, 1, -1])
                router.bias.add_(offset)


@pytest.mark.parametrize("config", [CONFIG, GROUPED], ids=["plain", "group-limited"])
@pytest.mark.parametrize("offset", [0.0, -1.5], ids=["positive", "negative"])
def test_nearly_equal_scores_are_decided_as_transformers_decides_them(config, offset):
    """A gap that fp32 holds, and half precision of the logits, scores or biases does not."""
    model, _ = both(config)
    pair_up(model, gap=1e-5, offset=offset)
    chosen, expected = record_choices(model), record_choices(oracle := as_transformers(model))
    tokens = torch.randint(61, (2, 53), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, hf = model.eval()(tokens), oracle.eval()(tokens, use_cache=False).logits
    assert len(chosen) == len(expected) == config.pattern.count("E")
    for mine, theirs in zip(chosen, expected, strict=True):
        assert torch.equal(mine.sort().values, theirs.sort().values)
        assert (mine[:, 2] % 2).unique().tolist() == [0, 1]  # decided for the lower as well as for the higher id
    assert (ours - hf).norm() / hf.norm() < 1e-5


@pytest.mark.parametrize("offset", [0.0, -1.5], ids=["positive", "negative"])
def test_equal_scores_go_to_the_lower_id_and_to_as_many_experts(offset):
    """Which of two equals transformers takes is left to its topk, so here their weights are equal as well."""
    model, _ = both(CONFIG)
    pair_up(model, gap=0.0, offset=offset)
    with torch.no_grad():
        for layer in model.backbone.layers:
            if (experts := getattr(layer.mixer, "experts", None)) is not None:
                for stack in experts.parameters():
                    stack[1::2] = stack[::2]
    chosen, oracle = record_choices(model), as_transformers(model)
    tokens = torch.randint(61, (2, 53), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, hf = model.eval()(tokens), oracle.eval()(tokens, use_cache=False).logits
    assert (ours - hf).norm() / hf.norm() < 1e-5
    for ids in chosen:
        assert torch.equal(ids[:, 1], ids[:, 0] + 1)  # the first pair whole
        assert (ids[:, ::2] % 2 == 0).all()


def record_choices(model: nn.Module) -> list[torch.Tensor]:
    """Filled in the next forward pass: [T, K] of each MoE layer."""
    kept: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(".router"):
            module.register_forward_hook(lambda _m, _i, routing: kept.append(routing.expert_ids))
        elif name.endswith(".gate"):
            module.register_forward_hook(lambda _m, _i, out: kept.append(out[2]))
    return kept


def test_gradients_equal_transformers():
    model, oracle = both(CONFIG)
    tokens = torch.randint(61, (2, 37), generator=torch.Generator().manual_seed(1))
    for logits in (model(tokens), oracle(tokens, use_cache=False).logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    expected = dict(oracle.named_parameters())
    for name, parameter in model.named_parameters():
        grad, hf = parameter.grad, expected[theirs(name)].grad
        assert ((grad - hf).norm() / hf.norm()).item() < 1e-5, name


def test_the_scan_matters_to_these_logits(monkeypatch):
    from nemotron_nano import model as module

    model, oracle = both(CONFIG)
    tokens = torch.randint(61, (1, 48), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(module, "ssd_scan", lambda u, *_, **__: (torch.zeros_like(u), None))
    with torch.no_grad():
        ours, hf = model.eval()(tokens), oracle.eval()(tokens, use_cache=False).logits
    assert (ours - hf).norm() / hf.norm() > 0.1


def test_transformers_reads_our_config():
    config = transformers.NemotronHConfig(**CONFIG.to_hf())
    assert config.hybrid_override_pattern == CONFIG.pattern
    assert NemotronNanoConfig.from_hf(config.to_dict()) == CONFIG
    assert config.num_hidden_layers == 6


def test_bfloat16_is_as_near_to_fp32_as_transformers_is():
    model, oracle = both(attrs.evolve(CONFIG, pattern="M*M-"))  # a router would turn rounding into other experts
    tokens = torch.randint(61, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = model.eval()(tokens)
        ours = model.to(torch.bfloat16)(tokens)
        hf = oracle.eval().to(torch.bfloat16)(tokens, use_cache=False).logits.float()
    assert ours.dtype == torch.float32
    assert (ours - exact).norm() < 1.2 * (hf - exact).norm()

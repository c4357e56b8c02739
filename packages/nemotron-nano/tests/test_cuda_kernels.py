"""Mamba on the kernels of mamba-ssm and causal-conv1d: what they are given, what comes back, and who may choose them.

The packages are stood in for by what their documentation and their own checks say, written as plain recurrences in
float64 that refuse what the kernels refuse. The real ones run in `integration_tests`, on a GPU.
"""

import sys
from types import ModuleType

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_core import load_config
from moe_core.config import ConfigError, validate
from moe_core.plugins import Run
from nemotron_nano import NemotronNano, NemotronNanoConfigError, presets
from nemotron_nano.components import NemotronNanoModelConfig, build_model, problems
from nemotron_nano.generate import generate
from nemotron_nano.mamba import kernels as mamba_kernels
from nemotron_nano.mamba.conv import causal_conv_silu
from nemotron_nano.mamba.ssd import ssd_scan

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SMALL = attrs.evolve(
    presets["tiny"], pattern="M*ME", hidden_size=48, vocab_size=61, num_experts=6, expert_hidden_size=24,
    shared_expert_hidden_size=32, mamba_num_heads=6, mamba_head_dim=8, ssm_state_size=16, chunk_size=8,
)  # fmt: skip


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, return_varlen_states=False,
):  # fmt: skip
    (b, S, H, P), (G, N) = x.shape, B.shape[2:]
    assert 0 not in x.shape
    assert D is z is dt_bias is cu_seqlens is None
    assert not dt_softplus
    assert dt_limit == (0.0, float("inf"))
    assert return_final_states
    assert not return_varlen_states
    assert isinstance(chunk_size, int)
    assert H % G == 0
    assert dt.shape == (b, S, H)
    assert A.shape == (H,)
    assert B.shape == C.shape == (b, S, G, N)
    assert {tensor.dtype for tensor in (x, dt, A, B, C)} <= set(FLOATS)
    if seq_idx is not None:
        assert seq_idx.shape == (b, S)
        assert seq_idx.dtype == torch.int32
        assert seq_idx.is_contiguous()
    state = torch.zeros(b, H, P, N, dtype=torch.float64)
    if initial_states is not None:
        assert initial_states.shape == state.shape
        assert initial_states.dtype in FLOATS
        state = initial_states.double()
    u, delta, decay = x.double(), dt.double(), (dt.double() * A.double()).exp()
    B, C = (tensor.double().repeat_interleave(H // G, dim=2) for tensor in (B, C))
    outputs, before = [], torch.zeros(b, dtype=torch.int32)  # an initial state is the past of segment 0
    for t in range(S):
        if seq_idx is not None:
            state = state * (seq_idx[:, t] == before)[:, None, None, None]
            before = seq_idx[:, t]
        state = state * decay[:, t, :, None, None] + torch.einsum("bh,bhp,bhn->bhpn", delta[:, t], u[:, t], B[:, t])
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]))
    return torch.stack(outputs, dim=1).to(x.dtype), state.float()


class CausalConv1dFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, seq_idx, initial_states):
        (b, channels, S), width = x.shape, weight.shape[1]
        assert 0 not in x.shape
        assert x.dtype in FLOATS
        assert weight.dtype == bias.dtype
        assert weight.dtype in FLOATS
        assert weight.shape == (channels, width)
        assert bias.shape == (channels,)
        assert 2 <= width <= 4
        assert x.stride(1) == 1 or x.stride(2) == 1
        assert _is_channels_last(x) or (seq_idx is None and initial_states is None)
        _check_strides(x, x)
        if seq_idx is not None:
            assert initial_states is None
            assert seq_idx.shape == (b, S)
            assert seq_idx.dtype == torch.int32
            assert seq_idx.is_contiguous()
            assert (seq_idx >= 0).all()  # padding elsewhere
        if initial_states is not None:
            assert initial_states.shape == (b, channels, width - 1)
            assert initial_states.dtype == x.dtype
            assert initial_states.stride(1) == 1
        ctx.save_for_backward(x, weight, bias, seq_idx, initial_states)
        return torch.empty_like(x).copy_(_conv(x, weight, bias, seq_idx, initial_states))

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias, seq_idx, initial_states = ctx.saved_tensors
        if _is_channels_last(x) and grad.stride(1) != 1:
            grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
        _check_strides(x, grad)
        floats = [tensor for tensor in (x, weight, bias, initial_states) if tensor is not None]
        exact = [tensor.detach().double().requires_grad_() for tensor in floats]
        with torch.enable_grad():
            out = _conv(*exact[:3], seq_idx, exact[3] if initial_states is not None else None)
        grads = torch.autograd.grad(out, exact, grad.double())
        dx, *others = (g.to(tensor.dtype) for g, tensor in zip(grads, floats, strict=True))
        return dx, *others[:2], None, others[2] if initial_states is not None else None


def _is_channels_last(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(2) > 1


def _check_strides(x: Tensor, tensor: Tensor) -> None:
    if _is_channels_last(x):
        assert x.shape[1] % 8 == 0
        assert tensor.stride(0) % 8 == tensor.stride(2) % 8 == 0


def _conv(x, weight, bias, seq_idx, initial_states):
    width, (b, channels, S) = weight.shape[1], x.shape
    past = torch.zeros(b, channels, width - 1) if initial_states is None else initial_states
    joined = torch.cat([past.double(), x.double()], dim=2)
    out = bias.double()[:, None]
    for back in range(width):
        part = joined[:, :, width - 1 - back :][:, :, :S]
        if seq_idx is not None:
            same = F.pad(seq_idx, (back, 0), value=-1)[:, :S] == seq_idx
            part = part * same.unsqueeze(1)
        out = out + weight.double()[:, width - 1 - back, None] * part
    return out * torch.sigmoid(out)


@pytest.fixture
def calls(monkeypatch):
    """Both packages on a CPU; the names of their kernels as they are called."""
    names = []

    def package(module, name, function):
        def called(*args, **kwargs):
            names.append(name)
            return function(*args, **kwargs)

        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        setattr(sys.modules[module], name, called)

    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, activation=None):
        assert activation == "silu"
        return CausalConv1dFn.apply(x, weight, bias, seq_idx, initial_states)

    package("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", mamba_chunk_scan_combined)
    package("causal_conv1d", "causal_conv1d_fn", causal_conv1d_fn)
    monkeypatch.setattr(mamba_kernels, "DEVICE_TYPE", "cpu")
    return names


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()


def segments(S: int) -> Tensor:
    """Rows that begin with another number than 0, and in which a number comes back."""
    first = [7] * (S // 3) + [2] * (S // 4)
    return torch.tensor([first + [7] * (S - len(first)), [3] * (S - 1) + [0]])


@attrs.frozen
class Case:
    S: int = 21
    packed: bool = False
    started: bool = False
    dtype: torch.dtype = torch.float32


CASES = [
    Case(),
    Case(S=24, packed=True),
    Case(S=1),
    Case(S=5, started=True),
    Case(packed=True, started=True),
    Case(packed=True, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_scan_and_its_gradients_are_those_of_torch(calls, case):
    g = torch.Generator().manual_seed(case.S)
    H, P, G, N = 6, 5, 2, 7
    wide = torch.randn(2, case.S, H * P + 3, generator=g).to(case.dtype)
    u = wide[..., : H * P].unflatten(-1, (H, P))  # with gaps, as a part of a projection has
    delta, A = F.softplus(torch.randn(2, case.S, H, generator=g)), -torch.rand(H, generator=g).exp()
    B, C = (torch.randn(2, case.S, G, N, generator=g).to(case.dtype) for _ in range(2))
    state = torch.randn(2, H, P, N, generator=g) if case.started else None
    packed = segments(case.S) if case.packed else None
    results = []
    for kernels in ("torch", "cuda"):
        args = [tensor.detach().requires_grad_() for tensor in (u, delta, A, B, C)]
        before = None if state is None else state.clone().requires_grad_()
        outputs = ssd_scan(*args, chunk_size=8, segments=packed, initial_state=before, kernels=kernels)
        assert [tensor.dtype for tensor in outputs] == [torch.float32, torch.float32]
        leaves = args if before is None else [*args, before]
        upstream = [torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) for tensor in outputs]
        grads = torch.autograd.grad(outputs, leaves, upstream)
        assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]
        results.append([*outputs, *grads])
    assert calls == ["mamba_chunk_scan_combined"]
    for mine, theirs in zip(*results, strict=True):
        assert relative(theirs, mine) < (1e-5 if mine.dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(
    ("case", "width"),
    [(case, 4) for case in CASES if not (case.packed and case.started)] + [(Case(), 2), (Case(packed=True), 3)],
    ids=str,
)
def test_the_convolution_and_its_gradients_are_those_of_torch(calls, case, width):
    g = torch.Generator().manual_seed(case.S)
    wide = torch.randn(2, case.S, 29, generator=g).to(case.dtype)
    weight, bias = torch.randn(24, width, generator=g), torch.randn(24, generator=g)
    past = torch.randn(2, width - 1, 24, generator=g) if case.started else None
    packed = segments(case.S) if case.packed else None
    results = []
    for kernels in ("torch", "cuda"):
        leaves = [tensor.clone().requires_grad_() for tensor in (wide, weight, bias)]
        before = None if past is None else past.clone().requires_grad_()
        x = leaves[0][..., 3:27]  # a part of a projection: odd strides, odd offset
        outputs = causal_conv_silu(x, *leaves[1:], [16, 5, 3], before=before, segments=packed, kernels=kernels)
        assert [tuple(tensor.shape) for tensor in outputs] == [(2, case.S, width) for width in (16, 5, 3)]
        assert {tensor.dtype for tensor in outputs} == {torch.float32}
        if before is not None:
            leaves.append(before)
        # expanded, as of a sum: strides of 0
        grads = torch.autograd.grad(sum(tensor.sum() for tensor in outputs), leaves)
        results.append([*outputs, *grads])
    assert calls == ["causal_conv1d_fn"]
    for mine, theirs in zip(*results, strict=True):
        assert relative(theirs, mine) < (1e-5 if mine.dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(("b", "S"), [(0, 5), (2, 0)])
def test_no_tokens_are_no_call(calls, b, S):
    u, delta, A = torch.zeros(b, S, 6, 5), torch.zeros(b, S, 6), -torch.ones(6)
    B = torch.zeros(b, S, 2, 7)
    y, state = ssd_scan(u, delta, A, B, B, kernels="cuda")
    assert (y.shape, state.shape) == ((b, S, 6, 5), (b, 6, 5, 7))
    x = torch.zeros(b, S, 24, requires_grad=True)
    outputs = causal_conv_silu(x, torch.zeros(24, 4), torch.zeros(24), [16, 8], kernels="cuda")
    assert [tuple(tensor.shape) for tensor in outputs] == [(b, S, 16), (b, S, 8)]
    torch.cat(outputs, -1).sum().backward()
    assert x.grad.shape == x.shape
    assert calls == []


def both(config, **options):
    torch.manual_seed(0)
    plain, fast = NemotronNano(config, **options), NemotronNano(config, mamba_kernels="cuda", **options)
    fast.load_state_dict(plain.state_dict())
    return plain, fast


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_has_the_same_logits_and_gradients(calls, packed):
    plain, fast = both(SMALL)
    tokens = torch.randint(61, (2, 21))
    documents = segments(21) if packed else None
    logits = [model(tokens, document_ids=documents) for model in (plain, fast)]
    assert calls == ["causal_conv1d_fn", "mamba_chunk_scan_combined"] * 2  # two layers of four
    assert relative(logits[1], logits[0]) < 1e-5
    for each in logits:
        each.square().mean().backward()
    for (name, mine), theirs in zip(plain.named_parameters(), fast.parameters(), strict=True):
        assert relative(theirs.grad, mine.grad) < 1e-4, name


def test_generation_takes_the_kernels_for_the_prompt_and_torch_for_each_token(calls):
    plain, fast = both(SMALL)
    tokens = torch.randint(61, (2, 9))
    assert torch.equal(generate(fast, tokens, 5), generate(plain, tokens, 5))
    assert len(calls) == 2 * 2


@pytest.mark.parametrize(
    ("change", "device_type", "words"),
    [
        ({}, "cpu", ["model.mamba_kernels = 'cuda'", "CUDA devices only", "'cpu'", "use 'torch'"]),
        ({"conv_kernel": 5}, "auto", ["model.conv_kernel = 5", "2, 3 or 4"]),
        ({"ssm_state_size": 31, "mamba_head_dim": 31}, "auto", ["multiple of 8 channels", "= 372 (remainder 4)"]),
    ],
)
def test_a_choice_that_cannot_run_is_refused_before_a_process_group(change, device_type, words):
    (problem,) = problems(NemotronNanoModelConfig(mamba_kernels="cuda", **change), device_type)
    for word in words:
        assert word in str(problem)
    settings = [f"model.{key}={value}" for key, value in change.items()]
    config = load_config((), ["model.mamba_kernels=cuda", f"run.device_type={device_type}", *settings])
    with pytest.raises(ConfigError) as refused:
        validate(config, 1)
    assert [one.key for one in refused.value.problems] == [problem.key]
    model = attrs.evolve(presets["tiny"], **change)
    with pytest.raises(NemotronNanoConfigError, match=words[0].removeprefix("model.")[:9]):
        NemotronNano(model, mamba_kernels="cuda", device="cpu" if device_type == "cpu" else "meta")


def test_a_model_without_mamba_asks_nothing_of_kernels():
    assert problems(NemotronNanoModelConfig(mamba_kernels="cuda", pattern="*E", conv_kernel=7), "cpu") == []
    model = NemotronNano(attrs.evolve(SMALL, pattern="*"), mamba_kernels="cuda", dtype=torch.float64)
    assert model(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 61)


def test_where_the_device_is_known_first_by_the_run_all_ranks_are_told():
    config = load_config((), ["model.mamba_kernels=cuda"])
    with pytest.raises(NemotronNanoConfigError, match=r"model\.mamba_kernels = 'cuda': .*'cpu'; use 'torch'"):
        build_model(config["model"].config, Run(config, device_type="cpu"))


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setattr(mamba_kernels, "DEVICE_TYPE", "cpu")
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.ssd_combined", None)
    config = load_config((), ["model.mamba_kernels=cuda"])
    rule = r"model\.mamba_kernels = 'cuda': needs mamba-ssm, .*pip install .*'nemotron-nano\[cuda\]', or use 'torch'"
    with pytest.raises(NemotronNanoConfigError, match=rule):
        build_model(config["model"].config, Run(config, device_type="cpu"))


def test_double_precision_and_other_devices_are_refused_where_they_are_met(calls, monkeypatch):
    with pytest.raises(NemotronNanoConfigError, match="float64"):
        NemotronNano(SMALL, mamba_kernels="cuda", dtype=torch.float64)
    model = NemotronNano(SMALL, mamba_kernels="cuda")
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    with pytest.raises(NemotronNanoConfigError, match="float64"):
        model.double()(tokens)
    monkeypatch.setattr(mamba_kernels, "DEVICE_TYPE", "cuda")
    with pytest.raises(NemotronNanoConfigError, match="tensors are on 'cpu'"):
        model.float()(tokens)
    assert calls == []


def test_a_run_on_these_kernels_is_read_again_on_a_machine_without_them(tmp_path):
    from nemotron_nano.trained import NotTrainedError, trained_model

    config = load_config((), ["model.mamba_kernels=cuda", f"run.output_dir={tmp_path}"])
    (tmp_path / "config.toml").write_text(config.to_toml())
    try:
        # the model is built, and then there is nothing to load
        with pytest.raises(NotTrainedError, match="has no checkpoint"), trained_model(tmp_path):
            pass
    finally:
        torch.distributed.destroy_process_group()  # it is left alone after an error


def test_an_unknown_choice_is_refused():
    with pytest.raises(NemotronNanoConfigError, match="mamba_kernels = 'triton': must be 'torch' or 'cuda'"):
        NemotronNano(SMALL, mamba_kernels="triton")
    with pytest.raises(ConfigError, match="'torch', 'cuda'"):
        load_config((), ["model.mamba_kernels=triton"])


def test_the_kernels_are_not_imported_where_they_are_not_chosen():
    NemotronNano(SMALL)(torch.zeros(1, 5, dtype=torch.int64))
    assert "mamba_ssm" not in sys.modules
    assert "causal_conv1d" not in sys.modules

"""Heads that are more than a linear layer: the loss is that of the module's own forward, or a refusal by name."""

import copy
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize

from chunked_loss import ChunkedCLMCrossEntropyLoss, compiled
from moe_core.plugins import Selected, load_registry
from moe_core.testing import count_host_syncs, run_ranks

B, S, D, V = 3, 5, 6, 19


class Batch(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor | None = None


class Model(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.embeddings = nn.Embedding(V, D)
        self.lm_head = head

    def forward(self, tokens, *, document_ids=None, return_hidden=False):
        hidden = torch.tanh(self.embeddings(tokens))
        return hidden if return_hidden else self.lm_head(hidden)


class LoraWrapper(nn.Module):
    """In the shape of peft's: the base layer, and adapters by name, of which one is active."""

    def __init__(self, base, dropout=0.0, lora_bias=False):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({name: nn.Linear(D, 2, bias=False) for name in ("default", "other")})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, V, bias=lora_bias) for name in ("default", "other")})
        self.lora_dropout = nn.ModuleDict({name: nn.Dropout(dropout) for name in ("default", "other")})
        self.scaling = {"default": 1.7, "other": 0.3}
        base.requires_grad_(False)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        adapted = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))
        return self.base_layer(x) + adapted * self.scaling["default"]


class LoraLinear(nn.Linear):
    """An adapter by subclassing, as torchtune has it."""

    def __init__(self):
        super().__init__(D, V)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(2, D)), nn.Parameter(torch.randn(V, 2))

    def forward(self, x):
        return super().forward(x) + 0.5 * F.linear(F.linear(x, self.lora_a), self.lora_b)


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return 0.25 * super().forward(x)


class CappedLinear(nn.Linear):
    def forward(self, x):
        return 1.5 * torch.tanh(super().forward(x) / 1.5)


class CosineHead(nn.Linear):
    def forward(self, x):
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1), self.bias) * 4


class UnitHead(nn.Linear):
    """Not finite at a row of zeros."""

    def forward(self, x):
        return super().forward(x / x.norm(dim=-1, keepdim=True))


class WritingHead(nn.Linear):
    """Changes what it is given."""

    def forward(self, x):
        return super().forward(x.mul_(2))


class HalfUsed(torch.autograd.Function):
    """Has no gradient for the second of its inputs."""

    @staticmethod
    def forward(ctx, x, unused):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


class HalfUsedHead(nn.Linear):
    def forward(self, x):
        return HalfUsed.apply(super().forward(x), self.bias)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, V))

    def forward(self, logits):
        return logits * self.scale


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight + weight.square()


def linear():
    return nn.Linear(D, V)


def with_forward_of_its_own():
    head = linear()
    before = head.forward
    head.forward = lambda x: 3 * before(x)
    return head


def with_pre_hook(how):
    head = linear()
    head.register_forward_pre_hook(how)
    return head


def parametrized(name="weight"):
    head = linear()
    parametrize.register_parametrization(head, name, Doubled())
    return head


def with_a_parameter_in_a_pre_hook():
    head = linear()
    head.gain = nn.Parameter(torch.linspace(0.5, 2, D))
    head.register_forward_pre_hook(lambda module, args: args[0] * module.gain)
    return head


def hook_style_weight_norm():
    return torch.nn.utils.weight_norm(linear())


def reading_a_stranger():
    """A temperature that is no parameter of the head, yet trains."""
    head, outside = linear(), nn.Parameter(torch.tensor(1.3))
    before = head.forward
    head.forward = lambda x: outside * before(x)
    head.__dict__["outside"] = outside
    return head


def in_place_compiled():
    head = linear()
    head.compile(backend="eager")
    return head


HEADS = {
    "linear": linear,
    "an adapter around it": lambda: LoraWrapper(linear()),
    "an adapter with a bias": lambda: LoraWrapper(linear(), lora_bias=True),
    "an adapter by subclassing": LoraLinear,
    "a scale in a subclass": lambda: ScaledLinear(D, V),
    "a cap in a subclass": lambda: CappedLinear(D, V, bias=False),
    "cosines": lambda: CosineHead(D, V),
    "a sequence": lambda: nn.Sequential(linear(), Scale()),
    "a forward of its own": with_forward_of_its_own,
    "a gradient outside": reading_a_stranger,
    "a pre-hook that scales": lambda: with_pre_hook(lambda head, args: args[0] * 3),
    "a pre-hook that trains": with_a_parameter_in_a_pre_hook,
    "not finite at zeros": lambda: UnitHead(D, V, bias=False),
    "a gradient that is none": lambda: HalfUsedHead(D, V),
    "a parametrized weight": parametrized,
    "a parametrized bias": lambda: parametrized("bias"),
    "a normed weight": lambda: parametrizations.weight_norm(linear()),
    "a normed weight by hook": hook_style_weight_norm,
    "a normed weight by hook in a subclass": lambda: torch.nn.utils.weight_norm(ScaledLinear(D, V)),
    "checkpointed": lambda: checkpoint_wrapper(linear()),
    "a checkpointed adapter": lambda: checkpoint_wrapper(LoraWrapper(linear())),
    "compiled": lambda: torch.compile(linear(), backend="eager"),
    "compiled in place": in_place_compiled,
}
# torch says that the hook-style function is deprecated, and calls a class method of its own that is
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def model_with(head, dtype=torch.float64):
    torch.manual_seed(0)
    return Model(HEADS[head]()).to(dtype)


def data(ignored=0.3, sequences=B):
    g = torch.Generator().manual_seed(1)
    labels = torch.randint(0, V, (sequences, S), generator=g)
    labels[torch.rand(labels.shape, generator=g) < ignored] = -100
    return Batch(torch.randint(0, V, (sequences, S), generator=g), labels)


def everything_that_trains(model):
    outside = vars(model.lm_head).get("outside")
    return dict(model.named_parameters()) | ({} if outside is None else {"outside": outside})


def step(model, total):
    total.backward()
    trained = everything_that_trains(model)
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in trained.items()}
    for parameter in trained.values():
        parameter.grad = None
    return total.detach(), gradients


def of_own_forward(model, batch, z_loss=0.0, softcap=None):
    """From the logits of the module's own call."""
    logits = model(batch.tokens).flatten(0, 1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    labels = batch.labels.flatten()
    squares = logits.logsumexp(-1).square()[labels != -100].sum()
    return step(model, F.cross_entropy(logits, labels, reduction="sum") + z_loss * squares)


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1, "softcap": 2.0}])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("head", HEADS)
def test_the_loss_and_all_gradients_are_those_of_the_heads_own_forward(head, chunk_tokens, options):
    model, batch = model_with(head), data()
    want = of_own_forward(model, batch, **options)
    loss = ChunkedCLMCrossEntropyLoss(chunk_tokens=chunk_tokens, **options)
    torch.testing.assert_close(step(model, loss(model, batch).sum), want)
    with torch.no_grad():
        torch.testing.assert_close(loss(model, batch).sum, want[0])


@pytest.mark.parametrize("head", ["an adapter around it", "a parametrized weight", "a sequence"])
@pytest.mark.parametrize("way", ["compiled", "component", "compiled component"])
def test_so_are_those_of_the_compiled_loss_and_of_the_components(head, way):
    model, batch = model_with(head), data()
    want = of_own_forward(model, batch)

    def component(name, **fields):
        found = load_registry().find("loss", name).component
        return Selected(found, found.load_config_class()(**fields))

    chunked = component("chunked_clm_cross_entropy", chunk_tokens=4)
    if way == "compiled":
        loss = compiled(ChunkedCLMCrossEntropyLoss(chunk_tokens=4), backend="eager")
    elif way == "component":
        loss = chunked.build(SimpleNamespace(model=model))
    else:
        loss = component("compiled", inner=chunked, backend="eager").build(SimpleNamespace(model=model))
    torch.testing.assert_close(step(model, loss(model, batch).sum), want)


@pytest.mark.parametrize("head", HEADS)
def test_ignored_labels_alone_are_zero_with_a_graph_to_all_that_the_forward_reads(head):
    model, batch = model_with(head), data(ignored=2.0)
    _, want = of_own_forward(model, batch)
    total, got = step(model, ChunkedCLMCrossEntropyLoss(chunk_tokens=4)(model, batch).sum)
    assert total == 0
    assert {name for name, gradient in got.items() if gradient is not None} == {
        name for name, gradient in want.items() if gradient is not None
    }
    assert all((gradient == 0).all() for gradient in got.values() if gradient is not None)


def test_rows_past_the_vocabulary_are_padding_in_any_head():
    model, batch = model_with("an adapter around it"), data()
    batch = batch._replace(labels=batch.labels.clamp(max=10))
    want = step(
        model, F.cross_entropy(model(batch.tokens).flatten(0, 1)[:, :11], batch.labels.flatten(), reduction="sum")
    )
    got = step(model, ChunkedCLMCrossEntropyLoss(chunk_tokens=4, vocab_size=11)(model, batch).sum)
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="vocab_size = 20: must be between 1 and the rows of weight, 19"):
        ChunkedCLMCrossEntropyLoss(vocab_size=20)(model, batch)


def test_dropout_inside_is_drawn_once_and_its_gradient_fits_it():
    torch.manual_seed(0)
    model, batch = Model(LoraWrapper(linear(), dropout=0.5)).double(), data(ignored=0)
    torch.manual_seed(7)
    got = step(model, ChunkedCLMCrossEntropyLoss(chunk_tokens=100)(model, batch).sum)
    torch.manual_seed(7)  # one chunk of all rows draws what the full forward draws
    torch.testing.assert_close(got, of_own_forward(model, batch))


def test_gradients_of_any_head_in_bf16_add_up_in_fp32_over_the_chunks():
    batch = data(ignored=0, sequences=40)
    model = model_with("a scale in a subclass", torch.bfloat16)
    _, want = of_own_forward(copy.deepcopy(model).double(), batch)
    errors = []
    for chunk_tokens in (200, 1):
        _, got = step(model, ChunkedCLMCrossEntropyLoss(chunk_tokens=chunk_tokens)(model, batch).sum)
        difference = got["lm_head.weight"].double() - want["lm_head.weight"]
        errors.append(float(difference.norm() / want["lm_head.weight"].norm()))
    assert errors[1] <= 1.5 * errors[0] <= 0.02


@pytest.mark.parametrize(
    "head", [lambda: parametrizations.spectral_norm(ScaledLinear(D, V)), lambda: WritingHead(D, V)]
)
def test_a_head_that_changes_a_state_or_its_input_is_called_as_if_once(head):
    """A power iteration in each forward; a product in place."""

    class Plain(Model):
        def forward(self, tokens, *, document_ids=None, return_hidden=False):
            hidden = self.embeddings(tokens) + 0  # saved by nobody
            return hidden if return_hidden else self.lm_head(hidden)

    torch.manual_seed(0)
    model, batch = Plain(head()).double(), data()
    for chunk_tokens in (1, 4, 100):
        got = step(mine := copy.deepcopy(model), ChunkedCLMCrossEntropyLoss(chunk_tokens=chunk_tokens)(mine, batch).sum)
        torch.testing.assert_close(got, of_own_forward(theirs := copy.deepcopy(model), batch))
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict())


def test_a_kept_graph_serves_twice():
    model, batch = model_with("an adapter around it"), data()
    total = ChunkedCLMCrossEntropyLoss(chunk_tokens=4)(model, batch).sum
    total.backward(retain_graph=True)
    once = model.lm_head.lora_B["default"].weight.grad.clone()
    total.backward()
    torch.testing.assert_close(model.lm_head.lora_B["default"].weight.grad, 2 * once)


# -- refused -----------------------------------------------------------------------------------------------


def scale_hook(head, args, output):
    return 2 * output


def refused(model, match, **options):
    ran = []
    model.embeddings.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match=match):
        ChunkedCLMCrossEntropyLoss(**options)(model, data())
    assert not ran  # nothing was computed


def test_a_forward_hook_is_refused_by_name_also_when_it_comes_late():
    model, batch = model_with("linear"), data()
    loss = ChunkedCLMCrossEntropyLoss()
    loss(model, batch)
    handle = model.lm_head.register_forward_hook(scale_hook)
    with pytest.raises(ValueError, match=r"head = 'lm_head': Linear has a forward hook, scale_hook, .* remove it"):
        loss(model, batch)
    refused(model, "scale_hook")
    handle.remove()
    loss(model, batch)


def test_hooks_on_the_gradient_of_the_logits_are_refused():
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        model = model_with("linear")
        getattr(model.lm_head, register)(lambda *_: None)
        refused(model, r"Linear has a backward (pre-)?hook, .*<lambda>")


def test_hooks_inside_a_wrapper_run_as_in_its_own_forward_and_one_on_a_torch_wrapper_is_seen():
    model, batch = model_with("a sequence"), data()
    model.lm_head[0].register_forward_hook(scale_hook)
    want = of_own_forward(model, batch)
    torch.testing.assert_close(step(model, ChunkedCLMCrossEntropyLoss(chunk_tokens=4)(model, batch).sum), want)
    model = model_with("checkpointed")
    model.lm_head.register_forward_hook(scale_hook)
    refused(model, "CheckpointWrapper has a forward hook, scale_hook")


def test_a_call_of_its_own_is_refused():
    class Loud(nn.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    refused(Model(Loud(D, V)), "Loud has a __call__ of its own")


def test_what_a_chunked_call_would_do_too_often_is_refused():
    model = model_with("an adapter around it")
    model.lm_head.lora_A["default"].weight.register_hook(lambda gradient: gradient / 2)
    refused(model, r"LoraWrapper has a hook on the gradient of lora_A.default.weight, .*<lambda>")
    refused(model_with("a sequence"), "Sequential is more than a linear layer: recompute = True", recompute=True)


def test_a_hook_on_what_a_head_reads_elsewhere_is_refused():
    model = model_with("a gradient outside")
    vars(model.lm_head)["outside"].register_hook(scale_gradient)
    with pytest.raises(ValueError, match=r"a tensor of shape \(\) that has a hook on its gradient, scale_gradient"):
        ChunkedCLMCrossEntropyLoss()(model, data())


def scale_gradient(gradient):
    return gradient / 2


def test_statistics_of_a_chunk_are_refused_before_a_step_and_other_state_when_it_is_seen():
    refused(Model(nn.Sequential(nn.BatchNorm1d(D), linear())), "holds 0, a BatchNorm1d, whose statistics would be")

    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(D, V)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x) / self.calls

    model, batch = Model(Counting()), data()
    ChunkedCLMCrossEntropyLoss(chunk_tokens=100)(model, batch)
    with pytest.raises(ValueError, match="the head changes its buffer calls in every call of its forward"):
        ChunkedCLMCrossEntropyLoss(chunk_tokens=4)(model, batch)


def test_what_is_no_tensor_of_logits_is_refused():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), None

    with pytest.raises(ValueError, match="the head's forward gave a tuple: it must give logits, as one tensor"):
        ChunkedCLMCrossEntropyLoss()(Model(Pair(D, V)), data())


@pytest.mark.parametrize("ignored", [0.3, 2.0])
def test_where_rows_are_only_masked_ignored_ones_count_nothing(ignored, monkeypatch):
    """As on a device, where the host does not know which rows to leave out."""
    monkeypatch.setattr("chunked_loss._linear_cross_entropy.kept_rows", lambda *_, **__: None)
    for head in ("not finite at zeros", "an adapter around it", "a sequence"):
        model, batch = model_with(head), data(ignored=ignored)
        if ignored < 1:
            want = of_own_forward(model, batch)
        else:
            with torch.no_grad():
                model.embeddings.weight.zero_()
            want = (
                torch.tensor(0.0, dtype=torch.float64),
                {name: torch.zeros_like(p) for name, p in everything_that_trains(model).items() if p.requires_grad},
            )
        got, gradients = step(model, ChunkedCLMCrossEntropyLoss(chunk_tokens=4)(model, batch).sum)
        torch.testing.assert_close(got, want[0])
        for name, gradient in want[1].items():
            found = gradients[name]
            if gradient is not None and found is not None:
                torch.testing.assert_close(found, gradient)
        assert any(gradient is not None for name, gradient in gradients.items() if name.startswith("lm_head"))


def test_a_hook_on_the_gradient_of_a_linear_heads_weight_runs_once_on_the_whole():
    model, batch, calls = model_with("linear"), data(), []
    want = of_own_forward(model, batch)
    model.lm_head.weight.register_hook(lambda gradient: calls.append(1))
    torch.testing.assert_close(step(model, ChunkedCLMCrossEntropyLoss(chunk_tokens=1)(model, batch).sum), want)
    assert calls == [1]


def test_a_component_refuses_before_the_first_step():
    model = model_with("linear")
    model.lm_head.register_forward_hook(scale_hook)
    found = load_registry().find("loss", "chunked_clm_cross_entropy").component
    with pytest.raises(ValueError, match="Linear has a forward hook, scale_hook"):
        Selected(found, found.load_config_class()()).build(SimpleNamespace(model=model))


def test_the_look_at_the_head_costs_no_synchronisation():
    def syncs(head):
        model, batch = model_with(head), data(ignored=0)
        with count_host_syncs() as counted:
            ChunkedCLMCrossEntropyLoss(chunk_tokens=4)(model, batch).sum.backward()
        return counted.total

    assert syncs("an adapter around it") == syncs("a parametrized weight") == syncs("linear")


# -- several ranks -----------------------------------------------------------------------------------------


def sharded_step(head, wrap, keep=False, dtype=None):
    """Per way of computing the loss: gathers and reductions by phase, and whole gradients."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from moe_core.testing import count_collectives

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model = model_with(head, torch.float32)
    fully_shard(model.lm_head, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if wrap == "compiled":
        model.lm_head = torch.compile(model.lm_head, backend="eager")
    elif wrap == "checkpointed":
        model.lm_head = checkpoint_wrapper(model.lm_head)
    batch = data(ignored=2.0 if dist.get_rank() == 1 else 0.3)
    results = []
    for chunked in (True, False):
        with count_collectives() as forward:
            if chunked:
                total = ChunkedCLMCrossEntropyLoss(chunk_tokens=4, keep_head_unsharded=keep)(model, batch).sum
            else:
                logits = model(batch.tokens).float().flatten(0, 1)
                total = F.cross_entropy(logits, batch.labels.flatten(), reduction="sum")
        with count_collectives() as backward:
            total.backward()
        gradients = {name: None if p.grad is None else p.grad.full_tensor() for name, p in model.named_parameters()}
        model.zero_grad()
        results.append((total.detach(), gradients, kinds(forward), kinds(backward)))
    return results


def kinds(collectives):
    of = collectives.calls.items()
    return sum(n for kind, n in of if "gather" in kind), sum(n for kind, n in of if "reduce_scatter" in kind)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("head", "wrap"),
    [
        ("linear", None),
        ("linear", "compiled"),
        ("linear", "checkpointed"),
        ("an adapter around it", None),
        ("a scale in a subclass", None),
        ("a sequence", None),
        ("checkpointed", None),
        ("a parametrized weight", None),
        ("a parametrized bias", None),
        ("a normed weight", None),
        ("a normed weight by hook", None),
        ("a pre-hook that trains", None),
    ],
)
def test_a_sharded_head_of_any_kind_is_gathered_and_reduced_once(head, wrap, keep):
    for (total, gradients, forward, backward), (want, want_gradients, *_) in run_ranks(
        sharded_step, 2, head, wrap, keep
    ):
        torch.testing.assert_close(total, want)
        torch.testing.assert_close(gradients, want_gradients, rtol=1e-5, atol=1e-6)
        computed = head.startswith(("a parametrized", "a normed weight", "a pre-hook"))
        assert forward == (2, 0)
        # what was computed before the loss is differentiated with the weights in place
        assert backward == (int(computed and not keep), 2)


@pytest.mark.parametrize("head", ["an adapter around it", "a sequence", "a parametrized weight"])
def test_in_bf16_a_sharded_head_of_any_kind_reduces_gradients_of_one_dtype(head):
    for (total, gradients, *_), (want, want_gradients, *_) in run_ranks(
        sharded_step, 2, head, None, False, torch.bfloat16
    ):
        torch.testing.assert_close(total, want, rtol=1e-2, atol=0)
        torch.testing.assert_close(gradients, want_gradients, rtol=5e-2, atol=5e-2)


def test_a_policy_that_rounds_the_loss_is_refused_before_a_step():
    def attempt():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = model_with("linear", torch.float32)
        policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16)
        fully_shard(model.lm_head, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
        with pytest.raises(ValueError, match=r"gives out torch.bfloat16 by its mixed-precision policy"):
            ChunkedCLMCrossEntropyLoss().check_head(model)

    run_ranks(attempt, 1)


def test_a_unit_inside_the_head_is_refused():
    def attempt():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = model_with("a sequence", torch.float32)
        fully_shard(model.lm_head[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        try:
            ChunkedCLMCrossEntropyLoss()(model, data())
        except ValueError as error:
            return str(error)

    for message in run_ranks(attempt, 2):
        assert "Sequential holds 0, a FSDPLinear, whose collectives would run for every chunk" in message

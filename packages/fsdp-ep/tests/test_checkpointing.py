"""Activation checkpointing in one process: gradients, names, and what is computed again."""

import logging
import shutil
from collections import Counter

import pytest
import torch
import torch._dynamo.utils
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_ep import ShardingError, apply_activation_checkpointing

D, T = 6, 5


@torch.library.custom_op("fsdp_ep_test::choose", mutates_args=())
def _choose(scores: torch.Tensor) -> torch.Tensor:
    """Its choice changes from call to call, as that of a router at a near-tie may."""
    _choose.calls += 1
    return scores.argsort(dim=-1).roll(_choose.calls, -1)[:, :2].contiguous()


_choose.calls = 0


@_choose.register_fake
def _(scores: torch.Tensor) -> torch.Tensor:
    return scores.new_empty(scores.shape[0], 2, dtype=torch.int64)


@pytest.fixture
def marked():
    operator = torch.ops.fsdp_ep_test.choose.default
    operator.must_save = True
    yield
    del operator.must_save


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.experts = nn.Linear(D, 4 * D)
        self.dropout = nn.Dropout(0.5)
        self.chosen = []

    def forward(self, hidden: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        scores = self.router(hidden).sigmoid()
        ids = _choose(scores.detach())
        self.chosen.append(ids)
        outs = self.experts(hidden).unflatten(-1, (4, D)) * scores.unsqueeze(-1)
        picked = outs.gather(1, ids.unsqueeze(-1).expand(-1, -1, D)).sum(1)
        return hidden + scale * self.dropout(picked.tanh())


class _Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(blocks))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, scale=0.5)
        return hidden


def _run(mode: str, every: int = 1) -> tuple[_Model, torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    _choose.calls = 0
    model = _Model()
    apply_activation_checkpointing(model, mode, every)
    hidden = torch.randn(T, D, requires_grad=True)
    out = model(hidden)
    out.square().sum().backward()
    return model, out, [hidden.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(("mode", "every"), [("full", 1), ("every_nth", 2), ("selective", 1)])
def test_gradients_are_bit_identical_though_the_router_would_choose_otherwise(marked, mode, every):
    plain, out, expected = _run("none")
    model, again, actual = _run(mode, every)
    assert torch.equal(out, again)
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one, other)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    for layer in model.layers:
        assert all(torch.equal(layer.chosen[0], chosen) for chosen in layer.chosen)


def test_without_the_mark_the_gradients_differ():
    expected, actual = _run("none")[2], _run("full")[2]
    assert not all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


@pytest.mark.parametrize(
    ("mode", "every", "recomputed"),
    [("none", 1, [0, 0, 0]), ("full", 1, [1, 1, 1]), ("every_nth", 2, [1, 0, 1]), ("every_nth", 3, [1, 0, 0])],
)
def test_which_blocks_run_again(marked, mode, every, recomputed):
    model, _, _ = _run(mode, every)
    assert [len(layer.chosen) - 1 for layer in model.layers] == recomputed


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_selective_keeps_matrix_products_and_recomputes_the_rest(marked):
    counts = {}
    for mode in ("none", "full", "selective"):
        with _Count() as counts[mode]:
            _run(mode)
    products = {mode: count.calls["aten::addmm"] for mode, count in counts.items()}
    assert products == {"none": 6, "full": 12, "selective": 6}
    assert counts["selective"].calls["aten::tanh"] == 6


@pytest.mark.parametrize(("expensive", "calls"), [(True, 3), (False, 6)])
def test_selective_keeps_what_says_that_it_is_expensive(expensive, calls):
    operator = torch.ops.fsdp_ep_test.choose.default
    operator.expensive = expensive
    try:
        _run("selective")
    finally:
        del operator.expensive
    assert _choose.calls == calls


class _IntoABuffer(torch.autograd.Function):
    """As compiled code multiplies."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(rows, weight)
        return torch.mm(rows, weight.t(), out=rows.new_empty(rows.shape[0], weight.shape[0]))

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ rows


_PRODUCTS = {
    "mm": lambda rows, weight: rows @ weight.t(),
    "3-D linear": lambda rows, weight: nn.functional.linear(rows[None], weight)[0],
    "4-D matmul": lambda rows, weight: (rows[None, None] @ weight.t()[None, None])[0, 0],
    "out=": _IntoABuffer.apply,
}
_WRITES = {
    "nothing": lambda product: product,
    "mul_": lambda product: product.mul_(1.5),
    "a view": lambda product: product[1:].mul_(1.5),
    "foreach": lambda product: torch._foreach_mul_([product.detach()], 1.5),
    "data": lambda product: product.data.mul_(1.5),
}


class _Overwriting(nn.Module):
    """Returns its product and something of it, so that the caller may write as well."""

    def __init__(self, product: str, write: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))
        self.product, self.write = _PRODUCTS[product], _WRITES[write]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = self.product(hidden, self.weight)
        self.write(product)
        return product, torch.tanh(product)


@pytest.mark.parametrize("product", _PRODUCTS)
@pytest.mark.parametrize("write", _WRITES)
def test_selective_keeps_a_product_as_it_was_before_it_was_written_over(product, write):
    """By the block itself, then by whoever called it; both would change the recomputed tanh."""
    gradients = {}
    for mode in ("none", "selective"):
        torch.manual_seed(0)
        blocks = [_Overwriting(product, write) for _ in range(2)]
        apply_activation_checkpointing(nn.ModuleList(blocks), mode, blocks=blocks)
        leaf = torch.randn(T, D, requires_grad=True)
        hidden = leaf * 1
        for block in blocks:
            bare, hidden = block(hidden)
            bare.detach().mul_(3)
            hidden = hidden * 2
        inputs = (leaf, *(block.weight for block in blocks))
        gradients[mode] = [
            torch.autograd.grad(hidden.sum(), inputs, retain_graph=True),
            torch.autograd.grad(hidden.sum(), inputs),
        ]
    for expected, actual in zip(gradients["none"], gradients["selective"], strict=True):
        assert all(map(torch.equal, expected, actual))


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch's compiler for the CPU needs one of C++")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, on its import
def test_selective_recomputes_the_products_of_compiled_code():
    """Which writes them into buffers: what is kept of them would leave the buffers of the recomputation empty."""
    gradients = {}
    for mode in ("none", "selective"):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(D, D, bias=False), nn.Tanh())
        block.forward = torch.compile(block.forward)
        apply_activation_checkpointing(block, mode, blocks=[block])
        hidden = torch.randn(T, D, requires_grad=True)
        gradients[mode] = torch.autograd.grad(block(hidden).sum(), (hidden, block[0].weight))
    assert all(map(torch.equal, gradients["none"], gradients["selective"]))


@torch.library.custom_op("fsdp_ep_test::write", mutates_args={"scores"})
def _write(scores: torch.Tensor) -> None:
    scores.mul_(2)


def test_an_operator_that_writes_cannot_ask_to_be_saved():
    operator = torch.ops.fsdp_ep_test.write.default
    operator.must_save = True
    block = nn.Linear(D, D)
    block.forward = lambda hidden: _write(hidden.detach()) or hidden * 2
    apply_activation_checkpointing(block, "full", blocks=[block])
    try:
        with pytest.raises(ShardingError, match="writes to its arguments"):
            block(torch.randn(T, D, requires_grad=True))
    finally:
        del operator.must_save


def test_a_second_backward_recomputes_once_more(marked):
    torch.manual_seed(0)
    model = apply_activation_checkpointing(_Model(), "full")
    hidden = torch.randn(T, D, requires_grad=True)
    out = model(hidden).square().sum()
    (first,) = torch.autograd.grad(out, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(out, hidden)
    assert torch.equal(first, second)


def test_no_checkpoint_without_gradients(marked):
    model = apply_activation_checkpointing(_Model(), "full")
    with torch.no_grad():
        assert not model(torch.randn(T, D)).requires_grad


@pytest.fixture
def no_logging():
    """Tracing writes thousands of records, and pytest would keep each."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_a_compiled_block_is_checkpointed_and_keeps_its_choice(marked, no_logging):
    def gradients(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        _choose.calls = 0
        model = _Model(1).eval()
        if compiled:
            model.layers[0].forward = torch.compile(model.layers[0].forward, backend="aot_eager")
        apply_activation_checkpointing(model, "full")
        model(torch.randn(T, D)).square().sum().backward()
        assert _choose.calls == 1, "once in the forward pass, not in the recomputation"
        return [parameter.grad for parameter in model.parameters()]

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for one, other in zip(gradients(False), gradients(True), strict=True):
        assert (one - other).norm() < 1e-6 * one.norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


class _Drifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.calls):
            chosen = _choose(hidden.detach())
        return hidden * chosen.sum()


def test_a_kept_operator_called_more_often_is_an_error(marked):
    model = nn.Sequential(_Drifting())
    apply_activation_checkpointing(model, "full", blocks=[model[0]])
    hidden = torch.randn(T, D, requires_grad=True)
    out = model(hidden)
    with pytest.raises(RuntimeError, match="more often than the forward pass did"):
        out.sum().backward()


def test_what_is_refused():
    with pytest.raises(ShardingError, match="none, full, every_nth, selective"):
        apply_activation_checkpointing(_Model(), "blockwise")
    with pytest.raises(ShardingError, match="at least 1"):
        apply_activation_checkpointing(_Model(), "every_nth", 0)
    with pytest.raises(ShardingError, match=r"nn\.ModuleList"):
        apply_activation_checkpointing(nn.Linear(2, 2), "full")
    model = apply_activation_checkpointing(_Model(), "full")
    with pytest.raises(ShardingError, match="already"):
        apply_activation_checkpointing(model, "full")

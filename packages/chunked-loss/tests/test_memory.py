"""What exists at a time: never [T, V], one chunk's logits during the call, and none of them after it."""

import gc
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from chunked_loss import ChunkedCLMCrossEntropyLoss, _gradients_in_forward, compiled, linear_cross_entropy

T, D, V, CHUNK = 64, 3, 50, 16
OPTIONS = {
    "plain": {},
    "every option": {
        "label_smoothing": 0.1,
        "z_loss": 0.1,
        "softcap": 5.0,
        "class_weight": torch.rand(V),
        "token_weight": torch.rand(T),
        "vocab_size": V - 1,
    },
}


class Sizes(TorchDispatchMode):
    """The largest tensor that any operation gave, in elements, and the number of matrix products."""

    def __init__(self):
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def inputs(dtype=torch.float32):
    hidden = torch.randn(T, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, V - 1, (T,))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("recompute", [False, True])
def test_no_operation_gives_more_than_one_chunk_of_logits(reduction, dtype, options, recompute):
    hidden, weight, labels = inputs(dtype)
    how = {"chunk_tokens": CHUNK, "reduction": reduction, "recompute": recompute, **OPTIONS[options]}
    with Sizes() as sizes:
        linear_cross_entropy(hidden, weight, labels, **how).sum().backward()
        with torch.no_grad():
            linear_cross_entropy(hidden, weight, labels, **how)
        linear_cross_entropy(hidden.detach(), weight.detach(), labels, **how)
    assert sizes.largest <= CHUNK * V
    assert sizes.largest >= CHUNK * (V - 1)


class Batch(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor | None = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(V, D)
        self.lm_head = nn.Linear(D, V, bias=False)

    def forward(self, tokens, *, document_ids=None, return_hidden=False):
        assert return_hidden
        return self.embeddings(tokens)


@pytest.mark.parametrize("training", [True, False])
def test_nor_does_the_loss_of_a_model_in_training_or_evaluation(training):
    model, tokens = Model().train(training), torch.randint(0, V, (4, T // 4))
    loss = ChunkedCLMCrossEntropyLoss(chunk_tokens=CHUNK)
    with Sizes() as sizes:
        loss(model, Batch(tokens, tokens)).sum.backward()
        with torch.no_grad():
            loss(model, Batch(tokens, tokens))
    assert sizes.largest == CHUNK * V


# dynamo hides this warning of its own look at a tensor, which cannot work where warnings are errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# and it makes an autograd function's instance itself, which torch has deprecated
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("what", ["core", "everything"])
def test_nor_does_a_compiled_graph_hold_one(what):
    from torch._dynamo.backends.common import aot_autograd

    largest, graphs = [0], []

    def inspect(graph, _):
        graphs.append(graph)
        for node in graph.graph.nodes:
            for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
                if isinstance(value, torch.Tensor):
                    largest[0] = max(largest[0], value.numel())
        return graph.forward

    backend = aot_autograd(fw_compiler=inspect, bw_compiler=inspect)
    torch._dynamo.reset()
    hidden, weight, labels = inputs()
    want = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    if what == "everything":

        def function(hidden, weight):
            return linear_cross_entropy(hidden, weight, labels, chunk_tokens=CHUNK)

        got = torch.autograd.grad(torch.compile(function, backend=backend)(hidden, weight), (hidden, weight))
        torch.testing.assert_close(got, want)
    else:
        model, tokens = Model(), torch.randint(0, V, (4, T // 4))
        loss = compiled(ChunkedCLMCrossEntropyLoss(chunk_tokens=CHUNK), backend=backend)
        loss(model, Batch(tokens, tokens)).sum.backward()
    assert graphs
    assert largest[0] == CHUNK * V
    torch._dynamo.reset()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("recompute", [False, True])
def test_no_logits_survive_the_call(reduction, recompute):
    hidden, weight, labels = inputs()

    def sizes():
        gc.collect()
        return [t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is torch.Tensor]

    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        loss = linear_cross_entropy(
            hidden, weight, labels, chunk_tokens=CHUNK, reduction=reduction, recompute=recompute
        )
    assert max(saved) < CHUNK * (V - 1)
    assert max(sizes()) < CHUNK * (V - 1) * 4
    loss.sum().backward()
    assert max(sizes()) < CHUNK * (V - 1) * 4


def test_evaluation_forms_no_gradients():
    hidden, weight, labels = inputs()
    with torch.no_grad(), Sizes() as sizes:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=CHUNK)
    assert sizes.products == T // CHUNK  # one a chunk
    with Sizes() as sizes:
        linear_cross_entropy(hidden.detach(), weight, labels, chunk_tokens=CHUNK)
    assert sizes.products == 2 * T // CHUNK  # that, and the one gradient that is wanted


# without that private name gradients are copied, as documented; the pinned torch has it, so CI skips nothing here
@pytest.mark.skipif(_gradients_in_forward._keeps_graph is None, reason="torch does not tell whether a graph is kept")
def test_the_last_backward_scales_the_gradient_where_it_is():
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=CHUNK)
    saved = loss.grad_fn.saved_tensors[1].data_ptr()
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (last,) = torch.autograd.grad(loss, weight)
    assert first.data_ptr() != saved
    assert last.data_ptr() == saved

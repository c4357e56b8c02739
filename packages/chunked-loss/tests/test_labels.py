"""Labels that are no class: one clear error wherever they stand, and never a number."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from chunked_loss import (
    ChunkedCLMCrossEntropyLoss,
    CLMCrossEntropyLoss,
    clm_cross_entropy_loss,
    clm_cross_entropy_loss_sum,
    compiled,
    linear_cross_entropy,
)
from moe_core.testing import RankFailed, count_host_syncs, run_ranks

B, S, D, V = 3, 5, 6, 19


class Batch(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor | None = None


class Scaled(nn.Linear):
    def forward(self, x):
        return 0.5 * super().forward(x)


class Model(nn.Module):
    def __init__(self, head=nn.Linear):
        super().__init__()
        self.embeddings = nn.Embedding(V, D)
        self.lm_head = head(D, V, bias=False)

    def forward(self, tokens, *, document_ids=None, return_hidden=False):
        hidden = self.embeddings(tokens)
        return hidden if return_hidden else self.lm_head(hidden)


def labels_with(label, position=(2, 1)):
    labels = torch.arange(B * S).reshape(B, S)
    labels[0, 3] = -100
    labels[position] = label
    return labels


def of_hidden(**options):
    def loss(labels):
        torch.manual_seed(0)
        hidden = torch.randn(*labels.shape, D, requires_grad=True)
        return linear_cross_entropy(hidden, torch.randn(V, D), labels, chunk_tokens=2, **options)

    return loss


def of_logits(function):
    def loss(labels):
        torch.manual_seed(0)
        return function(torch.randn(*labels.shape, V), labels)

    return loss


def of_model(loss, head=nn.Linear):
    def total(labels):
        torch.manual_seed(0)
        return loss(Model(head), Batch(labels.long().clamp(0, V - 1), labels)).sum

    return total


LOSSES = {
    "in chunks": of_hidden(),
    "per token": of_hidden(reduction="none"),
    "with class weights": of_hidden(class_weight=torch.ones(V)),
    "recomputed": of_hidden(recompute=True),
    "with a known count": of_hidden(valid_tokens=B * S - 1),
    "sum on logits": of_logits(clm_cross_entropy_loss_sum),
    "mean on logits": of_logits(clm_cross_entropy_loss),
    "smoothed on logits": of_logits(lambda *args: clm_cross_entropy_loss_sum(*args, label_smoothing=0.1)),
    "of a model, chunked": of_model(ChunkedCLMCrossEntropyLoss(chunk_tokens=2)),
    "of a model, any head": of_model(ChunkedCLMCrossEntropyLoss(chunk_tokens=2), Scaled),
    "of a model, full": of_model(CLMCrossEntropyLoss()),
    "of a model, chunked and compiled": of_model(compiled(ChunkedCLMCrossEntropyLoss(chunk_tokens=2), backend="eager")),
    "of a model, full and compiled": of_model(compiled(CLMCrossEntropyLoss(), backend="eager")),
}
# dynamo hides this warning of its own look at a tensor, which cannot work where warnings are errors
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.mark.parametrize("position", [(0, 0), (2, 1), (2, 4)])
@pytest.mark.parametrize("label", [V, V + 1000, -1, -99])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_label_out_of_range_is_named_with_its_place(loss, label, position):
    with pytest.raises(
        ValueError, match=rf"labels\[{position[0]}, {position[1]}\] = {label}: must be 0 to 18 \(V = 19\)"
    ):
        LOSSES[loss](labels_with(label, position))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
@pytest.mark.parametrize("loss", LOSSES)
def test_smaller_integers_are_labels_too(loss, dtype):
    torch.testing.assert_close(LOSSES[loss](labels_with(3).to(dtype)), LOSSES[loss](labels_with(3)), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"labels\[2, 1\] = 19: must be 0 to 18"):
        LOSSES[loss](labels_with(V).to(dtype))


def test_unsigned_labels_meet_no_wrapped_ignore_index():
    labels = torch.tensor([[156, 3]])  # -100 modulo 256
    hidden, weight = torch.randn(1, 2, D), torch.randn(200, D)
    want = F.cross_entropy((hidden @ weight.T)[0], labels[0])
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels.to(torch.uint8)), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_no_integer_is_no_label(loss, dtype):
    with pytest.raises(ValueError, match=f"labels are {dtype}: must be integers"):
        LOSSES[loss](labels_with(3).to(dtype))


def test_padding_of_the_vocabulary_is_no_class_and_the_number_of_wrong_labels_is_told():
    with pytest.raises(
        ValueError, match=r"labels\[2, 0\] = 10: must be 0 to 9 \(V = 10\), .*; 4 more are out of range"
    ):
        of_hidden(vocab_size=10)(torch.arange(B * S).reshape(B, S))


def test_the_ignored_label_may_be_any():
    for ignore_index in (V, -1, 4):
        loss = of_hidden(ignore_index=ignore_index)(labels_with(ignore_index).clamp(min=min(0, ignore_index)))
        assert loss.isfinite()


class Asserted(TorchDispatchMode):
    """The conditions that are left to the device."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._assert_async.msg:
            self.messages.append(args[1])
        return func(*args, **(kwargs or {}))


def test_a_device_is_asked_to_stop_and_nothing_is_read_back():
    labels = labels_with(V)
    rows = torch.randn(B, S, D)
    for loss in (
        lambda: linear_cross_entropy(rows.to("meta"), torch.randn(V, D).to("meta"), labels.to("meta")),
        lambda: clm_cross_entropy_loss_sum(torch.randn(B, S, V).to("meta"), labels.to("meta")),
    ):
        with Asserted() as asserted, count_host_syncs() as syncs:
            loss()
        assert asserted.messages == ["a label is out of range: must be 0 to 18 (V = 19), or ignore_index = -100"]
        assert syncs.total == 0


# inductor imports a part of torch that torch itself has deprecated
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("label", [V, -1])
@pytest.mark.parametrize("loss", ["in chunks", "sum on logits", "mean on logits"])
def test_compiled_code_stops_too(loss, label, backend):
    torch._dynamo.reset()
    function = torch.compile(LOSSES[loss], backend=backend)
    assert function(labels_with(3)).isfinite().all()
    # inductor's own assertion on an index may come first
    own = "|index out of bounds" if backend == "inductor" else ""
    with pytest.raises(RuntimeError, match="a label is out of range: must be 0 to 18" + own):
        function(labels_with(label))
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [ChunkedCLMCrossEntropyLoss, CLMCrossEntropyLoss])
@pytest.mark.parametrize("head", [nn.Linear, Scaled])
def test_one_rank_with_a_wrong_label_ends_all(kind, head):
    def step():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = Model(head)
        fully_shard(model.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        labels = labels_with(V if dist.get_rank() == 1 else 3)
        kind()(model, Batch(labels.clamp(0, V - 1), labels)).sum.backward()

    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2 failed.*LabelError: labels\[2, 1\] = 19"):
        run_ranks(step, 2, timeout=30)

"""Ignored rows: left out of the products where that is free, and zeros everywhere else."""

import math

import pytest
import torch
import torch.nn.functional as F

from chunked_loss import _gradients_in_forward, _linear_cross_entropy, linear_cross_entropy
from chunked_loss._labels import kept_rows
from moe_core.testing import count_host_syncs

T, D, V = 13, 7, 29
VALID = torch.tensor([False, True, True, False, True, False])


def inputs():
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(T, D, generator=g), torch.randn(V, D, generator=g)
    labels = torch.randint(0, V, (T,), generator=g)
    labels[2] = labels[11] = labels[12] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("where", ["on the host", "by the count", "unknown"])
def test_valid_rows_are_found_in_order(where):
    if where == "unknown":
        assert kept_rows(VALID, None, on_host=False) is None
    else:
        got = kept_rows(VALID, 3 if where == "by the count" else None, on_host=where == "on the host")
        assert got.tolist() == [1, 2, 4]


def test_off_the_host_nothing_is_read_back():
    with count_host_syncs() as syncs:
        kept_rows(VALID, 3, on_host=False)
    assert syncs.total == 0
    with count_host_syncs() as syncs:
        kept_rows(VALID, None, on_host=True)
    assert syncs.total > 0


def test_a_count_that_is_too_large_only_keeps_more():
    got = kept_rows(VALID, 5, on_host=False).tolist()
    assert got[:3] == [1, 2, 4]
    assert len(set(got)) == 5
    assert kept_rows(VALID, 6, on_host=False) is None
    assert kept_rows(VALID.new_ones(4), None, on_host=True) is None


def test_a_count_that_is_too_small_raises_wherever_the_labels_are():
    with pytest.raises(ValueError, match="valid_tokens = 2: 3 labels are valid"):
        kept_rows(VALID, 2, on_host=True)
    with pytest.raises(RuntimeError, match="more labels are valid than valid_tokens = 2"):
        kept_rows(VALID, 2, on_host=False)
    hidden, weight, labels = inputs()
    with pytest.raises(ValueError, match="valid_tokens = 14: must be between 0 and the number of labels, 13"):
        linear_cross_entropy(hidden, weight, labels, valid_tokens=14)


WAYS = {
    "on the host": lambda valid, count, on_host: kept_rows(valid, count, on_host=True),
    "by the count": lambda valid, count, on_host: kept_rows(valid, 10, on_host=False),
    "by a larger count": lambda valid, count, on_host: kept_rows(valid, 12, on_host=False),
    "all rows": lambda valid, count, on_host: None,
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recompute", [False, True])
def test_every_way_gives_the_same_and_ignored_rows_give_exactly_zero(monkeypatch, way, reduction, recompute):
    monkeypatch.setattr(_linear_cross_entropy, "kept_rows", WAYS[way])
    hidden, weight, labels = inputs()
    want = F.cross_entropy(hidden.double() @ weight.double().T, labels, reduction=reduction)
    factor = torch.linspace(-1, 2, T) if reduction == "none" else torch.tensor(3.0)
    want_grads = torch.autograd.grad((want * factor).sum(), (hidden, weight))
    with torch.no_grad():
        hidden[labels == -100] = math.nan
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk_tokens=4, recompute=recompute)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-6)
    grads = torch.autograd.grad((loss * factor).sum(), (hidden, weight))
    torch.testing.assert_close(grads, want_grads)
    assert (grads[0][labels == -100] == 0).all()
    if reduction == "none":
        assert (loss[labels == -100] == 0).all()


def test_ignored_rows_are_not_multiplied(monkeypatch):
    rows = []
    chunk_pass = _gradients_in_forward._chunk_pass

    def counted(hidden, *others):
        rows.append(len(hidden))
        return chunk_pass(hidden, *others)

    monkeypatch.setattr(_gradients_in_forward, "_chunk_pass", counted)
    hidden, weight, labels = inputs()
    linear_cross_entropy(hidden, weight, labels)
    assert rows == [10]


def test_labels_may_stay_on_the_cpu():
    hidden, weight, _ = (tensor.to("meta") for tensor in inputs())
    # shapes alone: that everything meets on hidden's device
    loss = linear_cross_entropy(hidden, weight, inputs()[2])
    assert loss.device.type == "meta"

"""`linear_cross_entropy` against plain cross entropy on full logits in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from chunked_loss import linear_cross_entropy

T, D, V = 13, 7, 29


def reference(
    hidden, weight, labels, *, bias=None, reduction="mean", label_smoothing=0.0, z_loss=0.0, softcap=None,
    class_weight=None, token_weight=None, denominator=None, ignore_index=-100,
):  # fmt: skip
    """A loop over tokens, written from the definition, in the dtype of its inputs."""
    losses, count = [], 0.0
    for t in range(hidden.shape[0]):
        if labels[t] == ignore_index:
            losses.append(0 * hidden[t].sum() + 0 * weight.sum())
            continue
        logits = weight @ hidden[t] + (0 if bias is None else bias)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        log_p = logits - logits.logsumexp(0)
        w = torch.ones_like(logits) if class_weight is None else class_weight
        loss = -(1 - label_smoothing) * w[labels[t]] * log_p[labels[t]]
        loss = loss - label_smoothing / len(logits) * (w * log_p).sum()
        loss = loss + z_loss * logits.logsumexp(0) ** 2
        tw = 1.0 if token_weight is None else token_weight[t]
        losses.append(tw * loss)
        count += tw * w[labels[t]]
    losses = torch.stack(losses)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (count if denominator is None else denominator)


def inputs(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, D, generator=g, dtype=torch.float64)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64)
    labels = torch.randint(0, V, (T,), generator=g)
    labels[2] = labels[11] = -100
    return hidden.to(dtype), weight.to(dtype), labels


def option_sets():
    g = torch.Generator().manual_seed(7)
    one = {
        "plain": {},
        "bias": {"bias": torch.randn(V, generator=g, dtype=torch.float64)},
        "label_smoothing": {"label_smoothing": 0.13},
        "z_loss": {"z_loss": 0.02},
        "softcap": {"softcap": 1.7},
        "class_weight": {"class_weight": torch.rand(V, generator=g, dtype=torch.float64) + 0.1},
        "token_weight": {"token_weight": torch.rand(T, generator=g, dtype=torch.float64) + 0.1},
    }
    every = {key: value for options in one.values() for key, value in options.items()}
    return {**one, "denominator": {"denominator": 3.5}, "every option": every}


OPTIONS = option_sets()


def to(value, dtype):
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


def grads(fn, hidden, weight, labels, upstream, **options):
    leaves = [hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()]
    if options.get("bias") is not None:
        options["bias"] = options["bias"].detach().clone().requires_grad_()
        leaves.append(options["bias"])
    loss = fn(leaves[0], leaves[1], labels, **options)
    return loss.detach(), torch.autograd.grad((upstream * loss).sum(), leaves)


@pytest.mark.parametrize(
    ("name", "reduction"),
    # only the mean divides
    [(name, r) for name in OPTIONS for r in ("mean", "sum", "none") if r == "mean" or name != "denominator"],
)
def test_value_and_gradients_equal_the_definition_for_every_chunk_size(name, reduction):
    options = dict(OPTIONS[name], reduction=reduction)
    if reduction != "mean":
        options.pop("denominator", None)
    hidden, weight, labels = inputs()
    upstream = torch.linspace(-2, 3, T, dtype=torch.float64) if reduction == "none" else 3.0
    want = grads(reference, hidden, weight, labels, upstream, **options)
    for chunk_tokens in (1, 5, T, T + 4):
        got = grads(linear_cross_entropy, hidden, weight, labels, upstream, chunk_tokens=chunk_tokens, **options)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_agrees_with_torch_where_torch_has_the_option():
    hidden, weight, labels = inputs()
    class_weight = OPTIONS["class_weight"]["class_weight"]
    want = F.cross_entropy(hidden @ weight.T, labels, weight=class_weight, label_smoothing=0.2)
    got = linear_cross_entropy(hidden, weight, labels, class_weight=class_weight, label_smoothing=0.2, chunk_tokens=4)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", OPTIONS)
def test_fp32_is_within_1e_6(name):
    hidden, weight, labels = inputs()
    want = grads(reference, hidden, weight, labels, 1.0, **OPTIONS[name])
    options = {key: to(value, torch.float32) for key, value in OPTIONS[name].items()}
    got = grads(linear_cross_entropy, hidden.float(), weight.float(), labels, 1.0, chunk_tokens=3, **options)
    for mine, exact in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
        assert mine.dtype == torch.float32
        assert (mine.double() - exact).abs().max() <= 1e-6 * exact.abs().max()


def test_ignored_rows_are_exactly_zero_even_if_they_hold_nan():
    hidden, weight, labels = inputs(torch.float32)
    clean = grads(linear_cross_entropy, hidden, weight, labels, 1.0, chunk_tokens=4)
    hidden[labels == -100] = math.nan
    for reduction in ("mean", "none"):
        loss, (d_hidden, d_weight) = grads(
            linear_cross_entropy, hidden, weight, labels, 1.0, chunk_tokens=4, reduction=reduction
        )
        assert (d_hidden[labels == -100] == 0).all()
        assert d_weight.isfinite().all()
        assert loss.isfinite().all()
        if reduction == "mean":
            torch.testing.assert_close((loss, d_weight), (clean[0], clean[1][1]), rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tokens", [0, 6])
def test_nothing_to_count_is_zero_with_a_graph(reduction, tokens):
    hidden = torch.randn(tokens, D, requires_grad=True)
    weight = torch.randn(V, D, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.full((tokens,), -100), reduction=reduction, chunk_tokens=4)
    assert (loss == 0).all()
    loss.sum().backward()
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_that_are_all_zero_give_zero_and_not_nan(recompute):
    hidden, weight, labels = inputs(torch.float64)
    hidden.requires_grad_()
    for options in ({"token_weight": torch.zeros(len(labels))}, {"class_weight": torch.zeros(len(weight))}):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4, recompute=recompute, **options)
        assert loss.item() == 0.0
        (gradient,) = torch.autograd.grad(loss, hidden)
        assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_retained_graph_serves_several_backward_passes(reduction, dtype):
    hidden, weight, labels = inputs(dtype)
    want = grads(reference, hidden.double(), weight.double(), labels, 1.0, reduction=reduction)[1]
    hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4, reduction=reduction).sum()
    got = [torch.autograd.grad(factor * loss, (hidden, weight), retain_graph=factor != 3) for factor in (2, -1, 3)]
    for factor, gradients in zip((2, -1, 3), got, strict=True):
        for mine, exact in zip(gradients, want, strict=True):
            tolerance = 1e-12 if dtype == torch.float64 else 4e-3
            assert (mine.double() - factor * exact).norm() <= tolerance * (factor * exact).norm()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_gradients_that_were_handed_out_are_left_alone_by_later_passes():
    hidden, weight, labels = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    before = [gradient.clone() for gradient in first]
    torch.autograd.grad(5 * loss, (hidden, weight))
    torch.testing.assert_close(list(first), before, rtol=0, atol=0)


def test_microbatches_accumulate_to_the_big_batch():
    hidden, weight, labels = inputs()
    want = grads(reference, hidden, weight, labels, 1.0)
    hidden.requires_grad_(), weight.requires_grad_()
    valid = (labels != -100).sum()
    losses = []
    for rows in (slice(0, 9), slice(9, 10), slice(10, T)):
        losses.append(linear_cross_entropy(hidden[rows], weight, labels[rows], denominator=valid, chunk_tokens=4))
        losses[-1].backward()
    torch.testing.assert_close((sum(losses).detach(), (hidden.grad, weight.grad)), want)


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_the_gradient_that_is_wanted_is_formed(wanted):
    hidden, weight, labels = inputs()
    expected = dict(zip(("hidden", "weight"), grads(reference, hidden, weight, labels, 1.0)[1], strict=True))
    leaf = {"hidden": hidden, "weight": weight}[wanted].requires_grad_()
    linear_cross_entropy(hidden, weight, labels, chunk_tokens=4).backward()
    torch.testing.assert_close(leaf.grad, expected[wanted])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused(reduction):
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, labels, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="create_graph=True is not supported"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_autocast_does_not_reach_the_logits():
    hidden, weight, labels = inputs(torch.float32)
    want = grads(linear_cross_entropy, hidden, weight, labels, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        got = grads(linear_cross_entropy, hidden, weight, labels, 1.0)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_mixed_dtypes_are_taken_as_they_are():
    hidden, weight, labels = inputs(torch.bfloat16)
    want = grads(reference, hidden.double(), weight.double(), labels, 1.0)
    loss, (d_hidden, d_weight) = grads(linear_cross_entropy, hidden, weight.float(), labels, 1.0)
    assert (d_hidden.dtype, d_weight.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(loss.double(), want[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(d_weight.double(), want[1][1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("recompute", [False, True])
def test_padded_rows_of_the_vocabulary_are_in_nothing(name, recompute):
    hidden, weight, labels = inputs()
    options = OPTIONS[name]
    want, want_grads = grads(reference, hidden, weight, labels, 3.0, **options)
    padded = dict(options, vocab_size=V, recompute=recompute, chunk_tokens=5)
    for key in ("bias", "class_weight"):
        if key in options:
            padded[key] = torch.cat([options[key], torch.full((3,), math.nan, dtype=torch.float64)])
    padding = torch.full((3, D), math.nan, dtype=torch.float64)
    got, got_grads = grads(linear_cross_entropy, hidden, torch.cat([weight, padding]), labels, 3.0, **padded)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_grads[0], want_grads[0])
    for mine, exact in zip(got_grads[1:], want_grads[1:], strict=True):
        torch.testing.assert_close(mine[:V], exact)
        assert (mine[V:] == 0).all()


@pytest.mark.parametrize("num_chunks", [1, 3, 13, 50])
def test_the_number_of_chunks_can_be_given_instead(num_chunks):
    hidden, weight, labels = inputs()
    want = grads(reference, hidden, weight, labels, 1.0)
    torch.testing.assert_close(grads(linear_cross_entropy, hidden, weight, labels, 1.0, num_chunks=num_chunks), want)


def test_statistics_come_from_the_same_pass():
    hidden, weight, labels = inputs()
    loss, stats = linear_cross_entropy(
        hidden, weight, labels, z_loss=0.1, chunk_tokens=4, reduction="sum", return_stats=True
    )
    logits = hidden @ weight.T
    valid = labels != -100
    torch.testing.assert_close(stats.cross_entropy, F.cross_entropy(logits, labels, reduction="sum"))
    torch.testing.assert_close(stats.z_loss, 0.1 * logits.logsumexp(-1)[valid].square().sum())
    torch.testing.assert_close(loss, stats.cross_entropy + stats.z_loss)
    assert int(stats.tokens) == 11
    assert int(stats.correct) == int((logits.argmax(-1) == labels).sum())


def test_batches_of_sequences_keep_their_shape():
    hidden, weight, labels = inputs()
    hidden, labels = hidden[:12].reshape(3, 4, D), labels[:12].reshape(3, 4)
    got = linear_cross_entropy(hidden, weight, labels, reduction="none", chunk_tokens=5)
    want = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(got, want.reshape(3, 4))


def test_any_label_can_be_the_ignored_one():
    hidden, weight, labels = inputs()
    want = F.cross_entropy(hidden @ weight.T, labels)
    relabelled = torch.where(labels == -100, V + 3, labels)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, relabelled, ignore_index=V + 3), want)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 9), vocabulary=st.integers(1, 12), chunk=st.integers(1, 11), seed=st.integers(0, 999),
    smoothing=st.floats(0, 1), z_loss=st.floats(0, 1), ignored=st.integers(0, 9),
)  # fmt: skip
def test_any_shape(tokens, vocabulary, chunk, seed, smoothing, z_loss, ignored):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 3, generator=g, dtype=torch.float64)
    weight = torch.randn(vocabulary, 3, generator=g, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (tokens,), generator=g)
    labels[:ignored] = -100
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": "sum"}
    want = grads(reference, hidden, weight, labels, 1.0, **options)
    got = grads(linear_cross_entropy, hidden, weight, labels, 1.0, chunk_tokens=chunk, **options)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "avg"}, "reduction = 'avg'"),
        ({"chunk_tokens": 0}, "chunk_tokens = 0: must be at least 1"),
        ({"num_chunks": 0}, "num_chunks = 0: must be at least 1"),
        ({"vocab_size": V + 1}, "vocab_size = 30: must be between 1 and the rows of weight, 29"),
        ({"accumulate_dtype": torch.bfloat16}, "accumulate_dtype = torch.bfloat16"),
        ({"label_smoothing": 1.5}, "label_smoothing = 1.5"),
        ({"softcap": 0.0}, "softcap = 0.0"),
        ({"denominator": 2.0, "reduction": "sum"}, 'only "mean" divides'),
        ({"bias": torch.zeros(3)}, r"bias \(3,\)"),
        ({"token_weight": torch.zeros(3)}, r"token_weight \(3,\)"),
        ({"class_weight": torch.zeros(V, requires_grad=True)}, "class_weight requires a gradient"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"labels \(3,\)"),
        ({"weight": torch.zeros(V, D + 1)}, r"must be \[..., D\] and \[V, D\]"),
    ],
)
def test_mistakes_are_refused(change, message):
    hidden, weight, labels = inputs()
    arguments = {"hidden": hidden, "weight": weight, "labels": labels, **change}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)

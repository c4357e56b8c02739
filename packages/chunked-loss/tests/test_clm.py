"""The losses that run a model: shapes, shifting, statistics, and the head's module under FSDP2."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from chunked_loss import (
    ChunkedCLMCrossEntropyLoss,
    CLMCrossEntropyLoss,
    clm_cross_entropy_loss,
    clm_cross_entropy_loss_sum,
    compiled,
    global_denominator,
    linear_cross_entropy,
)
from moe_core.testing import run_ranks

B, S, D, V = 2, 5, 6, 19


class Batch(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor | None = None


class Model(nn.Module):
    """An embedding, a layer and a head, with the interface that the losses expect."""

    def __init__(self, bias=False):
        super().__init__()
        self.embeddings = nn.Embedding(V, D)
        self.layer = nn.Linear(D, D)
        self.lm_head = nn.Linear(D, V, bias=bias)

    def forward(self, tokens, *, document_ids=None, return_hidden=False):
        hidden = torch.tanh(self.layer(self.embeddings(tokens)))
        return hidden if return_hidden else self.lm_head(hidden).to(torch.promote_types(hidden.dtype, torch.float32))


def made(seed=0, bias=False):
    torch.manual_seed(seed)
    return Model(bias)


def batch(seed=0, sequences=B, ignored=0.3):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, V, (sequences, S), generator=g)
    labels = torch.randint(0, V, (sequences, S), generator=g)
    labels[torch.rand(labels.shape, generator=g) < ignored] = -100
    return Batch(tokens, labels)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.05, "label_smoothing": 0.1}])
@pytest.mark.parametrize("sequences", [3, 1])
def test_chunked_and_full_give_the_same_sum_and_gradients(options, bias, sequences):
    model, data = made(bias=bias).double(), batch(sequences=sequences)
    full = CLMCrossEntropyLoss(**options)(model, data)
    full.sum.backward()
    want = gradients(model)
    model.zero_grad()
    chunked = ChunkedCLMCrossEntropyLoss(chunk_tokens=4, **options)(model, data)
    chunked.sum.backward()
    torch.testing.assert_close(chunked.sum, full.sum)
    torch.testing.assert_close(gradients(model), want)
    assert chunked.tokens == full.tokens == (data.labels != -100).sum()
    assert chunked.tokens.dtype == torch.int64


@pytest.mark.parametrize("sequences", [3, 1])
@pytest.mark.parametrize("num_chunks", [1, 4, 7, 100])
def test_the_number_of_chunks_need_not_divide_the_tokens(num_chunks, sequences):
    model, data = made().double(), batch(sequences=sequences)  # 15 or 5 tokens
    want = CLMCrossEntropyLoss()(model, data).sum
    got = ChunkedCLMCrossEntropyLoss(num_chunks=num_chunks)(model, data).sum
    torch.testing.assert_close(got, want)


def test_the_full_loss_tells_its_parts_apart():
    model, data = made().double(), batch()
    full, chunked = (kind(z_loss=0.1)(model, data) for kind in (CLMCrossEntropyLoss, ChunkedCLMCrossEntropyLoss))
    for name in ("cross_entropy", "z_loss"):
        torch.testing.assert_close(full.parts[name], chunked.parts[name])


def test_parts_are_sums_over_the_same_tokens():
    model, data = made().double(), batch()
    out = ChunkedCLMCrossEntropyLoss(chunk_tokens=4, z_loss=0.1)(model, data)
    logits = model(data.tokens).detach().flatten(0, 1)
    cross_entropy = F.cross_entropy(logits, data.labels.flatten(), reduction="sum")
    assert set(out.parts) == {"cross_entropy", "z_loss", "correct"}
    torch.testing.assert_close(out.parts["cross_entropy"], cross_entropy, check_dtype=False)
    torch.testing.assert_close(out.parts["cross_entropy"] + out.parts["z_loss"], out.sum.detach())
    assert not any(part.requires_grad for part in out.parts.values())


@pytest.mark.parametrize("kind", [CLMCrossEntropyLoss, ChunkedCLMCrossEntropyLoss])
def test_unshifted_labels_are_shifted_on_demand(kind):
    model, data = made(), batch()
    out = kind(shift=True)(model, Batch(data.tokens, data.tokens))
    logits = model(data.tokens)[:, :-1].flatten(0, 1)
    want = F.cross_entropy(logits, data.tokens[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(out.sum, want)
    assert out.tokens == B * (S - 1)


@pytest.mark.parametrize("kind", [CLMCrossEntropyLoss, ChunkedCLMCrossEntropyLoss])
def test_a_batch_of_ignored_labels_is_zero_with_a_graph_through_the_head(kind):
    model, data = made(), batch()
    out = kind()(model, Batch(data.tokens, torch.full_like(data.labels, -100)))
    assert out.sum == 0
    out.sum.backward()
    assert all((gradient == 0).all() for gradient in gradients(model).values())


def test_the_free_functions_are_sum_and_mean_of_valid_tokens():
    logits, labels = torch.randn(B, S, V), batch().labels
    total = clm_cross_entropy_loss_sum(logits, labels)
    torch.testing.assert_close(total, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
    torch.testing.assert_close(clm_cross_entropy_loss(logits, labels), total / (labels != -100).sum())
    torch.testing.assert_close(clm_cross_entropy_loss(logits, labels, denominator=4.0), total / 4)
    nothing = torch.full_like(labels, -100)
    assert clm_cross_entropy_loss(logits.requires_grad_(), nothing, z_loss=0.1) == 0
    assert clm_cross_entropy_loss_sum(logits.bfloat16(), labels).dtype == torch.float32


def test_the_forward_of_the_head_is_its_own_again_also_after_an_exception():
    model, data = made(), batch()
    loss = ChunkedCLMCrossEntropyLoss(chunk_tokens=4)
    loss(model, data)
    assert "forward" not in vars(model.lm_head)
    with pytest.raises(ValueError, match="labels"):
        loss(model, Batch(data.tokens, data.labels[:, :-1]))
    assert "forward" not in vars(model.lm_head)
    assert model(data.tokens).shape == (B, S, V)


def test_hooks_on_the_head_run_once_whatever_the_number_of_chunks():
    model, calls = made(), []
    model.lm_head.register_forward_pre_hook(lambda *_: calls.append(1))
    ChunkedCLMCrossEntropyLoss(chunk_tokens=1)(model, batch())
    assert len(calls) == 1


def test_a_head_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="head = 'output': the model has no such submodule; it has embeddings, layer"):
        ChunkedCLMCrossEntropyLoss(head="output")(made(), batch())
    model = made()
    model.lm_head = nn.Identity()
    with pytest.raises(ValueError, match="Identity has no weight"):
        ChunkedCLMCrossEntropyLoss()(model, batch())


# dynamo hides this warning of its own look at a tensor, which cannot work where warnings are errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", [CLMCrossEntropyLoss, ChunkedCLMCrossEntropyLoss])
def test_compiled_changes_nothing_but_the_core(kind):
    model, data = made(), batch()
    options = {"z_loss": 0.05, "label_smoothing": 0.1}
    plain = kind(**options)(model, data)
    plain.sum.backward()
    want = gradients(model)
    model.zero_grad()
    loss = compiled(kind(**options), backend="aot_eager")
    assert loss.core is not kind().core
    out = loss(model, data)
    out.sum.backward()
    torch.testing.assert_close(out.sum, plain.sum)
    torch.testing.assert_close(gradients(model), want)
    function = compiled(clm_cross_entropy_loss, backend="aot_eager")
    logits = torch.randn(B, S, V)
    torch.testing.assert_close(function(logits, data.labels), clm_cross_entropy_loss(logits, data.labels))
    with pytest.raises(ValueError, match="no numeric core"):
        compiled(object())


def test_denominator_of_one_process():
    labels = [torch.tensor([[1, -100, 3]]), torch.tensor([[-100, 2]])]
    assert global_denominator(labels, None) == 3.0
    assert global_denominator([torch.tensor([-100])], None) == 1.0
    assert global_denominator([torch.tensor([5, 0])], None, ignore_index=0) == 1.0
    with pytest.raises(ValueError, match="is empty"):
        global_denominator([], None)


# -- several ranks -----------------------------------------------------------------------------------------


def test_denominator_is_the_global_count_over_the_ranks():
    def counts(nothing):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from chunked_loss import global_denominator
        from moe_core.testing import count_collectives, count_host_syncs

        rank = dist.get_rank()
        labels = [torch.full((2, 4), -100), torch.full((3,), -100)]
        if not nothing:
            labels[0][0, : rank + 1] = 1
        mesh = init_device_mesh("cpu", (4,))
        square = init_device_mesh("cpu", (2, 2))
        with count_collectives() as collectives, count_host_syncs() as syncs:
            value = global_denominator(labels, mesh)
        same = [global_denominator(labels, square), global_denominator(labels, dist.group.WORLD)]
        return float(value), [float(v) for v in same], collectives.total, syncs.total

    assert run_ranks(counts, 4, False) == [(2.5, [2.5, 2.5], 1, 0)] * 4
    assert run_ranks(counts, 4, True) == [(1.0, [1.0, 1.0], 1, 0)] * 4


def gradient_of_uneven_ranks(by_rank):
    """D = 1, V = 2 and a head of zeros: each valid token adds -hidden / 2 to the gradient of its label's row."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (len(by_rank),), mesh_dim_names=("dp",))
    value, labels = by_rank[dist.get_rank()]
    weight = torch.zeros(2, 1, requires_grad=True)
    parts = torch.tensor(labels).split(2)  # microbatches
    denominator = global_denominator(parts, mesh)
    for part in parts:
        linear_cross_entropy(torch.full((len(part), 1), value), weight, part, denominator=denominator).backward()
    dist.all_reduce(weight.grad)  # the mean over ranks, as FSDP and DDP take it
    return (weight.grad / mesh.size()).flatten().tolist()


def test_ranks_with_one_and_three_valid_tokens_weigh_as_many():
    by_rank = [(1.0, [-100, 0, -100, -100]), (2.0, [0, 0, -100, 0])]
    # -(1 * 1 + 3 * 2) / 2 over 4 tokens; a mean of the ranks' means would be -0.75
    assert run_ranks(gradient_of_uneven_ranks, 2, by_rank) == [[-0.875, 0.875]] * 2


def fsdp_gradients(labels_by_rank, chunk_tokens, microbatches, dtype=None, hsdp=False):
    """Full fp32 gradients of one step, the collectives of each loss call and backward."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from chunked_loss import ChunkedCLMCrossEntropyLoss, global_denominator
    from moe_core.testing import count_collectives

    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(
        "cpu", (2, ranks // 2) if hsdp else (ranks,), mesh_dim_names=("r", "s")[-2 if hsdp else -1 :]
    )
    policy = MixedPrecisionPolicy(param_dtype=dtype) if dtype else MixedPrecisionPolicy()
    model = made()
    fully_shard(model.lm_head, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    g = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, V, (ranks, microbatches, B, S), generator=g)[rank]
    labels = labels_by_rank[rank]
    loss = ChunkedCLMCrossEntropyLoss(chunk_tokens=chunk_tokens)
    denominator = global_denominator(list(labels), mesh)
    counts, total = [], 0.0
    for index in range(microbatches):
        model.set_requires_gradient_sync(index == microbatches - 1)
        with count_collectives() as whole:
            out = loss(model, Batch(tokens[index], labels[index]))
        with count_collectives() as backward:
            (out.sum / denominator).backward()
        counts.append((dict(whole.calls), dict(backward.calls)))
        total += float(out.sum.detach() / denominator)
    full = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return full, counts, total, tokens


def reference_gradients(tokens, labels):
    """One process, float64, mean over all valid tokens of all ranks and microbatches."""
    model = made().double()
    logits = model(tokens.reshape(-1, S)).double()
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = total / max(1, int((labels != -100).sum()))
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, float(loss.detach())


def labels_with(valid_by_rank, microbatches=1):
    labels = torch.full((len(valid_by_rank), microbatches, B, S), -100)
    g = torch.Generator().manual_seed(9)
    for rank, valid in enumerate(valid_by_rank):
        flat = labels[rank].reshape(-1)
        flat[torch.randperm(flat.numel(), generator=g)[:valid]] = torch.randint(0, V, (valid,), generator=g)
    return labels


def kinds(calls):
    gathers = sum(n for kind, n in calls.items() if "gather" in kind)
    scatters = sum(n for kind, n in calls.items() if "reduce_scatter" in kind)
    return gathers, scatters


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize("valid", [[1, 3], [0, 4], [0, 0]])
def test_an_fsdp_head_is_gathered_and_reduced_once_and_gradients_are_of_the_global_mean(valid, chunk_tokens):
    labels = labels_with(valid)
    results = run_ranks(fsdp_gradients, 2, labels, chunk_tokens, 1)
    tokens = torch.stack([tokens for *_, tokens in results])
    want, loss = reference_gradients(tokens, labels)
    for full, ((forward, backward),), _, _ in results:
        for name, gradient in want.items():
            torch.testing.assert_close(full[name], gradient.float(), rtol=1e-5, atol=1e-7)
        # one gather for the rest of the model (kept until backward: it is the root), one for the head
        assert kinds(forward) == (2, 0)
        assert kinds(backward) == (0, 2)
    assert sum(total for _, _, total, _ in results) / 2 == pytest.approx(loss, rel=1e-5)


def test_microbatches_and_ranks_make_the_same_step_as_one_process():
    labels = labels_with([7, 2, 11, 0], microbatches=3)
    results = run_ranks(fsdp_gradients, 4, labels, 4, 3, None, True)
    tokens = torch.stack([tokens for *_, tokens in results])
    want, _ = reference_gradients(tokens, labels)
    for full, counts, _, _ in results:
        for name, gradient in want.items():
            torch.testing.assert_close(full[name], gradient.float(), rtol=1e-5, atol=1e-7)
        assert [kinds(backward)[1] for _, backward in counts] == [0, 0, 2]


# what is tested is torch's attribute, which 2.11 may lack; the pinned torch has it, so CI skips nothing here
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch without grad_dtype")
def test_in_bf16_the_head_gradient_that_is_reduced_was_never_rounded():
    labels = labels_with([9, 4])
    results = run_ranks(fsdp_gradients, 2, labels, 3, 1, torch.bfloat16)
    tokens = torch.stack([tokens for *_, tokens in results])
    total, valid = 0, int((labels != -100).sum())
    model = made().bfloat16()
    for rank in range(2):
        hidden = model(tokens[rank].reshape(-1, S), return_hidden=True).detach().double().flatten(0, 1)
        weight = model.lm_head.weight.detach().double().requires_grad_()
        F.cross_entropy(hidden @ weight.T, labels[rank].flatten(), reduction="sum").div(valid).backward()
        total = total + weight.grad
    for full, *_ in results:
        gradient = full["lm_head.weight"].double()
        assert (gradient - total).norm() <= 1e-5 * total.norm()


def test_a_head_inside_an_outer_unit_is_refused():
    def outer():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from chunked_loss import ChunkedCLMCrossEntropyLoss

        model = made()
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=True)
        try:
            ChunkedCLMCrossEntropyLoss()(model, batch())
        except ValueError as error:
            return str(error)

    for message in run_ranks(outer, 2):
        assert "make the head a unit of its own" in message


def test_a_kept_head_is_gathered_and_reduced_once_a_step_and_sees_every_step_s_weights():
    def steps(keep):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import DTensor

        from moe_core.testing import count_collectives

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = made()
        for part in (model.lm_head, model):
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        loss = ChunkedCLMCrossEntropyLoss(chunk_tokens=3, keep_head_unsharded=keep)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts, sharded, values = [], [], []
        for step in range(2):
            for index in range(3):
                model.set_requires_gradient_sync(index == 2)
                with count_collectives() as collectives:
                    out = loss(model, batch(seed=10 * step + 2 * index + dist.get_rank()))
                    sharded.append(isinstance(model.lm_head.weight, DTensor))
                    out.sum.backward()
                    sharded.append(isinstance(model.lm_head.weight, DTensor))
                counts.append(kinds(collectives.calls))
                values.append(float(out.sum.detach()))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            values.append(float(loss(model, batch(seed=99)).sum))
        sharded.append(isinstance(model.lm_head.weight, DTensor))
        model.reshard()  # the root keeps what it gathered in evaluation
        whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
        return counts, sharded, values, whole

    every_microbatch, kept = run_ranks(steps, 2, False), run_ranks(steps, 2, True)
    for (counts, sharded, values, whole), (want_counts, want_sharded, want, want_whole) in zip(
        kept, every_microbatch, strict=True
    ):
        assert want_sharded == [True] * 13
        assert sharded == [False, False, False, False, False, True] * 2 + [True]
        # two gathers fewer a step, and as many reductions
        assert sum(gathers for gathers, _ in want_counts) - sum(gathers for gathers, _ in counts) == 4
        assert [scatters for _, scatters in counts] == [scatters for _, scatters in want_counts] == [0, 0, 2] * 2
        assert values == want
        torch.testing.assert_close(whole, want_whole, rtol=0, atol=0)


def test_nothing_of_the_head_is_left_changed_by_an_exception_anywhere():
    def attempts(keep):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = made()
        fully_shard(model.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        (group,) = model.lm_head._get_fsdp_state()._fsdp_param_groups
        loss = ChunkedCLMCrossEntropyLoss(chunk_tokens=4, keep_head_unsharded=keep)
        data = batch()

        def state():
            flags = (group.unshard_in_backward, group.reshard_after_backward, group.post_forward_mesh_info is None)
            return flags, isinstance(model.lm_head.weight, DTensor), "forward" in vars(model.lm_head)

        def fails(*_):
            raise KeyError("on purpose")

        loss(model, data).sum.backward()
        states = [state()]
        failing = {
            "forward of the model": lambda: loss(model, Batch(data.tokens[0, 0], data.labels)).sum,
            "forward of the head": lambda: loss(model, Batch(data.tokens, data.labels[:, :-1])).sum,
            "core": lambda: ChunkedCLMCrossEntropyLoss(keep_head_unsharded=keep, core=fails)(model, data).sum,
        }
        messages = []
        for name, attempt in failing.items():
            try:
                attempt()
            except (KeyError, ValueError, IndexError):
                messages.append(name)
            states.append(state())
        total = loss(model, data).sum
        total.grad_fn.register_prehook(fails)
        try:
            total.backward()
        except KeyError:
            messages.append("backward")
        flags_after_backward = state()[0]
        return states, messages, flags_after_backward

    for keep in (False, True):
        for states, messages, after_backward in run_ranks(attempts, 2, keep):
            assert messages[-3:] == ["forward of the head", "core", "backward"]
            assert set(states) == {((True, True, False), True, False)}
            assert after_backward[0] is True
            assert keep or after_backward == (True, True, False)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("end", ["backward", "no backward", "exception"])
def test_no_loss_outlives_its_call(end, keep):
    """The hooks on a loss must not lead back to it: no collector sees a circle that leads through a graph."""

    def alive():
        import gc
        import weakref

        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model, made_losses = made(), []
        fully_shard(model.lm_head, mesh=init_device_mesh("cpu", (1,)))
        fully_shard(model)

        def look(module, args, loss):
            if module is model.lm_head:
                made_losses.append(weakref.ref(loss))
                if end == "exception":
                    raise KeyError("on purpose")

        watching = register_module_forward_hook(look)
        for _ in range(3):
            try:
                total = ChunkedCLMCrossEntropyLoss(chunk_tokens=4, keep_head_unsharded=keep)(model, batch()).sum
                if end == "backward":
                    total.backward()
                del total
            except KeyError:
                assert end == "exception"
        watching.remove()
        gc.collect()
        return [made_loss() is not None for made_loss in made_losses]

    assert run_ranks(alive, 1) == [[False] * 3]


def test_a_recomputing_loss_gathers_the_head_again():
    def step():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from moe_core.testing import count_collectives

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = made()
        fully_shard(model.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        results = []
        for recompute in (True, False):
            out = ChunkedCLMCrossEntropyLoss(chunk_tokens=3, recompute=recompute)(model, batch())
            with count_collectives() as backward:
                out.sum.backward()
            results.append((kinds(backward.calls), {n: p.grad.full_tensor() for n, p in model.named_parameters()}))
            model.zero_grad()
        return results

    for (counts, recomputed), (plain_counts, plain) in run_ranks(step, 2):
        assert (counts, plain_counts) == ((1, 2), (0, 2))
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-7)


def test_after_the_loss_the_model_trains_in_the_ordinary_way():
    def both():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from chunked_loss import ChunkedCLMCrossEntropyLoss, CLMCrossEntropyLoss

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = made()
        fully_shard(model.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        grads = []
        for loss in (ChunkedCLMCrossEntropyLoss(), CLMCrossEntropyLoss(), ChunkedCLMCrossEntropyLoss()):
            loss(model, batch()).sum.backward()
            grads.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
            model.zero_grad()
        return grads

    for first, second, third in run_ranks(both, 2):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(first, third, rtol=0, atol=0)

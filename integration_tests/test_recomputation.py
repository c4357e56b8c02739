"""Expert parallelism under activation checkpointing: what is recomputed waits for no device and breaks no tie anew."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_ep import apply_activation_checkpointing
from moe_core import MoE


def layer_under_checkpointing(mode, ties, device_type):
    """One forward and backward pass of two MoE layers with experts on all ranks, each layer a block.

    With `ties` all logits of the router are equal in the forward pass, and another expert wins in what is recomputed.
    Returns host syncs and collectives of forward and of backward, and the bits of all results.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.checkpoint import checkpoint

    from ep_dispatch import shard_experts
    from fsdp_ep import apply_activation_checkpointing
    from moe_core import MoE
    from moe_core.testing import count_collectives, count_host_syncs

    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device_type, (world,), mesh_dim_names=("ep",))
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            options = {"dim": 16, "num_experts": 5, "top_k": 2, "hidden_dim": 16, "shared_hidden_dim": 8}
            self.layers = nn.ModuleList([MoE(**options) for _ in range(2)])

        def forward(self, hidden):
            for layer in self.layers:
                run = layer if mode != "plain" else lambda x, layer=layer: checkpoint(layer, x, use_reentrant=False)
                hidden = hidden + run(hidden)
            return hidden

    model = shard_experts(Model().to(device_type), mesh)
    for layer in model.layers if ties else ():
        nn.init.zeros_(layer.router.weight)
        calls, choose = [], layer.router._choose

        def otherwise(scores, calls=calls, choose=choose):
            calls.append(None)
            return choose(scores if len(calls) == 1 else scores + torch.linspace(0, 1e-3, 5, device=scores.device))

        layer.router._choose = otherwise
    if mode != "plain":
        apply_activation_checkpointing(model, mode)
    hidden = torch.randn(6 if rank else 9, 16).to(device_type).requires_grad_()
    with count_host_syncs() as syncs, count_collectives() as collectives:
        out = model(hidden)
    counts = [syncs.total, collectives.total]
    with count_host_syncs() as syncs, count_collectives() as collectives:
        out.backward(torch.ones_like(out))
    counts += [syncs.total, collectives.total]
    if ties and mode != "none":
        assert len(calls) == 2, "nothing was recomputed"
    loads = [layer.router.tokens_per_expert for layer in model.layers]
    gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
    return counts, [tensor.detach().cpu() for tensor in (out, hidden.grad, *loads, *gradients)]


# of each of the two layers: one sync and three collectives in forward; two collectives in backward, and the three again
# in a recomputation
COUNTS = {
    "none": [2, 6, 0, 4],
    "full": [2, 6, 0, 10],
    "selective": [2, 6, 0, 4],
    "plain": [2, 6, 2, 10],
}


@pytest.mark.parametrize("mode", ["full", "selective", "plain"])
def test_recomputation_waits_for_no_device_and_changes_no_bit(mode, on_ranks, device_type):
    expected = on_ranks(layer_under_checkpointing, 2, "none", False, device_type)
    results = on_ranks(layer_under_checkpointing, 2, mode, False, device_type)
    assert results[0][0] == results[1][0] == COUNTS[mode]
    for (counts, want), (_, got) in zip(expected, results, strict=True):
        assert counts == COUNTS["none"]
        assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_tie_that_would_be_broken_otherwise_in_recomputation_is_not(mode, on_ranks, device_type):
    expected = on_ranks(layer_under_checkpointing, 2, "none", True, device_type)
    results = on_ranks(layer_under_checkpointing, 2, mode, True, device_type)
    for (_, want), (_, got) in zip(expected, results, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))


def test_the_comparison_sees_a_tie_that_is_broken_otherwise(on_ranks, device_type):
    """What the test above must catch: without the marks the recomputation sends other rows, and torch sees it."""
    from moe_core.testing import RankFailed

    with pytest.raises(RankFailed, match="CheckpointError"):
        on_ranks(layer_under_checkpointing, 2, "plain", True, device_type)


@pytest.mark.parametrize(
    ("grouped_gemm", "operator"),
    [("loop", "moe_core::grouped_products"), ("grouped_mm", "moe_core::grouped_products_on_cpu")],
)
def test_selective_never_repeats_the_experts_products(grouped_gemm, operator):
    """Forward and the rows' gradient take two each a layer; a recomputation would take two more."""
    products = {}
    for mode in ("none", "full", "selective"):
        torch.manual_seed(0)
        options = {"dim": 16, "num_experts": 5, "top_k": 2, "hidden_dim": 32, "grouped_gemm": grouped_gemm}
        model = nn.Sequential(MoE(**options), MoE(**options))
        apply_activation_checkpointing(model, mode, blocks=list(model))
        hidden = torch.randn(9, 16, requires_grad=True)
        with _Count() as count:
            model(hidden).sum().backward()
        products[mode] = count.calls[operator]
    assert products == {"none": 8, "full": 12, "selective": 8}


class _Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

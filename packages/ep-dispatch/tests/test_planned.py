"""The dispatcher that is told its traffic does on the meta device what a real one does on ranks."""

import pytest
import torch

from ep_dispatch import PlannedDispatcher
from moe_core.testing import run_ranks

TOKENS, TOP_K, E, D = (7, 0, 11), 2, 7, 12


def exchanged(dispatcher, tokens, ids, weights, num_experts, width):
    """Shape and dtype of what each all-to-all of rows takes and gives, forward and backward, and of all results."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    exchanges = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops._c10d_functional.all_to_all_single.default and args[0].is_floating_point():
                exchanges.append((tuple(args[0].shape), tuple(out.shape), str(out.dtype), *args[1:3]))
            return out

    hidden = torch.empty(tokens, width, dtype=torch.bfloat16, device=ids.device, requires_grad=True)
    with Record():
        dispatched = dispatcher.dispatch(hidden, ids, num_experts).wait()
        out = dispatcher.combine(dispatched.rows * 1, weights, dispatched.handle)
        out.sum().backward()
    results = (dispatched.rows, dispatched.tokens_per_expert, out, hidden.grad, weights.grad)
    return exchanges, [(tuple(t.shape), str(t.dtype)) for t in results]


def real(tokens, top_k, num_experts, width):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ep_dispatch import AllToAllDispatcher

    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    generator = torch.Generator().manual_seed(rank)
    # one expert is named by nobody, and some choices go nowhere
    ids = torch.randint(1, num_experts + 1, (tokens[rank], top_k), generator=generator)
    weights = torch.rand(ids.shape, generator=generator).requires_grad_()
    dispatcher = AllToAllDispatcher(mesh)
    seen = exchanged(dispatcher, tokens[rank], ids, weights, num_experts, width)
    splits = dispatcher.dispatch(torch.zeros(tokens[rank], width), ids, num_experts).wait().handle.splits
    return seen, splits.sent, splits.received


def test_it_exchanges_what_a_real_one_does_and_returns_the_same_shapes():
    per_rank = -(-E // len(TOKENS))
    for rank, (seen, sent, received) in enumerate(run_ranks(real, len(TOKENS), TOKENS, TOP_K, E, D, timeout=120)):
        ids = torch.empty(TOKENS[rank], TOP_K, dtype=torch.int64, device="meta")
        weights = torch.empty(ids.shape, device="meta", requires_grad=True)
        held = len(range(E)[rank * per_rank : (rank + 1) * per_rank])
        planned = PlannedDispatcher(sent, received, held)
        exchanges, results = exchanged(planned, TOKENS[rank], ids, weights, E, D)
        assert (exchanges, results) == seen
        assert len(exchanges) == 4


def test_splits_of_different_ranks_are_refused():
    with pytest.raises(ValueError, match="sent has 2 ranks and received 3"):
        PlannedDispatcher([1, 2], [1, 2, 3], 4)

"""How many collectives a step costs, how much they carry, and which are issued ahead."""

import pytest

from moe_core.testing import run_ranks

D, F = 8, 12


def _blocks(num_experts, ep_mesh):
    """Three blocks of two fp32 modules, a norm, a projection and an expert stack that sees its own rank's tokens."""
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    class Island(nn.Module):
        keep_in_fp32 = True

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D))

        def forward(self, hidden):
            return hidden * self.weight.sigmoid().to(hidden.dtype)

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            for name, shape in (("up_proj", (num_experts, F, D)), ("down_proj", (num_experts, D, F))):
                weight = torch.randn(shape) * 0.1
                placed = weight if ep_mesh is None else distribute_tensor(weight, ep_mesh, [Shard(0)])
                self.register_parameter(name, nn.Parameter(placed))

        def forward(self, hidden):
            up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up_proj, self.down_proj))
            return torch.einsum("td,efd,edf->td", hidden, up, down) + 0.0  # a new tensor, not a view

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(D)
            self.mixer = nn.Linear(D, D)
            self.decay, self.router = Island(), Island()
            self.experts = Experts()

        def forward(self, hidden):
            hidden = self.router(self.decay(self.mixer(self.norm(hidden))))
            return hidden + self.experts(hidden)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(3))
            self.lm_head = nn.Linear(D, 5)

        def forward(self, hidden):
            for layer in self.layers:
                hidden = layer(hidden)
            return self.lm_head(hidden)

    torch.manual_seed(2)
    return Model()


def _events(ep, dtype, *, unit_per_island=False, **arguments):
    """(what, number of elements of the input) of each collective of a second step, and (block, its name)."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.utils._python_dispatch import TorchDispatchMode

    from ep_mesh import MeshConfig, build_mesh, resolve_sub_mesh
    from fsdp_ep import fully_shard_moe

    mesh = build_mesh(MeshConfig(ep=ep).resolve(dist.get_world_size()), "cpu")
    ep_mesh = resolve_sub_mesh(mesh, "ep") if ep > 1 else None
    model = _blocks(6, ep_mesh)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    if unit_per_island:
        fp32 = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.layers:
            for island in (block.decay, block.router):
                fully_shard(island, mesh=resolve_sub_mesh(mesh, "dp_shard"), mp_policy=fp32)
            fully_shard(block, mesh=resolve_sub_mesh(mesh, "dp_shard"), mp_policy=policy)
        fully_shard(model, mesh=resolve_sub_mesh(mesh, "dp_shard"), mp_policy=policy)
    else:
        fully_shard_moe(
            model,
            dp_mesh=resolve_sub_mesh(mesh, "dp_shard"),
            ep_mesh=ep_mesh,
            expert_dp_mesh=resolve_sub_mesh(mesh, "dp_shard_mod_ep"),
            mp_policy=policy,
            **arguments,
        )
    events = []
    # hooks of modules inside a block run after FSDP's of the block
    for index, block in enumerate(model.layers):
        block.norm.register_forward_pre_hook(lambda *_, index=index: events.append(("forward", index)))
        block.mixer.register_full_backward_hook(lambda *_, index=index: events.append(("backward", index)))

    def numel(value):
        return value.numel() if isinstance(value, torch.Tensor) else sum(map(numel, value))

    class Collectives(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                for what, kind in (("allgather", "gather"), ("reduce_scatter", "reduce")):
                    if what in func._schema.name:
                        events.append((kind, numel(args[1])))  # (output, input, ...)
            return func(*args, **(kwargs or {}))

    def step():
        model(torch.randn(4, D)).square().mean().backward()

    step()
    events.clear()
    with Collectives():
        step()
    return events


def _several(cases):
    return [_events(ep, dtype, **arguments) for ep, dtype, arguments in cases]


def _counts(events):
    kinds = [kind for kind, _ in events]
    return kinds.count("gather"), kinds.count("reduce")


def test_fp32_modules_cost_one_gather_and_one_reduction_for_the_whole_model():
    cases = [
        (1, "bfloat16", {}),
        (1, "float32", {}),
        (1, "bfloat16", {"unit_per_island": True}),
        (1, "bfloat16", {"reshard_after_forward": False}),
    ]
    for one_unit, all_fp32, unit_each, kept in run_ranks(_several, 2, cases):
        assert _counts(one_unit) == (8, 5)
        assert _counts(all_fp32) == (7, 4)
        assert _counts(unit_each) == (19, 10)
        assert _counts(kept) == (5, 5)


@pytest.fixture(scope="module")
def expert_parallel():
    """World 4, ep 2: two ranks share each half of the stacks."""
    return run_ranks(_several, 4, [(2, "float32", {})])


def test_experts_reduce_their_own_half_of_the_stack(expert_parallel):
    local_stack = 3 * (F * D + D * F)  # 3 of 6 experts, of which the shard axis makes 2 + 1, padded to 2 + 2
    padded = local_stack // 3 * 4
    for (events,) in expert_parallel:
        sizes = sorted((size for kind, size in events if kind == "reduce"), reverse=True)
        assert sizes[:3] == [padded] * 3
        assert sizes[3] < padded


def test_a_block_and_its_experts_are_gathered_one_block_ahead(expert_parallel):
    def ahead(events, direction):
        """Gathers up to the start of each block in forward, to its end in backward."""
        marks = [i for i, (kind, _) in enumerate(events) if kind == direction]
        return [sum(kind == "gather" for kind, _ in events[:i]) for i in marks]

    for (events,) in expert_parallel:
        # one of the root, two of each block; without the prefetch 2, 4, 6
        assert ahead(events, "forward") == [5, 7, 7]
        # the root kept its parameters; without the prefetch 10, 12, 13
        assert ahead(events, "backward") == [11, 13, 13]

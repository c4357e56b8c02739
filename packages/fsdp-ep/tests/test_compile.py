"""Blocks that are compiled inside their units: where graphs end, and how often they are made."""

from moe_core.testing import run_ranks


def _compiled(ep):
    import torch
    import torch._dynamo
    import torch.distributed as dist
    from torch import nn
    from torch._dynamo.utils import counters
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from ep_mesh import MeshConfig, build_mesh, resolve_sub_mesh
    from fsdp_ep import apply_activation_checkpointing, fully_shard_moe

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6, 6) * 0.3)

        def forward(self, hidden):
            weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
            return torch.einsum("td,efd->tf", hidden, weight).relu()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = nn.Linear(6, 6)
            self.experts = Experts()

        def forward(self, hidden):
            hidden = self.mixer(hidden).tanh() * 2
            return (hidden + self.experts(hidden)).tanh()

    mesh = build_mesh(MeshConfig(ep=ep).resolve(dist.get_world_size()), "cpu")
    ep_mesh = resolve_sub_mesh(mesh, "ep")

    def model(compiled, checkpoint):
        torch.manual_seed(1)
        made = nn.Sequential(nn.ModuleList([Block()]), nn.Linear(6, 3))
        made.forward = lambda hidden: made[1](made[0][0](hidden))
        (block,) = made[0]
        if ep > 1:
            block.experts.weight = nn.Parameter(distribute_tensor(block.experts.weight.detach(), ep_mesh, [Shard(0)]))
        if compiled:
            block.forward = torch.compile(block.forward, backend="aot_eager", dynamic=True)
        apply_activation_checkpointing(made, checkpoint)
        return fully_shard_moe(
            made,
            dp_mesh=resolve_sub_mesh(mesh, "dp_shard"),
            ep_mesh=ep_mesh,
            expert_dp_mesh=resolve_sub_mesh(mesh, "dp_shard_mod_ep"),
        )

    torch._dynamo.reset()
    counters.clear()
    eager, compiled = model(False, "none"), model(True, "full")
    graphs = []
    for tokens in (5, 7, 9):
        hidden = torch.randn(tokens, 6, generator=torch.Generator().manual_seed(tokens + 10 * dist.get_rank()))
        for each in (eager, compiled):
            each(hidden).square().sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    errors = [
        ((a.grad.to_local() - b.grad.to_local()).norm() / b.grad.to_local().norm()).item()
        for a, b in zip(compiled.parameters(), eager.parameters(), strict=True)
    ]
    return max(errors), graphs, sum(counters["graph_break"].values())


def test_compiled_equals_eager_and_ends_graphs_at_the_expert_unit_alone():
    for error, graphs, breaks in run_ranks(_compiled, 2, 2, timeout=120):
        assert error < 1e-6
        # before the experts, the experts, after them; for any number of tokens
        assert graphs == [3, 3, 3]
        assert breaks <= 2, "before and after the experts"

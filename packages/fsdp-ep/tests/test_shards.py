"""Stacks of fewer experts than ranks, another dim, host memory: wrapped, trained, saved, loaded and trained on."""

from moe_core.testing import run_ranks

D, F = 6, 8


def _model(num_experts):
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj = nn.Parameter(torch.randn(num_experts, F, D) * D**-0.5)
            self.down_proj = nn.Parameter(torch.randn(num_experts, D, F) * F**-0.5)

        def forward(self, hidden):
            """Experts of this rank alone: under expert parallelism the layer around would sum over ranks."""
            up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up_proj, self.down_proj))
            return torch.einsum("tef,edf->td", torch.einsum("td,efd->tef", hidden, up).relu(), down) + 0.0

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(D, eps=1e-5)
            self.experts = Experts()

        def forward(self, hidden):
            return hidden + self.experts(self.norm(hidden))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, hidden):
            for layer in self.layers:
                hidden = layer(hidden)
            return hidden

    torch.manual_seed(9)
    return Model()


def _batch(rank, step):
    import torch

    return torch.randn(4, D, generator=torch.Generator().manual_seed(100 * rank + step))


def _train(num_experts, arguments, folder, ranks):
    """Three steps, a save, another model that loads, a fourth step with it; and one process beside."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy
    from torch.distributed.tensor import Shard

    from fsdp_ep import fully_shard_moe

    placement = (lambda p: Shard(p.shape.index(F)) if p.ndim == 3 else None) if arguments.get("by_hidden") else None
    offload = CPUOffloadPolicy(pin_memory=False) if arguments.get("offload") else None
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))

    def sharded():
        model = _model(num_experts)
        return fully_shard_moe(model, dp_mesh=mesh, shard_placement_fn=placement, offload_policy=offload)

    def step(model, optimizer, index, batches, share):
        optimizer.zero_grad()
        for rank in batches:
            (model(_batch(rank, index)).square().sum() / share).backward()
        optimizer.step()

    reference, model = _model(num_experts), sharded()
    held = [tuple(p.to_local().shape) for p in model.layers[0].experts.parameters()]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-3) for m in (reference, model)]
    for index in range(3):
        step(reference, optimizers[0], index, range(ranks), ranks)
        step(model, optimizers[1], index, [dist.get_rank()], 1)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)

    other = sharded()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = other.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    other.load_state_dict(state)
    loaded = all(
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(other.parameters(), model.parameters(), strict=True)
    )
    for trained in (reference, model, other):
        step(trained, torch.optim.SGD(trained.parameters(), lr=0.1), 3, *(
            (range(ranks), ranks) if trained is reference else ([dist.get_rank()], 1)
        ))  # fmt: skip
    errors = [
        ((actual.full_tensor() - expected).norm() / expected.norm()).item()
        for trained in (model, other)
        for actual, expected in zip(trained.parameters(), reference.parameters(), strict=True)
    ]
    return held, loaded, max(errors)


def _cases(cases, folder, ranks):
    return [_train(num_experts, arguments, f"{folder}/{i}", ranks) for i, (num_experts, arguments) in enumerate(cases)]


def test_fewer_experts_than_ranks(tmp_path):
    cases = [(5, {}), (3, {"by_hidden": True, "offload": True})]
    results = run_ranks(_cases, 4, cases, str(tmp_path), 4, timeout=30)
    for result in results:
        for _, loaded, error in result:
            assert loaded
            assert error < 1e-5
    held = [[up[0] for (up, _), _, _ in result] for result in results]
    assert [row[0] for row in held] == [2, 2, 1, 0], "dim 0 splits like torch.chunk"
    assert {result[1][0][0] for result in results} == {(3, F // 4, D)}, "dim F: all ranks hold as much"


def _refused(ranks):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    from fsdp_ep import ShardingError, fully_shard_moe

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    messages = []
    for dim in (1, 2, -1, 3):
        with torch.device("meta"):
            model = _model(2)
        try:
            fully_shard_moe(
                model, dp_mesh=mesh, shard_placement_fn=lambda p, dim=dim: Shard(dim) if p.ndim > 1 else None
            )
        except ShardingError as error:
            messages.append(str(error))
    return messages


def test_a_dim_that_does_not_divide_is_refused_with_the_numbers():
    results = run_ranks(_refused, 4, 4, timeout=30)
    assert results == [results[0]] * 4
    one, two, last, beyond = results[0]
    assert "(2, 6, 8) on 4 ranks" in one, "up_proj (2, 8, 6) divides, down_proj does not"
    expected = {
        one: ["down_proj", "dims [2] divide"],
        two: ["up_proj", "(2, 8, 6) on 4 ranks", "dims [1] divide"],
        last: ["up_proj", "(2, 8, 6) on 4 ranks", "dims [1] divide"],
        beyond: ["layers.0.experts.up_proj", "dim 3 must be there"],
    }
    for message, said in expected.items():
        for words in said:
            assert words in message

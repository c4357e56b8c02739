"""A step under any layout equals one process on the global batch; real DTensors on gloo ranks.

The reference is a float64 loop over tokens and experts in one process, with no code of the package under test.
"""

import pytest

from moe_core.testing import run_ranks

D, F, V, K = 12, 20, 23, 2  # all different, and none a multiple of the world size but D and F


def _model(num_experts, *, ep_group=None, num_blocks=3, islands=True, separate_head=False):
    """A small MoE transformer without attention; experts by token id, so that no tie can break differently."""
    import torch
    from torch import nn
    from torch.distributed.nn.functional import all_reduce
    from torch.distributed.tensor import DTensor

    def _placed(rows, total, place):
        return torch.nn.functional.pad(rows, (0, 0, place.start, total - place.stop))

    class Router(nn.Module):
        keep_in_fp32 = islands

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(num_experts, D) * D**-0.5)

        def forward(self, hidden):
            assert not islands or self.weight.dtype in (torch.float32, torch.float64)
            return torch.sigmoid(hidden.to(self.weight.dtype) @ self.weight.T)

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj = nn.Parameter(torch.randn(num_experts, F, D) * D**-0.5)
            self.down_proj = nn.Parameter(torch.randn(num_experts, D, F) * F**-0.5)

        def forward(self, hidden, mix):
            """hidden [T, D], mix [T, E]: the weight of each expert for each token, 0 where not chosen."""
            up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up_proj, self.down_proj))
            assert mix.dtype in (torch.float32, torch.float64)
            if ep_group is None:
                return self._run(hidden, mix, up, down)
            # expert parallelism at its simplest: everybody's tokens through my experts, summed at home
            rank, here = ep_group.rank(), hidden.shape[0]
            everybody = ep_group.size() * here
            place = slice(rank * here, (rank + 1) * here)
            hidden, mix = (all_reduce(_placed(t, everybody, place), group=ep_group) for t in (hidden, mix))
            first = rank * -(-num_experts // ep_group.size())
            out = self._run(hidden, mix[:, first : first + up.shape[0]], up, down)
            return all_reduce(out, group=ep_group)[place].clone()

        def _run(self, hidden, mix, up, down):
            inner = torch.einsum("td,efd->tef", hidden, up).relu() ** 2
            out = torch.einsum("tef,edf->ted", inner, down)
            return (out * mix.unsqueeze(-1).to(out.dtype)).sum(1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.Parameter(torch.rand(D) + 0.5)
            self.mixer = nn.Linear(D, D)
            self.router = Router()
            self.experts = Experts()

        def forward(self, hidden, chosen):
            hidden = hidden + self.mixer(hidden) * self.norm
            mix = self.router(hidden) * chosen
            return hidden + self.experts(hidden, mix)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(V, D)
            self.layers = nn.ModuleList(Block() for _ in range(num_blocks))
            self.norm = nn.LayerNorm(D)
            self.lm_head = nn.Linear(D, V, bias=False)

        def forward(self, tokens):
            chosen = torch.zeros(*tokens.shape, num_experts, device=tokens.device)
            for k in range(K):
                chosen.scatter_(-1, ((tokens * 7 + k) % num_experts).unsqueeze(-1), 1.0)
            hidden = self.embedding(tokens)
            for layer in self.layers:
                hidden = layer(hidden, chosen)
            hidden = self.norm(hidden)
            return hidden if separate_head else self.lm_head(hidden)

    torch.manual_seed(7)
    return Model()


def _batches(world_size, microbatches, per_rank=6):
    """[world, microbatch, T] tokens and labels; the last rank has no label at all, and others differ."""
    import torch

    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, V, (world_size, microbatches, per_rank), generator=generator)
    labels = torch.randint(0, V, (world_size, microbatches, per_rank), generator=generator)
    for rank in range(world_size):
        labels[rank, :, : rank % 3] = -100
    if world_size > 1:
        labels[-1] = -100
    return tokens, labels


def _loss(model, tokens, labels, separate_head):
    import torch

    out = model(tokens)
    logits = model.lm_head(out) if separate_head else out
    logits = logits.to(torch.float32 if logits.dtype == torch.bfloat16 else logits.dtype)
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def _reference_gradients(num_experts, world_size, microbatches):
    """One process, float64, the whole batch at once."""
    tokens, labels = (t.flatten() for t in _batches(world_size, microbatches))
    model = _model(num_experts, islands=False).double()
    (_loss(model, tokens, labels, False) / (labels >= 0).sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _sharded(
    num_experts,
    layout,
    *,
    separate_head=False,
    checkpoint="none",
    policy=None,
    sabotage=None,
    to_double=False,
    **arguments,
):
    """The model under a layout (dp_replicate, ep), and its dp mesh."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import Shard, distribute_tensor

    import fsdp_ep._fully_shard as under_test
    from ep_mesh import MeshConfig, build_mesh, resolve_sub_mesh
    from fsdp_ep import apply_activation_checkpointing, fully_shard_moe

    dp_replicate, ep = layout
    mesh = build_mesh(MeshConfig(dp_replicate=dp_replicate, ep=ep).resolve(dist.get_world_size()), "cpu")
    ep_mesh = resolve_sub_mesh(mesh, "ep")
    group = ep_mesh.get_group() if ep > 1 else None
    model = _model(num_experts, ep_group=group, separate_head=separate_head)
    model = model.double() if to_double else model
    if ep > 1:
        for layer in model.layers:
            for name, weight in list(layer.experts.named_parameters()):
                setattr(layer.experts, name, nn.Parameter(distribute_tensor(weight.detach(), ep_mesh, [Shard(0)])))
    apply_activation_checkpointing(model, checkpoint, 2)

    def sub_mesh(inner):
        return resolve_sub_mesh(mesh, ("dp_replicate", inner) if dp_replicate > 1 else inner)

    scale = under_test.set_gradient_scale
    if sabotage is not None:
        under_test.set_gradient_scale = lambda unit, unit_mesh, size: sabotage(scale, unit, unit_mesh, size)
    try:
        fully_shard_moe(
            model,
            dp_mesh=sub_mesh("dp_shard"),
            ep_mesh=ep_mesh,
            expert_dp_mesh=sub_mesh("dp_shard_mod_ep"),
            embedding=model.embedding,
            separate_lm_head=separate_head,
            mp_policy=policy,
            **arguments,
        )
    finally:
        under_test.set_gradient_scale = scale
    return model


def _step(num_experts, layout, *, microbatches=1, separate_head=False, **arguments):
    """Largest relative error of any gradient against the reference, by parameter."""
    import torch.distributed as dist

    from fsdp_ep import set_requires_gradient_sync

    world_size, rank = dist.get_world_size(), dist.get_rank()
    model = _sharded(num_experts, layout, separate_head=separate_head, **arguments)
    tokens, labels = _batches(world_size, microbatches)
    denominator = (labels >= 0).sum() / world_size
    for index in range(microbatches):
        set_requires_gradient_sync(model, index == microbatches - 1)
        (_loss(model, tokens[rank, index], labels[rank, index], separate_head) / denominator).backward()
    errors = {}
    expected = _reference_gradients(num_experts, world_size, microbatches)
    assert {name for name, _ in model.named_parameters()} == set(expected)
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor().double()
        errors[name] = ((gradient - expected[name]).norm() / expected[name].norm()).item()
    return errors


_LAYOUTS = [(1, (1, 1)), (2, (1, 1)), (2, (1, 2)), (4, (1, 1)), (4, (1, 2)), (4, (1, 4)), (4, (2, 1)), (4, (2, 2))]
"""(world size, (dp_replicate, ep)); in the last one the shard axis of the experts has one rank, and HSDP two."""


@pytest.mark.parametrize(("world_size", "layout"), _LAYOUTS)
def test_every_gradient_equals_one_process(world_size, layout):
    for errors in run_ranks(_step, world_size, 8, layout):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(("num_experts", "layout"), [
    (5, (1, 2)), (5, (2, 2)), (5, (2, 1)), (5, (1, 1)),  # 3 + 2 on two ep ranks, 2 + 2 + 1 + 0 on four FSDP shards
    (10, (1, 4)), (10, (1, 2)),  # 3 + 3 + 3 + 1
    (2, (1, 2)), (2, (1, 1)),  # one expert on an ep rank: the FSDP shard of every second rank is empty
])  # fmt: skip
def test_uneven_stacks_and_empty_shards(num_experts, layout):
    for errors in run_ranks(_step, 4, num_experts, layout):
        assert max(errors.values()) < 1e-5, errors


def _on_host(**keywords):
    from torch.distributed.fsdp import CPUOffloadPolicy

    return {"offload_policy": CPUOffloadPolicy(pin_memory=False), **keywords}


def _stacks_by_dim_1(parameter):
    from torch.distributed.tensor import Shard

    return Shard(1) if parameter.ndim == 3 else None


def _step_with(keywords, num_experts, layout):
    return _step(num_experts, layout, **keywords)


@pytest.mark.parametrize(("layout", "keywords"), [
    ((1, 2), {"microbatches": 2}),
    ((2, 2), {"microbatches": 3}),
    ((1, 4), {"microbatches": 3}),  # one rank on the experts' shard axis
    ((1, 2), {"separate_head": True}),
    ((2, 1), {"separate_head": True, "microbatches": 2, "checkpoint": "full"}),
    ((1, 2), {"checkpoint": "full"}),
    ((1, 2), {"checkpoint": "every_nth", "microbatches": 2}),
    ((1, 2), {"checkpoint": "selective"}),
    ((1, 2), {"reshard_after_forward": False}),
    ((1, 2), _on_host(microbatches=2)),
    ((2, 2), _on_host(checkpoint="full")),
    ((1, 2), {"shard_placement_fn": _stacks_by_dim_1}),
    ((1, 1), {"shard_placement_fn": _stacks_by_dim_1, "microbatches": 2}),
])  # fmt: skip
def test_microbatches_checkpointing_and_a_head_of_its_own(layout, keywords):
    for errors in run_ranks(_step_with, 4, keywords, 7, layout):
        assert max(errors.values()) < 1e-5, errors


def _no_factor(scale, unit, mesh, size):
    """FSDP's own mean over the unit's mesh."""


def _double_factor(scale, unit, mesh, size):
    scale(unit, mesh, 2 * size if mesh.size() < size else size)


def _factor_on_the_wrong_units(scale, unit, mesh, size):
    scale(unit, mesh, size if mesh.size() < size else 2 * size)


def _factor_everywhere(scale, unit, mesh, size):
    """Also where the shard axis has one rank; for those of others it is what is right."""
    scale(unit, mesh, size)
    unit.set_gradient_divide_factor(float(size))


@pytest.mark.parametrize(("sabotage", "layout", "wrong"), [
    (_no_factor, (1, 2), "experts"),
    (_no_factor, (1, 4), "experts"),
    (_double_factor, (1, 2), "experts"),
    (_factor_on_the_wrong_units, (1, 2), "others"),
    (_factor_everywhere, (1, 4), "experts"),
    (_factor_everywhere, (2, 2), "experts"),
])  # fmt: skip
def test_the_comparison_notices_a_wrong_scale(sabotage, layout, wrong):
    for errors in run_ranks(_step_with, 4, {"sabotage": sabotage}, 8, layout):
        experts = [error for name, error in errors.items() if "experts" in name]
        others = [error for name, error in errors.items() if "experts" not in name]
        bad, good = (experts, others) if wrong == "experts" else (others, experts)
        assert min(bad) > 0.4
        assert max(good) < 1e-5


def _reduced_in(dtype, layout):
    """Stored and computed in float64 to reduce in float64; or computed in fp32 and reduced in fp16."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(reduce_dtype=getattr(torch, dtype))
    return _step(8, layout, policy=policy, to_double=dtype == "float64")


@pytest.mark.parametrize(("world_size", "layout"), [(4, (1, 4)), (4, (2, 2)), (4, (1, 2)), (1, (1, 1))])
def test_dtypes_that_fsdp_divides_in_two_parts(world_size, layout):
    for dtype, tolerance in (("float64", 1e-12), ("float16", 1e-2)):
        for errors in run_ranks(_reduced_in, world_size, dtype, layout):
            assert max(errors.values()) < tolerance, errors


def _bf16(layout, checkpoint, separate_head):
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    keywords = {"policy": policy, "checkpoint": checkpoint, "separate_head": separate_head}
    errors = _step(6, layout, microbatches=2, **keywords)
    model = _sharded(6, layout, **keywords)
    seen = {}
    for name, module in model.named_modules():
        if not list(module.parameters(recurse=False)):
            continue

        def note(module, args, name=name):
            seen[name] = {parameter.dtype for parameter in module.parameters(recurse=False)}

        module.register_forward_pre_hook(note)
    tokens, labels = _batches(dist.get_world_size(), 1)
    _loss(model, tokens[dist.get_rank(), 0], labels[dist.get_rank(), 0], separate_head).backward()
    stored = {parameter.dtype for parameter in model.parameters()} | {p.grad.dtype for p in model.parameters()}
    return errors, seen, stored


@pytest.mark.parametrize(
    ("layout", "checkpoint", "separate_head"),
    [((1, 2), "none", False), ((2, 2), "full", True), ((1, 1), "full", False)],
)
def test_bf16_with_fp32_islands(layout, checkpoint, separate_head):
    import torch

    for errors, seen, stored in run_ranks(_bf16, 4, layout, checkpoint, separate_head):
        assert stored == {torch.float32}
        for name, dtypes in seen.items():
            assert dtypes == {torch.float32 if name.endswith("router") else torch.bfloat16}, name
        assert len(seen) > 10
        assert max(errors.values()) < 0.1, errors  # bf16 has 8 bits: 0.004 an operation; a wrong scale is 0.5
        assert max(errors.values()) > 1e-4, "nothing was computed in bf16"


def _counted(layout, dtype, checkpoint, microbatches):
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from fsdp_ep import set_requires_gradient_sync
    from moe_core.testing import count_collectives

    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    model = _sharded(6, layout, policy=policy, checkpoint=checkpoint)
    tokens, labels = _batches(dist.get_world_size(), microbatches)

    def step():
        for index in range(microbatches):
            set_requires_gradient_sync(model, index == microbatches - 1)
            _loss(model, tokens[dist.get_rank(), index], labels[dist.get_rank(), index], False).backward()

    step()
    with count_collectives() as count:
        step()
    gathers = sum(n for kind, n in count.calls.items() if kind.startswith("allgather"))
    reductions = sum(n for kind, n in count.calls.items() if kind.startswith("reduce_scatter"))
    return gathers, reductions


# three blocks, embedding, root: 5 units; the root keeps what it gathered, the others gather twice
@pytest.mark.parametrize(("world_size", "layout", "dtype", "checkpoint", "microbatches", "expected"), [
    (2, (1, 1), "float32", "none", 1, (9, 5)),
    (2, (1, 1), "float32", "full", 1, (9, 5)),
    (2, (1, 1), "bfloat16", "none", 1, (10, 6)),  # the islands: one gather and one reduction for all
    (2, (1, 1), "bfloat16", "full", 1, (10, 6)),
    (2, (1, 1), "float32", "none", 2, (18, 5)),
    (4, (1, 2), "float32", "none", 1, (15, 8)),  # three expert units
    (4, (1, 2), "float32", "full", 1, (15, 8)),
    (2, (1, 2), "float32", "full", 1, (9, 5)),  # the experts' shard axis has one rank
])  # fmt: skip
def test_collectives_of_a_step(world_size, layout, dtype, checkpoint, microbatches, expected):
    assert run_ranks(_counted, world_size, layout, dtype, checkpoint, microbatches) == [expected] * world_size


def _trained(layout, steps):
    import torch
    import torch.distributed as dist

    model = _sharded(6, layout)
    before = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, labels = _batches(dist.get_world_size(), 1)
    for _ in range(steps):
        optimizer.zero_grad()
        _loss(model, tokens[dist.get_rank(), 0], labels[dist.get_rank(), 0], False).backward()
        optimizer.step()
    still = [n for n, p in model.named_parameters() if torch.equal(p.full_tensor(), before[n])]
    return still, [n for n, p in model.named_parameters() if not p.full_tensor().isfinite().all()]


def test_every_weight_moves():
    assert run_ranks(_trained, 2, (1, 2), 2) == [([], [])] * 2


def _meta(layout):
    """On the meta device first, as a trainer does it: wrapped, materialised, then filled."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import Shard, distribute_tensor

    from ep_mesh import MeshConfig, build_mesh, resolve_sub_mesh
    from fsdp_ep import fully_shard_moe

    mesh = build_mesh(MeshConfig(ep=layout[1]).resolve(dist.get_world_size()), "cpu")
    ep_mesh = resolve_sub_mesh(mesh, "ep")
    with torch.device("meta"):
        model = _model(5, ep_group=ep_mesh.get_group())
    for layer in model.layers:
        for name, weight in list(layer.experts.named_parameters()):
            setattr(layer.experts, name, nn.Parameter(distribute_tensor(weight.detach(), ep_mesh, [Shard(0)])))
    names = list(model.state_dict())
    fully_shard_moe(
        model,
        dp_mesh=resolve_sub_mesh(mesh, "dp_shard"),
        ep_mesh=ep_mesh,
        expert_dp_mesh=resolve_sub_mesh(mesh, "dp_shard_mod_ep"),
    )
    assert list(model.state_dict()) == names
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    tokens, labels = _batches(dist.get_world_size(), 1)
    loss = _loss(model, tokens[dist.get_rank(), 0], labels[dist.get_rank(), 0], False)
    loss.backward()
    up = model.layers[0].experts.up_proj
    return units, loss.isfinite().item(), up.device_mesh.mesh_dim_names, tuple(up.shape)


def test_a_meta_model_is_wrapped_and_then_materialised():
    blocks = [name for i in range(3) for name in (f"layers.{i}", f"layers.{i}.experts")]
    for units, finite, axes, shape in run_ranks(_meta, 2, (1, 2)):
        assert units == ["", *blocks]
        assert finite
        assert axes == ("dp_shard_mod_ep", "ep")
        assert shape == (5, F, D)


def _reduced_from_bf16(reduce_dtype):
    """The gradient of a weight that gets 256 on one rank and 1 on the other: in bf16 their sum is 256."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from fsdp_ep import fully_shard_moe

    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(1, 2, bias=False)])
    model.forward = lambda hidden: model.layers[0](hidden)
    given = {} if reduce_dtype is None else {"reduce_dtype": getattr(torch, reduce_dtype)}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, **given)
    fully_shard_moe(model, dp_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), mp_policy=policy)
    model(torch.tensor([[256.0 if dist.get_rank() == 0 else 1.0]])).sum().backward()
    return model.layers[0].weight.grad.full_tensor().flatten().tolist()


def test_without_a_reduce_dtype_gradients_of_16_bits_are_reduced_in_fp32():
    assert run_ranks(_reduced_from_bf16, 2, None) == [[128.5, 128.5]] * 2
    assert run_ranks(_reduced_from_bf16, 2, "bfloat16") == [[128.0, 128.0]] * 2

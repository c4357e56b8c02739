"""Which modules become units, and what is refused before any communication."""

import pytest
import torch
from torch import nn

from fsdp_ep import ShardingError, find_embedding, find_units
from moe_core.testing import run_ranks


def _setup(ep=1):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import Shard, distribute_tensor

    from ep_mesh import MeshConfig, build_mesh, resolve_sub_mesh

    class Experts(nn.Module):
        def __init__(self, num_experts):
            super().__init__()
            self.up_proj = nn.Parameter(torch.randn(num_experts, 3, 4))

    class Model(nn.Module):
        def __init__(self, num_experts=4, islands=False):
            super().__init__()
            self.tokens = nn.Embedding(9, 4)
            self.stem = nn.Linear(4, 4)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.tower = nn.Module()
            self.tower.inner = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])
            self.tower.inner[0].nested = nn.ModuleList([nn.Linear(4, 4)])
            self.experts = Experts(num_experts)
            self.lm_head = nn.Linear(4, 9, bias=False)

    mesh = build_mesh(MeshConfig(ep=ep).resolve(dist.get_world_size()), "cpu")
    parts = {name: resolve_sub_mesh(mesh, name) for name in ("dp_shard", "ep", "dp_shard_mod_ep", "dp_replicate")}

    def shard(module, dim=0):
        for name, weight in list(module._parameters.items()):
            placed = distribute_tensor(weight.detach(), parts["ep"], [Shard(dim)])
            module.register_parameter(name, nn.Parameter(placed))

    meshes = {"dp_mesh": parts["dp_shard"], "ep_mesh": parts["ep"], "expert_dp_mesh": parts["dp_shard_mod_ep"]}
    return Model, meshes, shard, parts


def _units():
    import torch
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    from fsdp_ep import fully_shard_moe

    model_class, meshes, _, _ = _setup()

    def names(model):
        return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]

    plain = fully_shard_moe(model_class(), **meshes)
    one = model_class()
    chosen = fully_shard_moe(
        one, dp_mesh=meshes["dp_mesh"], blocks=[one.layers[0]], embedding=one.tokens, separate_lm_head=True
    )
    islands = model_class()
    for module in (islands.layers[0], islands.stem):
        module.keep_in_fp32 = True
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard_moe(islands, dp_mesh=meshes["dp_mesh"], blocks=[islands.layers[1]], mp_policy=policy)
    same_state = islands.layers[0]._get_fsdp_state() is islands.stem._get_fsdp_state()
    fp32 = model_class()
    fp32.stem.keep_in_fp32 = True
    fully_shard_moe(fp32, dp_mesh=meshes["dp_mesh"], blocks=[fp32.layers[1]])
    return names(plain), names(chosen), (names(islands), same_state), names(fp32)


def test_units_follow_the_structure():
    plain, chosen, (islands, same_state), fp32 = run_ranks(_units, 1)[0]
    assert plain == ["", "layers.0", "layers.1", "tower.inner.0"]  # of nested lists the outermost
    assert chosen == ["", "tokens", "layers.0", "lm_head"]
    assert islands == ["", "stem", "layers.0", "layers.1"]
    assert same_state, "the fp32 modules form one unit"
    assert fp32 == ["", "layers.1"], "nothing to separate where all is fp32"


def _found_and_made():
    import torch
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    from fsdp_ep import find_embedding, find_units, fully_shard_moe

    model_class, meshes, shard, _ = _setup(ep=2)
    with torch.device("meta"):
        model = model_class()
    shard(model.experts)
    model.stem.keep_in_fp32 = True
    chosen = {"ep_mesh": meshes["ep_mesh"], "embedding": find_embedding(model), "separate_lm_head": True}
    units = find_units(model, param_dtype=torch.bfloat16, **chosen)
    untouched = not any(isinstance(module, FSDPModule) for module in model.modules())
    names = {module: name for name, module in model.named_modules()}
    found = [[names[module] for module in modules] for modules in units.modules()]
    fully_shard_moe(
        model,
        dp_mesh=meshes["dp_mesh"],
        expert_dp_mesh=meshes["expert_dp_mesh"],
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        **chosen,
    )
    made = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return untouched, found, made


def test_the_units_that_are_found_are_those_that_are_made():
    for untouched, found, made in run_ranks(_found_and_made, 2):
        assert untouched
        blocks = ["layers.0", "layers.1", "tower.inner.0"]
        assert found == [["experts"], *([block] for block in blocks), ["tokens"], ["lm_head"], ["stem"]]
        assert sorted(made) == sorted(["", *(name for names in found for name in names)])


def test_units_are_found_without_a_process_group():
    with torch.device("meta"):
        model = nn.ModuleDict({"tokens": nn.Embedding(5, 3), "layers": nn.ModuleList([nn.Linear(3, 3)])})
    units = find_units(model)
    assert (units.experts, units.islands, units.embedding, units.head) == ([], [], None, None)
    assert units.blocks == list(model["layers"])
    assert find_embedding(model) is model["tokens"]
    with pytest.raises(ShardingError, match="no block found"):
        find_embedding(nn.Embedding(5, 3))


def _refusals():
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from fsdp_ep import ShardingError, fully_shard_moe

    model_class, meshes, shard, parts = _setup(ep=2)
    messages = {}

    def refused(name, model, **arguments):
        try:
            fully_shard_moe(model, **{**meshes, **arguments})
        except ShardingError as error:
            messages[name] = str(error)
        else:
            messages[name] = "accepted"

    def sharded(num_experts=4, dim=0):
        model = model_class(num_experts)
        shard(model.experts, dim)
        return model

    refused("no stack", model_class())
    refused("none expected", model_class(), require_experts=False, expert_dp_mesh=None)
    refused("no expert mesh", sharded(), expert_dp_mesh=None)
    refused("expert mesh", sharded(), expert_dp_mesh=meshes["dp_mesh"])
    refused("axes", sharded(), dp_mesh=torch.distributed.device_mesh.DeviceMesh._concatenate(
        [parts["dp_replicate"], parts["dp_shard"]]
    ))  # fmt: skip
    refused("empty rank", sharded(num_experts=1))
    refused("placement", sharded(dim=2))
    mixed = sharded()
    mixed.experts.router = nn.Linear(4, 4)
    refused("mixed", mixed)
    tied = sharded()
    tied.lm_head.weight = tied.tokens.weight
    refused("tied", tied, embedding=tied.tokens)
    tied_head = sharded()
    tied_head.lm_head.weight = tied_head.tokens.weight
    refused("tied head", tied_head, separate_lm_head=True)
    no_blocks = sharded()
    no_blocks.layers, no_blocks.tower = nn.Identity(), nn.Identity()
    refused("no block", no_blocks)
    headless = sharded()
    del headless.lm_head
    refused("no head", headless, separate_lm_head=True)
    refused("stranger", sharded(), embedding=nn.Embedding(2, 2))
    narrow = sharded()
    narrow.stem.keep_in_fp32 = True
    narrow.stem.to(torch.bfloat16)
    refused("narrow island", narrow, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    kept = sharded()
    kept.lm_head.weight = kept.tokens.weight
    refused("tied in the root", kept)
    assert kept.lm_head.weight is kept.tokens.weight
    return messages


@pytest.fixture(scope="module")
def refusals():
    first, second = run_ranks(_refusals, 2)
    assert first == second, "all ranks say the same"
    return first


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("no stack", ["ep_mesh", "no parameter is a DTensor", "2 ranks", "require_experts = False"]),
        ("none expected", ["accepted"]),
        ("no expert mesh", ["expert_dp_mesh", "2 ranks"]),
        ("expert mesh", ["expert_dp_mesh", "= 2", "2 ranks of dp_mesh"]),
        ("axes", ["expert_dp_mesh.ndim", "2"]),
        ("empty rank", ["experts.up_proj", "1 experts on 2 ranks", "leave 1 without any"]),
        ("placement", ["experts.up_proj", "Shard"]),
        ("mixed", ["experts.router.weight", "one mesh"]),
        ("tied", ["lm_head.weight", "tokens.weight", "tied"]),
        ("tied head", ["lm_head.weight", "tokens.weight", "tied"]),
        ("no block", ["nn.ModuleList", "blocks"]),
        ("no head", ["lm_head", "head="]),
        ("stranger", ["Embedding", "not a module of the model"]),
        ("narrow island", ["bfloat16", "keep_in_fp32"]),
    ],
)
def test_mistakes_are_refused_on_all_ranks(refusals, case, said):
    for words in said:
        assert words in refusals[case]


def _without_experts_on_one_rank():
    model_class, meshes, _, _ = _setup()
    from fsdp_ep import find_units, fully_shard_moe

    def dense():
        model = model_class()
        del model.experts
        return model

    with pytest.raises(ValueError, match=r"ep_mesh = \('ep',\): no parameter .* 1 ranks") as caught:
        fully_shard_moe(dense(), **meshes)
    assert caught.value.key == "ep_mesh"
    convolved = dense()
    convolved.conv = nn.Conv1d(4, 4, 2)  # as Mamba has
    with pytest.raises(ValueError, match="no parameter is a stack of experts"):
        find_units(convolved, ep_mesh=meshes["ep_mesh"])
    vectors = dense()
    vectors.experts = nn.Module()
    vectors.experts.num_experts, vectors.experts.dispatcher = 3, None
    vectors.experts.gains = nn.Parameter(torch.ones(3, 4))
    find_units(vectors, ep_mesh=meshes["ep_mesh"])
    assert find_units(dense(), ep_mesh=meshes["ep_mesh"], require_experts=False).experts == []
    fully_shard_moe(dense(), **meshes, require_experts=False)
    fully_shard_moe(dense(), dp_mesh=meshes["dp_mesh"])
    fully_shard_moe(model_class(), **meshes)


def test_one_rank_refuses_what_many_would():
    run_ranks(_without_experts_on_one_rank, 1)


def test_a_tie_within_one_unit_is_kept(refusals):
    assert refusals["tied in the root"] == "accepted"

"""Which modules become FSDP units: found by structure and by mesh, never by name."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd


class ShardingError(ValueError):
    """A model cannot be sharded as asked: says which argument, its value, the rule and a way out.

    It follows from the model and the meshes alone, so every rank raises it, before any communication.
    """

    def __init__(self, key: str, value: object, rule: str, hint: str) -> None:
        super().__init__(key, value, rule, hint)
        self.key, self.value, self.rule, self.hint = key, value, rule, hint

    def __str__(self) -> str:
        return f"{self.key} = {self.value}: {self.rule} ({self.hint})"


@dataclass(frozen=True)
class Units:
    """The FSDP units of a model, innermost kinds first. What is in none of them is the root's."""

    experts: list[nn.Module]
    """One unit each."""
    islands: list[nn.Module]
    """Modules that stay fp32, and form one unit together."""
    blocks: list[nn.Module]
    """One unit each."""
    embedding: nn.Module | None
    head: nn.Module | None

    def modules(self) -> list[list[nn.Module]]:
        """Every unit but the root, as its list of modules."""
        single = [*self.experts, *self.blocks, self.embedding, self.head]
        units = [[module] for module in single if module is not None]
        return [*units, self.islands] if self.islands else units


def find_units(
    model: nn.Module,
    *,
    ep_mesh: DeviceMesh | None = None,
    blocks: Iterable[nn.Module] | None = None,
    head: nn.Module | None = None,
    embedding: nn.Module | None = None,
    param_dtype: torch.dtype | None = None,
    separate_lm_head: bool = False,
    require_experts: bool = True,
) -> Units:
    """What `fully_shard_moe` makes of the model with the same arguments.

    Changes nothing. Without an `ep_mesh` it needs no process group, and the model may be on the meta device.

    Args:
        param_dtype: that of the precision policy; None: parameters are used as they are stored.

    Raises:
        ShardingError: as `fully_shard_moe`: no block, no head with `separate_lm_head`, no experts where
            there is an `ep_mesh` and `require_experts`.
    """
    return Units(
        experts=find_experts(model, ep_mesh, require_experts),
        islands=find_islands(model, param_dtype),
        blocks=find_blocks(model) if blocks is None else list(blocks),
        embedding=embedding,
        head=(head or find_head(model)) if separate_lm_head else None,
    )


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The children of the outermost ModuleLists of `model`, in order; none is an error."""
    lists = _outermost(model, lambda module: isinstance(module, nn.ModuleList))
    blocks = [block for layers in lists for block in layers.children()]
    if not blocks:
        rule = f"no block found: {type(model).__name__} has no nn.ModuleList with children"
        raise ShardingError("blocks", None, rule, "pass blocks=[...], the modules that become FSDP units")
    return blocks


def find_experts(model: nn.Module, ep_mesh: DeviceMesh | None, required: bool) -> list[nn.Module]:
    """The modules that own expert stacks: parameters that are DTensors on `ep_mesh`.

    None on a 1-rank mesh, where expert parallelism changes nothing. But that there are experts is seen there too,
    by what they own, so that a wrong model is refused before it runs on many ranks.
    """
    if ep_mesh is None:
        return []
    owners = [
        (name, module)
        for name, module in model.named_modules()
        if any(_is_on(parameter, ep_mesh) for parameter in module.parameters(recurse=False))
    ]
    stands_whole = ep_mesh.size() == 1 and any(_may_be_experts(module) for module in model.modules())
    if required and not owners and not stands_whole:
        found = "is a stack of experts" if ep_mesh.size() == 1 else "is a DTensor on it"
        rule = f"no parameter {found}, and this mesh of {ep_mesh.size()} ranks is for experts"
        hint = "shard the experts over it first; require_experts = False where the model need not have any"
        raise ShardingError("ep_mesh", tuple(ep_mesh.mesh_dim_names or ()), rule, hint)
    if ep_mesh.size() == 1:
        return []
    for name, module in owners:
        for parameter_name, parameter in module.named_parameters():
            _check_stack(f"{name}.{parameter_name}", parameter, ep_mesh)
    return [module for _, module in owners]


def _may_be_experts(module: nn.Module) -> bool:
    """Owns parameters of three dims, and is no convolution; or is a stack as ep-dispatch finds it."""
    own, count = list(module.parameters(recurse=False)), getattr(module, "num_experts", None)
    if any(parameter.dim() > 2 for parameter in own):
        return not isinstance(module, _ConvNd)
    return hasattr(module, "dispatcher") and any(
        parameter.dim() > 0 and parameter.shape[0] == count for parameter in own
    )


def _is_on(parameter: nn.Parameter, mesh: DeviceMesh) -> bool:
    return isinstance(parameter, DTensor) and parameter.device_mesh == mesh


def _check_stack(name: str, parameter: nn.Parameter, ep_mesh: DeviceMesh) -> None:
    if not _is_on(parameter, ep_mesh):
        rule = "stands in one module with expert stacks, but is not sharded over ep_mesh"
        hint = "move it into a module of its own: one FSDP unit has one mesh"
        raise ShardingError("parameter", name, rule, hint)
    assert isinstance(parameter, DTensor)
    (placement,) = parameter.placements
    if not placement.is_shard(0):
        raise ShardingError("parameter", name, f"has the placement {placement} on ep_mesh", "use Shard(0)")
    num_experts, ep = parameter.shape[0], ep_mesh.size()
    if (used := _ranks_with_experts(num_experts, ep)) < ep:
        rule = f"{num_experts} experts on {ep} ranks, {-(-num_experts // ep)} each, leave {ep - used} without any"
        good = [d for d in range(1, ep) if ep % d == 0 and _ranks_with_experts(num_experts, d) == d]
        raise ShardingError("parameter", name, rule, f"use an ep degree that works: {', '.join(map(str, good))}")


def _ranks_with_experts(num_experts: int, ep: int) -> int:
    """`Shard(0)` splits like `torch.chunk`: full ranks first."""
    return -(-num_experts // -(-num_experts // ep))


def find_islands(model: nn.Module, param_dtype: torch.dtype | None) -> list[nn.Module]:
    """The outermost modules with `keep_in_fp32 = True` and parameters, where not all is fp32 (or all float64).

    Args:
        param_dtype: what FSDP casts parameters to; None: it leaves them as they are stored.
    """
    marked = _outermost(model, lambda module: getattr(module, "keep_in_fp32", False))
    islands = [module for module in marked if any(True for _ in module.parameters())]
    dtypes = {parameter.dtype for parameter in model.parameters()} | {param_dtype} - {None}
    if dtypes in ({torch.float32}, {torch.float64}):
        return []
    for island in islands:
        for name, parameter in island.named_parameters():
            if parameter.dtype != torch.float32:
                rule = f"is {parameter.dtype} in a {type(island).__name__} with keep_in_fp32 = True"
                raise ShardingError("parameter", name, rule, "create it in float32, and cast the others alone")
    return islands


def _outermost(module: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    for child in module.children():
        if is_wanted(child):
            yield child
        else:
            yield from _outermost(child, is_wanted)


def find_head(model: nn.Module) -> nn.Module:
    """The head by Hugging Face's accessor, or the attribute `lm_head`; neither is an error."""
    accessor = getattr(model, "get_output_embeddings", None)
    head = (accessor() if callable(accessor) else None) or getattr(model, "lm_head", None)
    if isinstance(head, nn.Module):
        return head
    rule = f"{type(model).__name__} has neither get_output_embeddings() nor an attribute lm_head"
    raise ShardingError("separate_lm_head", True, rule, "pass head=...")


def find_embedding(model: nn.Module, blocks: Iterable[nn.Module] | None = None) -> nn.Module | None:
    """The one `nn.Embedding` outside of the blocks; None if there is none, more than one, or a tied one.

    Args:
        blocks: default: as in `find_units`.

    Raises:
        ShardingError: no block.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    inside = {id(module) for block in blocks for module in block.modules()}
    found = [m for m in model.modules() if isinstance(m, nn.Embedding) and id(m) not in inside]
    if len(found) != 1:
        return None
    names = [n for n, p in model.named_parameters(remove_duplicate=False) if p is found[0].weight]
    return found[0] if len(names) == 1 else None

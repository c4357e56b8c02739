"""What FSDP asks of the parameters of one unit, checked before the first unit is made, on all ranks alike."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_ep._units import ShardingError

ShardPlacement = Callable[[nn.Parameter], Shard | None]
"""Which dim of a parameter its unit shards; None: dim 0."""


class Owned(NamedTuple):
    """A parameter under one of its names, and the innermost unit around it."""

    module: nn.Module
    name: str
    """In the model; the last part of it is the name in `module`."""
    parameter: nn.Parameter
    unit: int | None
    """Its index; None: the root."""


def owned_parameters(
    model: nn.Module, units: Sequence[Sequence[nn.Module]], ignored: Iterable[nn.Parameter]
) -> list[Owned]:
    """All parameters of `model` under all their names, but the ignored ones."""
    inside = set(model.modules())
    for modules in units:
        for module in modules:
            if module not in inside:
                rule = "is not a module of the model"
                raise ShardingError("units", type(module).__name__, rule, "pass modules that model.modules() has")
    unit_of = {module: index for index, modules in enumerate(units) for module in modules}
    skipped = {id(parameter) for parameter in ignored}
    return [owned for owned in _owned(model, unit_of, None, "") if id(owned.parameter) not in skipped]


def _owned(module: nn.Module, unit_of: Mapping[nn.Module, int], unit: int | None, prefix: str) -> Iterator[Owned]:
    unit = unit_of.get(module, unit)
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield Owned(module, prefix + name, parameter, unit)
    for name, child in module.named_children():
        yield from _owned(child, unit_of, unit, f"{prefix}{name}.")


def check_ties(parameters: Iterable[Owned]) -> None:
    """A parameter belongs to one unit: of two, each would keep a copy with a gradient of its own."""
    first: dict[int, Owned] = {}
    for owned in parameters:
        other = first.setdefault(id(owned.parameter), owned)
        if other.unit != owned.unit:
            rule = f"is the same parameter as {other.name}, and the two would be in different FSDP units"
            hint = "keep tied weights in one unit: without separate_lm_head and embedding both stay with the root"
            raise ShardingError("parameter", owned.name, rule, hint)


def check_dtypes(parameters: Iterable[Owned]) -> None:
    """The trainable parameters of a unit are stored in one dtype: they travel in one buffer."""
    first: dict[int | None, Owned] = {}
    for owned in parameters:
        if not owned.parameter.requires_grad:
            continue
        other = first.setdefault(owned.unit, owned)
        if other.parameter.dtype != owned.parameter.dtype:
            here, there = (str(one.parameter.dtype).removeprefix("torch.") for one in (owned, other))
            rule = f"is {here}, {other.name} in the same FSDP unit {there}"
            hint = "put fp32 ones into modules with keep_in_fp32 = True, or pass them as ignored_params"
            raise ShardingError("parameter", owned.name, rule, f"store one dtype, {hint}")


def check_placements(
    parameters: Iterable[Owned], placement: ShardPlacement | None, mesh_of: Callable[[int | None], DeviceMesh]
) -> None:
    """Only dim 0 may be split unevenly over the shard axis of a unit's mesh."""
    if placement is None:
        return
    for _, name, parameter, unit in parameters:
        chosen, mesh = placement(parameter), mesh_of(unit)
        ranks = mesh.size(mesh.ndim - 1)
        shape = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        if chosen is None or chosen.dim in (0, -len(shape)):
            continue
        if not -len(shape) <= chosen.dim < len(shape) or shape[chosen.dim] % ranks:
            rule = f"{tuple(shape)} on {ranks} ranks: dim {chosen.dim} must be there and divide by the ranks"
            dividing = [dim for dim, size in enumerate(shape) if dim and size % ranks == 0]
            hint = "dim 0 may be uneven or empty" + (f", and dims {dividing} divide" if dividing else "")
            raise ShardingError("shard_placement_fn", f"{chosen} for {name}", rule, hint)

"""The DeviceMesh of a resolved config, and the one place that knows how to find its parts by name."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ep_mesh._layout import MeshConfig, MeshConfigError

_ALIASES = {
    "dp_shard": ("dp_shard_mod_ep", "ep"),
    "dp": ("dp_replicate", "dp_shard_mod_ep", "ep"),
}
"""Flattened names, in the order in which their groups are created."""


def build_mesh(resolved: MeshConfig, device_type: str) -> DeviceMesh:
    """The mesh of a resolved config, with every process group that a run needs.

    Axes, outermost first: `dp_replicate`, `dp_shard_mod_ep`, `ep`, each there at degree 1 too, and the
    flattened aliases `dp_shard` (= `dp_shard_mod_ep` x `ep`) and `dp` (all three). Collective: all ranks
    call it, after `init_process_group`. All groups are created here and in one order, because a group that
    some ranks create later than others is a deadlock.

    Args:
        resolved: what `MeshConfig.resolve` returned.
        device_type: "cpu", "cuda", ...: the devices that the groups communicate for.

    Raises:
        MeshConfigError: the config is not resolved, or resolved for another world size.
        RuntimeError: there is no process group.
    """
    axes = resolved.axes
    if not dist.is_initialized():
        raise RuntimeError("build_mesh needs a process group: call torch.distributed.init_process_group first")
    if (world_size := dist.get_world_size()) != resolved.world_size:
        rule = f"the config is for {resolved.world_size} ranks, and the process group has {world_size}"
        raise MeshConfigError("world_size", world_size, rule, "resolve it for the size of the process group")
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for alias, parts in _ALIASES.items():
        mesh[parts]._flatten(alias)
    return mesh


def resolve_sub_mesh(mesh: DeviceMesh, name: str | tuple[str, str]) -> DeviceMesh:
    """The part of `mesh` called `name`, whether an axis or a flattened alias, without deprecation warnings.

    Args:
        mesh: any DeviceMesh with named axes.
        name: an axis or an alias -> 1-D mesh; (outer, inner) -> 2-D mesh, e.g. `("dp_replicate", "dp_shard")`
            is the HSDP mesh that `fully_shard` takes. No process group is created.

    Raises:
        MeshConfigError: no such name (the message lists the valid ones), or the two overlap.
    """
    if isinstance(name, str):
        return _resolve_one(mesh, name)
    outer, inner = name
    parts = [_resolve_one(mesh, outer), _resolve_one(mesh, inner)]
    try:
        return DeviceMesh._concatenate(parts)
    except RuntimeError as error:
        rule = "the two parts of a pair must not share ranks other than this one"
        raise MeshConfigError("mesh", name, rule, "for example ('dp_replicate', 'dp_shard')") from error


def _resolve_one(mesh: DeviceMesh, name: str) -> DeviceMesh:
    axes = mesh.mesh_dim_names or ()
    if name in axes:
        return mesh[name]
    aliases = _aliases(mesh)
    if name in aliases:
        return aliases[name]
    rule = f"the mesh has no such axis or alias; axes: {', '.join(axes) or 'none'}"
    raise MeshConfigError("mesh", name, rule, f"aliases: {', '.join(sorted(aliases)) or 'none'}")


def _aliases(mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """Flattened meshes that lie inside `mesh`.

    Torch keeps them at the root mesh and deprecates looking them up by slicing, hence its private mapping.
    """
    flattened: dict[str, DeviceMesh] = mesh._get_root_mesh()._flatten_mapping
    ranks = set(mesh.mesh.flatten().tolist())
    return {name: flat for name, flat in flattened.items() if ranks.issuperset(flat.mesh.flatten().tolist())}

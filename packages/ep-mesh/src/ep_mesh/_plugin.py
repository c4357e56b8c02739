"""The component that ep-mesh registers with the plugin host: the mesh "device_mesh"."""

from typing import TYPE_CHECKING, Any

from ep_mesh._layout import MeshConfig
from moe_core.plugins import Component, Problem, hookimpl

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from moe_core.config import Config
    from moe_core.plugins import Run


@hookimpl
def moe_components() -> list[Component]:
    return [Component("mesh", "device_mesh", config="ep_mesh:MeshConfig", factory="ep_mesh._plugin:device_mesh")]


@hookimpl
def moe_validate(config: "Config", world_size: int) -> list[Problem]:
    """The rules between degrees, world size and number of experts, before any process exists."""
    mesh = config["mesh"].config
    if not isinstance(mesh, MeshConfig):
        return []
    broken = mesh.broken_rules(world_size, _num_experts(config))
    return [Problem(f"mesh.{error.key}", error.rule, error.value, error.hint) for error in broken]


def device_mesh(config: MeshConfig, run: "Run") -> "DeviceMesh":
    """The mesh for this world and for the number of experts of the selected model."""
    from ep_mesh._mesh import build_mesh

    return build_mesh(config.resolve(run.world_size, _num_experts(run.config)), run.device_type)


def _num_experts(config: "Config") -> int | None:
    """E of the selected model, where its config says so."""
    try:
        model: Any = config["model"]
    except KeyError:
        return None
    return getattr(getattr(model, "config", None), "num_experts", None)

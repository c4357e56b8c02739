"""The components that ep-dispatch registers with the plugin host."""

from typing import TYPE_CHECKING, Any, Literal

import attrs

from moe_core.plugins import Component, Problem, Selected, component_field, hookimpl

if TYPE_CHECKING:
    from torch import nn

    from moe_core.config import Config
    from moe_core.plugins import Run
    from moe_core.plugins.kinds import Dispatcher


@attrs.frozen
class LocalConfig:
    """All experts on every rank."""


@attrs.frozen
class AllToAllConfig:
    """Tokens travel to their experts' ranks and back."""

    dedup: Literal["auto", "never"] = "auto"
    """Whether a token goes once to a rank with several of its experts; both send it once for each."""
    check_splits: bool = False
    """Compare the ranks' splits before rows are sent; costs a collective and a host sync per layer."""


@attrs.frozen
class ExpertParallelizedConfig:
    """Splits the experts over the axis `ep` of the mesh; nothing changes where that is 1."""

    dispatcher: Selected | None = component_field("dispatcher")
    """How tokens travel. Left out: all_to_all."""
    require_experts: bool = True
    """Refuse a model without experts that can be split, at every degree; false for one without MoE layers."""


def build_local(config: LocalConfig, run: "Run") -> "Dispatcher":
    from ep_dispatch._dispatchers import LocalDispatcher

    return LocalDispatcher()


def build_all_to_all(config: AllToAllConfig, run: "Run") -> "Dispatcher":
    from ep_dispatch._dispatchers import AllToAllDispatcher

    return AllToAllDispatcher(run.sub_mesh("ep"), dedup=config.dedup, check_splits=config.check_splits)


def expert_parallelized(config: ExpertParallelizedConfig, run: "Run") -> "nn.Module":
    from ep_dispatch._expert_stacks import shard_experts

    dispatcher = None if config.dispatcher is None else config.dispatcher.build(run)
    return shard_experts(run.model, run.sub_mesh("ep"), dispatcher=dispatcher, require_experts=config.require_experts)


@hookimpl
def moe_components() -> list[Component]:
    here = "ep_dispatch._plugin"
    return [
        Component(
            "transform", "expert_parallelized", f"{here}:ExpertParallelizedConfig", f"{here}:expert_parallelized"
        ),
        Component("dispatcher", "local", f"{here}:LocalConfig", f"{here}:build_local"),
        Component("dispatcher", "all_to_all", f"{here}:AllToAllConfig", f"{here}:build_all_to_all"),
    ]


@hookimpl
def moe_validate(config: "Config", world_size: int) -> list[Problem]:
    """Experts that are split need a dispatcher that travels, and the transform that splits them."""
    degree: Any = getattr(config["mesh"].config, "ep", 1)
    transforms = {selected.name: selected.config for selected in config["transform"]}
    chosen = getattr(transforms.get("expert_parallelized"), "dispatcher", None)
    if degree == 1 or chosen is None or chosen.name != "local":
        return []
    rule = f"must bring tokens to other ranks where mesh.ep = {degree}"
    key = "transform.expert_parallelized.dispatcher.type"
    return [Problem(key, rule, value="local", hint='use "all_to_all", or leave it out')]

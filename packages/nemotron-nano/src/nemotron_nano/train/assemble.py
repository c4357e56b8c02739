"""From a config to a `Run` with all its parts built, in the order that DESIGN names."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ep_mesh import resolve_sub_mesh
from moe_core.config import Config
from moe_core.plugins import Run


class AssemblyError(ValueError):
    """Parts that a config names do not go together."""


def assemble(config: Config, *, device_type: str, resume: bool = False) -> Run:
    """Build everything that the config names, on this rank of an initialised process group.

    The model is made on the meta device, transformed there, and only then given memory, in which every rank
    fills what it holds.

    Raises:
        AssemblyError: the ranks differ in config or plugins, or a transform that shards the model is missing.
    """
    _check_same_everywhere(config)
    run = Run(
        config,
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        device_type=device_type,
        resume=resume,
        sub_mesh=resolve_sub_mesh,
    )
    run = run.with_part("mesh", config["mesh"].build(run))
    run = materialised_model(run)
    for part in ("loss", "optimizer", "scheduler", "clipper", "data", "checkpointer"):
        run = run.with_part(part, config[part].build(run))
    return run.with_part("trackers", tuple(selected.build(run) for selected in config["tracker"]))


def materialised_model(run: Run) -> Run:
    """`run` with its model built, transformed and initialised."""
    with torch.device("meta"):
        run = run.with_part("model", run.config["model"].build(run))
    for selected in run.config["transform"]:
        run = run.with_part("model", selected.build(run))
    _check_sharded(run)
    run.model.to_empty(device=run.device_type)
    with torch.no_grad():
        run.model.init_weights(run.config.run.seed)  # type: ignore[operator]  # of the Model protocol
    return run


def _check_same_everywhere(config: Config) -> None:
    """Ranks with other plugins or another config would hang or diverge; say who differs instead."""
    mine = {"plugins": config.registry.fingerprint(), "config": config.to_toml()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for what in mine:
        different = [rank for rank, theirs in enumerate(everyone) if theirs[what] != everyone[0][what]]
        if different:
            ranks = ", ".join(map(str, different))
            raise AssemblyError(f"ranks {ranks} loaded other {what} than rank 0; install and configure all alike")


def _check_sharded(run: Run) -> None:
    if run.world_size == 1:
        return
    plain = [name for name, p in _trainable(run.model) if not isinstance(p, DTensor)]
    if plain:
        raise AssemblyError(
            f"{len(plain)} parameters, {plain[0]} the first, are not distributed, so each of the {run.world_size} "
            'ranks would train its own copy; add [[transform]] with type = "fsdp"'
        )


def _trainable(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)

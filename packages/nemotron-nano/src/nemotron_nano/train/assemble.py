"""From a config to a `Run` with all its parts built: config -> mesh -> model -> transforms -> weights -> the rest."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ep_mesh import resolve_sub_mesh
from moe_core.config import Config
from moe_core.plugins import Run


class AssemblyError(ValueError):
    """Parts that a config names do not go together."""


def assemble(config: Config, *, device_type: str, resume: bool = False) -> Run:
    """Build everything that the config names, on this rank of an initialised process group.

    Raises:
        AssemblyError: the ranks differ in config or plugins, or a transform that shards the model is missing.
    """
    check_ranks_agree(config)
    run = with_model(run_on_a_mesh(config, device_type=device_type, resume=resume))
    for part in ("loss", "optimizer", "scheduler", "clipper", "data", "checkpointer"):
        run = run.with_part(part, config[part].build(run))
    return run.with_part("trackers", tuple(selected.build(run) for selected in config["tracker"]))


def check_ranks_agree(config: Config) -> None:
    """Ranks with other plugins or another config would hang or diverge; say who differs instead."""
    mine = {"plugins": config.registry.fingerprint(), "config": config.to_toml()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for what in mine:
        different = [rank for rank, theirs in enumerate(everyone) if theirs[what] != everyone[0][what]]
        if different:
            ranks = ", ".join(map(str, different))
            raise AssemblyError(f"ranks {ranks} loaded other {what} than rank 0; install and configure all alike")


def run_on_a_mesh(config: Config, *, device_type: str, resume: bool = False) -> Run:
    """A run that has its config and its mesh: all process groups exist after this."""
    run = Run(
        config,
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        device_type=device_type,
        resume=resume,
        sub_mesh=resolve_sub_mesh,
    )
    return run.with_part("mesh", config["mesh"].build(run))


def with_model(run: Run) -> Run:
    """`run` with its model: made on the meta device, transformed there, and only then given memory and weights."""
    run = model_on_meta(run)
    run = transformed(run)
    return with_weights(run)


def model_on_meta(run: Run) -> Run:
    """`run` with its model as the config describes it, without memory."""
    with torch.device("meta"):
        return run.with_part("model", run.config["model"].build(run))


def transformed(run: Run) -> Run:
    """`run` with its model after all transforms, in the order of the config; on several ranks it is sharded by then."""
    for selected in run.config["transform"]:
        run = run.with_part("model", selected.build(run))
    trainable = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    plain = [name for name, parameter in trainable.items() if not isinstance(parameter, DTensor)]
    if plain and run.world_size > 1:
        raise AssemblyError(
            f"{len(plain)} parameters, {plain[0]} the first, are not distributed, so each of the {run.world_size} "
            'ranks would train its own copy; add [[transform]] with type = "fsdp"'
        )
    return run


def with_weights(run: Run) -> Run:
    """`run` with its model on the run's device, and its weights drawn from `run.seed`."""
    run.model.to_empty(device=run.device_type)
    with torch.no_grad():
        run.model.init_weights(run.config.run.seed)  # type: ignore[operator]  # Module types all its names as tensors
    return run

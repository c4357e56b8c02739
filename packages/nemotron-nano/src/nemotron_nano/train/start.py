"""Whether a run may begin where it is told to: nothing is written over, and a resume has something to go on from."""

from moe_core.config import Config
from moe_core.plugins import Run, RunOrderError
from moe_core.plugins.kinds import Checkpointer


class StartError(ValueError):
    """The run's folder and `--resume` do not go together."""


def check_start(config: Config, *, resume: bool) -> None:
    """The check before any rank exists; left to the ranks where the checkpointer needs more than its config.

    Raises:
        StartError: see `check_checkpoints`.
    """
    try:
        checkpointer = config["checkpointer"].build(Run(config))
    except RunOrderError:
        return
    check_checkpoints(checkpointer, config, resume=resume)


def check_checkpoints(checkpointer: Checkpointer, config: Config, *, resume: bool) -> None:
    """Raises:
    StartError: there is a checkpoint and the run does not resume, or there is none and it does.
    """
    latest, folder = checkpointer.latest_step(), config.run.output_dir
    if latest is not None and not resume:
        raise StartError(
            f"{folder}: holds a checkpoint of step {latest}; go on from it with --resume, choose another folder with "
            "run.name=NAME, or remove it"
        )
    if latest is None and resume:
        raise StartError(f"{folder}: has no checkpoint to --resume from; leave --resume out to start this run")

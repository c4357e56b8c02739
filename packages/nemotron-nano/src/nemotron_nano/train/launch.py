"""Before the ranks: whether a run may begin where it is told to, and one process per rank on this machine."""

import logging
import sys
import uuid
from collections.abc import Sequence

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
    """Nothing is written over, and a resume has something to go on from.

    Raises:
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


def launch(module: str, arguments: Sequence[str], nproc: int) -> int:
    """Run `python -m module arguments...` as `nproc` ranks; returns 0, or the exit status of the first that failed.

    Through torch's elastic launcher: when one rank ends badly, it ends the others. The rendezvous takes a free port by
    itself.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # the ranks report their errors themselves; the launcher's own tables would bury them
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except SignalException as error:
        print(f"nemotron-nano: stopped by {error.sigval.name}; all {nproc} ranks are stopped", file=sys.stderr)
        return 128 + error.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was ended by signal {-failure.exitcode}" if failure.exitcode < 0 else f"exited with {failure.exitcode}"
        print(f"nemotron-nano: rank {rank} of {nproc} {how}; all ranks are stopped", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0

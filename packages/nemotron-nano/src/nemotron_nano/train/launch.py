"""One process per rank on this machine, through torch's elastic launcher."""

import logging
import sys
import uuid
from collections.abc import Sequence


def launch(module: str, arguments: Sequence[str], nproc: int) -> int:
    """Run `python -m module arguments...` as `nproc` ranks; returns 0, or the exit status of the first that failed.

    When one rank ends badly, the launcher ends the others. The rendezvous takes a free port by itself.
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

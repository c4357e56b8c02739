"""What one rank does of `nemotron-nano train`."""

import signal
import sys
import time
import traceback
from contextlib import suppress

import torch.distributed as dist

from moe_core.config import Config
from nemotron_nano.errors import is_user_error
from nemotron_nano.train._batches import TrainingError
from nemotron_nano.train._process_group import LaunchError, Place, choose_device_type, process_group, set_threads
from nemotron_nano.train.assemble import assemble

LEAVE_AFTER_S = 1.0
"""Seconds that a rank stays after a failure. Its peers fail as soon as it has left, and the launcher, which looks ten
times a second and names one rank, must have seen by then who was first."""


def train_on_this_rank(config: Config, *, resume: bool) -> int:
    """Build the run and hand it to its trainer; returns the exit status.

    What all ranks find wrong is said once, in one line: mistakes of the user's (status 2), and a start or
    training that can't go on (status 1). Anything else is printed with its traceback and rank.
    """
    place = Place.from_environment()
    set_threads(config.run.threads, place)
    try:
        device_type = choose_device_type(config.run.device_type)
        with process_group(place, device_type, config.run.timeout_s):
            run = assemble(config, device_type=device_type, resume=resume)
            return int(config["trainer"].build(run)(run))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # the launcher, or the shell, says what stopped the run
    except (LaunchError, TrainingError) as error:
        return _say_once(error, place, status=1)
    except Exception as error:  # the rank has to say that it was the one, whatever it is
        if is_user_error(error):
            return _say_once(error, place, status=2)
        # in one piece, since other ranks may print at the same time
        who = f"nemotron-nano: rank {place.rank} of {place.world_size} failed:"
        print(f"{who}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return _stay_a_while(1)


def _say_once(error: Exception, place: Place, status: int) -> int:
    if _is_first_to_say(place):
        print(f"nemotron-nano: {error}", file=sys.stderr, flush=True)
    return _stay_a_while(status)


def _stay_a_while(status: int) -> int:
    """`status`, after a while if there are peers that this rank's end would make fail."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with suppress(KeyboardInterrupt):  # an impatient user gets the failure's own status
            time.sleep(LEAVE_AFTER_S)
    return status


def _is_first_to_say(place: Place) -> bool:
    """Whether no other rank has said what it found; most often all of them found the same."""
    if not dist.is_initialized():
        return place.rank == 0
    try:
        store = dist.distributed_c10d._get_default_store()
        return store.add("nemotron_nano/said", 1) == 1
    except RuntimeError:
        # the rank that holds the store is gone; better twice than not at all
        return True

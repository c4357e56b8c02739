"""What one rank does of `nemotron-nano train`: it meets the others, builds the run and hands it to the trainer."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import attrs
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch re-exports it without `as`, which mypy counts as private

from moe_core.config import Config
from nemotron_nano._exit import is_user_error
from nemotron_nano.train.assemble import assemble
from nemotron_nano.train.pretrain import TrainingError

LEAVE_AFTER_S = 1.0
"""Seconds that a rank stays after a failure. Its peers fail as soon as it has left, and the launcher, which looks ten
times a second and names one rank, must have seen by then who was first."""


class LaunchError(RuntimeError):
    """The ranks could not find each other."""


class DeviceError(ValueError):
    """The config asks for a device that this machine lacks."""


@attrs.frozen
class Place:
    """Where this process stands among the ranks."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> "Place":
        """What torchrun set; one process alone if it did not."""

        def read(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        world_size = read("WORLD_SIZE", 1)
        return cls(read("RANK", 0), read("LOCAL_RANK", 0), world_size, read("LOCAL_WORLD_SIZE", world_size))


def choose_device_type(wanted: str) -> str:
    """ "auto" is the accelerator that torch finds, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    found = accelerator.type if accelerator is not None and accelerator.type != "mps" else "cpu"
    if wanted not in ("auto", "cpu", found):
        raise DeviceError(f'run.device_type = {wanted!r}: this machine has no such device; use "auto" or {found!r}')
    return found if wanted == "auto" else wanted


@contextmanager
def process_group(place: Place, device_type: str, timeout_s: float) -> Iterator[None]:
    """A default group with gloo for the CPU and the device's own backend beside it, for the block.

    Raises:
        LaunchError: the address is taken, or the others do not answer.
    """
    device = None
    if device_type != "cpu":
        device = torch.device(device_type, place.local_rank)
        torch.accelerator.set_device_index(place.local_rank)
    backend = "gloo" if device is None else f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
    # one rank alone needs no address, hence no free port
    store = HashStore() if place.world_size == 1 else None
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device,
        )
    except (dist.DistNetworkError, dist.DistStoreError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        first = str(error).strip().splitlines()[0]
        raise LaunchError(
            f"rank {place.rank} of {place.world_size} can't meet the others at {address}: {first}. If the port is "
            "in use, choose another one (torchrun --master-port N)"
        ) from error
    yield
    # not after an error: peers that are still in a collective would make the clean-up wait for them
    dist.destroy_process_group()


def set_threads(threads: int | None, place: Place) -> None:
    """CPU threads of this rank; by default the machine's cores shared out among its ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads or max(1, cores // place.local_world_size))


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

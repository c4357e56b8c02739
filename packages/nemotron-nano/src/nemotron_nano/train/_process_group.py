"""The default process group of this rank, from what the launcher put in the environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import attrs
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch re-exports it silently


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

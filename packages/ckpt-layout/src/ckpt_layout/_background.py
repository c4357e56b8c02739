"""Saves that go on while training does: a copy is taken at once, and a thread writes it."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


class BackgroundSaves:
    """Lets `save_checkpoint(..., background=...)` return as soon as the state is copied to the host.

    All ranks create it together, at the start: it makes a process group of its own on the CPUs (gloo), so that
    the collectives of a save and those of training never meet. One save is in flight at a time; the next waits
    for it. What fails in a save is raised by the next `save_checkpoint` or `wait`, on all ranks.

    A rank needs memory on the host for one copy of its shards and of their optimizer state.
    """

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group: ProcessGroup | None = dist.new_group(backend="gloo") if several else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Run `write` in the background; nothing may be in flight."""
        assert self._thread is None

        def run() -> None:
            try:
                write()
            except BaseException as error:  # raised again in the thread that waits
                self._error = error

        # a daemon: if training fails, the process ends without this save
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the save in flight, if there is one, is complete; raises what it raised."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, then give the group back. All ranks must call."""
        try:
            self.wait()
        finally:
            group, self.group = self.group, None
            if group is not None:
                dist.destroy_process_group(group)


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each tensor on the CPU that later changes do not reach; of a DTensor, with the same placements."""
    return {name: _host_copy(tensor.detach()) for name, tensor in tensors.items()}


def _host_copy(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.to("cpu", copy=True)
    local: Any = tensor.to_local().to("cpu", copy=True)
    # not from_local: on the mesh of an accelerator it would bring the copy back to it
    return DTensor(local, tensor._spec, requires_grad=False)

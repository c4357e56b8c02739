"""`save_checkpoint` and `load_checkpoint`: training state that can go on under another layout.

<directory>/latest                 the name of the newest complete one
<directory>/step-00000010/         torch.distributed.checkpoint's files: model/..., optimizer/...
    meta.json                      step, number of ranks, plugins, the caller's state
    host.pt                        optimizer settings and scheduler
    rng-00000.pt                   each rank's generators
    config.toml                    the run's config, if given
    ...                            other files that were given
"""

import io
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt_layout._dcp import MODEL, OPTIMIZER, Reader, dcp_errors, refuse_what_dcp_mislabels, stored_tensors
from ckpt_layout._errors import LayoutError, some
from ckpt_layout._folders import (
    folder_of,
    free_name,
    fresh_folder,
    latest_folder,
    partial_of,
    publish,
    remove_others,
    write_durably,
)
from ckpt_layout._ranks import assert_replicated, gathered, removed_on_failure, together, world
from ckpt_layout._shards import model_tensors, without_ties
from ckpt_layout._training_state import (
    capture_rng,
    check_groups,
    optimizer_settings,
    optimizer_tensors,
    restore_optimizer,
    restore_rng,
    room_for_state,
)

_FORMAT = 1

_OWN_FILES = ("meta.json", "host.pt", "config.toml", ".metadata")

_log = logging.getLogger(__name__)


@attrs.frozen
class _Content:
    """All that this rank puts into a checkpoint, taken at one moment."""

    tensors: Mapping[str, Tensor]
    host: bytes
    meta: bytes
    rng: bytes
    files: Mapping[str, bytes]
    """By name: what else lies in the folder."""


def save_checkpoint(
    directory: str | Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    state: Mapping[str, Any] | None = None,
    config_toml: str | None = None,
    files: Mapping[str, str | Path] | None = None,
    plugins: Sequence[str] = (),
    keep_last: int | None = None,
    background: "BackgroundSaves | None" = None,
) -> Path:
    """Store the training state after `step` steps; returns its folder. All ranks must call and share the disk.

    It is written aside, renamed when every rank has finished, and only then does `latest` move to it: whatever
    happens before leaves the last good checkpoint in its place. Each rank writes its own shards; weights
    and optimizer state can be loaded under any other layout.

    Args:
        state: what JSON can hold, the same on all ranks.
        config_toml: stored beside the checkpoint as config.toml.
        files: what is copied into the checkpoint's folder, by the name that it gets there: a tokenizer, for one.
        plugins: what is installed, as words such as "moe-core 0.1.0"; a load that is given others warns.
        keep_last: how many of the checkpoints written last stay, at least 1; None: all.
        background: None: return when all is written. Else return as soon as everything is copied to the host,
            so that training may go on; the folder is there when `background.wait()` returns.

    Raises:
        LayoutError: a ValueError: a setting out of range, state that cannot be stored, ranks whose optimizers
            hold state for different parameters.
        ReplicaMismatchError: what ranks have copies of differs between them.
        PeerError: another rank failed. With `background`, also what failed in the save before.
    """
    directory = Path(directory)
    if background is not None:
        background.wait()
    group = None if background is None else background.group
    with together("preparing the checkpoint", group):
        _check_arguments(step, keep_last)
        beside = _files(config_toml, files or {})
        content = _content(model, optimizer, scheduler, meta_bytes(step, world()[1], state, plugins), beside)
        final = free_name(directory, step)
    final = gathered(final, group)[0]  # what rank 0 sees counts: it publishes
    partial = partial_of(final)
    _same_keys_everywhere(content.tensors)
    assert_replicated(model)
    with together("making the folder", group):
        if world()[0] == 0:
            fresh_folder(partial)
    if background is None:
        with removed_on_failure(partial):
            _write(content, partial, final, keep_last, None)
    else:
        with together("copying the state", group):
            content = attrs.evolve(content, tensors=_host_copies(content.tensors))

        def write() -> None:
            with removed_on_failure(partial):
                _write(content, partial, final, keep_last, group)

        background.start(write)
    return final


def _write(content: _Content, partial: Path, final: Path, keep_last: int | None, group: ProcessGroup | None) -> None:
    """Everything after the copy; its collectives are on `group`."""
    with dcp_errors("writing the checkpoint"):
        dcp_save(
            {key: tensor.detach() for key, tensor in content.tensors.items()},
            storage_writer=FileSystemWriter(partial),
            process_group=group,
            no_dist=world()[1] == 1,
        )
    with together("writing the checkpoint", group):
        write_durably(partial / rng_name(world()[0]), content.rng)
        if world()[0] == 0:
            write_durably(partial / "host.pt", content.host)
            write_durably(partial / "meta.json", content.meta)
            for name, data in content.files.items():
                write_durably(partial / name, data)
    with together("publishing the checkpoint", group):
        if world()[0] == 0:
            publish(partial, final)
            remove_others(final, keep_last)


def load_checkpoint(
    directory: str | Path,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    step: int | None = None,
    plugins: Sequence[str] = (),
) -> dict[str, Any] | None:
    """Restore in place what `save_checkpoint` stored, under this run's layout. All ranks must call.

    Weights and optimizer state are bit-identical to what was saved, whatever the number of ranks, the
    expert-parallel degree or the replicas were then. Random generators are restored where the number of ranks is
    the same; otherwise they stay as they are.

    Args:
        directory: what `save_checkpoint` was given.
        optimizer, scheduler: None: theirs is not loaded.
        step: None: the newest complete one.
        plugins: what is installed here; a difference to what was saved is logged as a warning.

    Returns:
        the `state` that was saved, with `step`; None if there is no checkpoint and `step` is None.

    Raises:
        LayoutError: a ValueError: no such step; tensors that the checkpoint lacks, has beyond the model's, or
            has in another shape (all listed); parameter groups that differ.
        PeerError: another rank failed.
    """
    directory, here = Path(directory), None
    with together("finding the checkpoint"):
        if world()[0] == 0:
            here = latest_folder(directory) if step is None else folder_of(directory, step)
    folder = gathered(here)[0]
    if folder is None:
        return None
    reader = Reader(folder)
    with together("reading the checkpoint"):
        meta = read_meta(folder)
        _warn_of_other_plugins(folder, meta, plugins)
        host = torch.load(folder / "host.pt", map_location="cpu", weights_only=True)
        tensors = without_ties(model_tensors(model))
        names = _names_by_id(tensors)
        stored = reader.read_metadata()
        room = _room(tensors, stored)
        if optimizer is not None:
            if host["optimizer"] is None:
                raise LayoutError(f"{folder}: holds no optimizer; load with optimizer=None, or save with one")
            check_groups(optimizer, names, host["optimizer"])
            room |= room_for_state(optimizer, names, stored)
            _refuse_unused(folder, room, stored)
        if scheduler is not None and host["scheduler"] is None:
            raise LayoutError(f"{folder}: holds no scheduler; load with scheduler=None, or save with one")
        refuse_what_dcp_mislabels(room)
    with dcp_errors(f"reading {folder}"):
        dcp_load(
            {key: tensor.detach() for key, tensor in room.items()},
            storage_reader=reader,
            no_dist=world()[1] == 1,
        )
    with together("restoring the state"):
        if optimizer is not None:
            restore_optimizer(optimizer, names, room, host["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(host["scheduler"])
        if meta["world_size"] == world()[1]:
            rng = torch.load(folder / rng_name(world()[0]), map_location="cpu", weights_only=True)
            restore_rng(rng, _device_type(tensors))
    return {**meta["state"], "step": meta["step"]}


# -- saving while training goes on -------------------------------------------------------------------------


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


def _host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each tensor on the CPU that later changes do not reach; of a DTensor, with the same placements."""
    return {name: _host_copy(tensor.detach()) for name, tensor in tensors.items()}


def _host_copy(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.to("cpu", copy=True)
    local: Any = tensor.to_local().to("cpu", copy=True)
    # not from_local: on the mesh of an accelerator it would bring the copy back to it
    return DTensor(local, tensor._spec, requires_grad=False)


# -- what is stored ----------------------------------------------------------------------------------------


def _check_arguments(step: int, keep_last: int | None) -> None:
    if step < 0:
        raise LayoutError(f"step = {step}: must be at least 0")
    if keep_last is not None and keep_last < 1:
        raise LayoutError(f"keep_last = {keep_last}: must be at least 1, or None to keep all")


def _files(config_toml: str | None, files: Mapping[str, str | Path]) -> dict[str, bytes]:
    """Read on rank 0, which writes them."""
    if taken := {name for name in files if Path(name).name != name or name in _OWN_FILES}:
        raise LayoutError(f"files: {some(taken)}: must be plain names, and none that a checkpoint has itself")
    contents = {} if config_toml is None else {"config.toml": config_toml.encode()}
    return contents | {name: Path(path).read_bytes() for name, path in files.items() if world()[0] == 0}


def _content(
    model: nn.Module, optimizer: Optimizer | None, scheduler: Any, meta: bytes, files: Mapping[str, bytes]
) -> _Content:
    tensors = without_ties(model_tensors(model))
    names = _names_by_id(tensors)
    every = {f"{MODEL}{name}": tensor for name, tensor in tensors.items()}
    if optimizer is not None:
        every |= optimizer_tensors(optimizer, names)
    refuse_what_dcp_mislabels(every)
    host = host_bytes(optimizer, scheduler, names)
    rng = io.BytesIO()
    torch.save(capture_rng(_device_type(tensors)), rng)
    return _Content(every, host, meta, rng.getvalue(), files)


def _names_by_id(tensors: Mapping[str, Tensor]) -> dict[int, str]:
    return {id(tensor): name for name, tensor in tensors.items()}


def host_bytes(optimizer: Optimizer | None, scheduler: Any, names: Mapping[int, str]) -> bytes:
    """The content of host.pt."""
    content = {
        "optimizer": None if optimizer is None else optimizer_settings(optimizer, names),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:  # what pickling and reading back raises depends on the object
        raise LayoutError(
            f"settings of the optimizer or the scheduler are not plain data, and could not be loaded again: {error}"
        ) from error
    return buffer.getvalue()


def meta_bytes(step: int, ranks: int, state: Mapping[str, Any] | None = None, plugins: Sequence[str] = ()) -> bytes:
    """The text of meta.json."""
    meta = {"format": _FORMAT, "step": step, "world_size": ranks, "torch": torch.__version__}
    try:
        return (json.dumps({**meta, "plugins": list(plugins), "state": dict(state or {})}, indent=2) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise LayoutError(f"state must be what JSON can hold: {error}") from error


def read_meta(folder: Path) -> Mapping[str, Any]:
    """What `meta_bytes` wrote.

    Raises:
        LayoutError: the file is damaged.
    """
    file = folder / "meta.json"
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LayoutError(f"{file}: is no JSON: {error}") from error
    if not isinstance(meta, dict) or not {"step", "world_size", "state"} <= meta.keys():
        raise LayoutError(f"{file}: is no record of a checkpoint, which has step, world_size and state")
    return meta


def _warn_of_other_plugins(folder: Path, meta: Mapping[str, Any], plugins: Sequence[str]) -> None:
    saved, here = set(meta.get("plugins", ())), set(plugins)
    if saved and here and saved != here and world()[0] == 0:
        _log.warning(
            "%s: was saved with other plugins; only then: %s; only here: %s",
            folder,
            some(saved - here),
            some(here - saved),
        )


def _device_type(tensors: Mapping[str, Tensor]) -> str:
    return next((tensor.device.type for tensor in tensors.values()), "cpu")


def _same_keys_everywhere(tensors: Mapping[str, Tensor]) -> None:
    keys = [set(theirs) for theirs in gathered(sorted(tensors))]
    partly = set().union(*keys) - set.intersection(*keys)
    if partly:
        raise LayoutError(
            f"only some ranks hold {some(partly)}: every rank must give every parameter a gradient, zeros included, "
            "so that the optimizer has the same state everywhere"
        )


def rng_name(rank: int) -> str:
    return f"rng-{rank:05d}.pt"


# -- loading -----------------------------------------------------------------------------------------------


def _room(tensors: Mapping[str, Tensor], stored: Metadata) -> dict[str, Tensor]:
    """The model's tensors under their stored keys, if the checkpoint has exactly these, in these shapes."""
    room = {f"{MODEL}{name}": tensor for name, tensor in tensors.items()}
    shapes = {key: tuple(item.size) for key, item in stored_tensors(stored, MODEL).items()}
    missing, unused = room.keys() - shapes.keys(), shapes.keys() - room.keys()
    wrong = {
        f"{key} is {shapes[key]}, the model's is {tuple(room[key].shape)}"
        for key in room.keys() & shapes.keys()
        if shapes[key] != tuple(room[key].shape)
    }
    found = {"not in the checkpoint": missing, "not in the model": unused, "shapes differ": wrong}
    problems = [f"{what}: {some(names)}" for what, names in found.items() if names]
    if problems:
        raise LayoutError("the checkpoint does not fit the model; " + "; ".join(problems))
    return room


def _refuse_unused(folder: Path, room: Mapping[str, Tensor], stored: Metadata) -> None:
    unused = stored_tensors(stored, OPTIMIZER).keys() - room.keys()
    if unused:
        raise LayoutError(f"{folder}: optimizer state that nothing uses: {some(unused)}")

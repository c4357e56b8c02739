"""torch.distributed.checkpoint as this package uses it: keys, an index that is read safely, errors by rank."""

import math
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckpt_layout._errors import LayoutError, PeerError
from ckpt_layout._shards import region_of, runs_length

MODEL, OPTIMIZER = "model/", "optimizer/"
"""What the keys of the model's tensors and of the optimizer's state begin with."""

_PLAIN = {
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.serialization", "_get_layout"),
}
"""What an index names beside dtypes and the dataclasses of torch's own module; none of it does anything."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in _PLAIN or (
            module == "torch.distributed.checkpoint.metadata" and isinstance(super().find_class(module, name), type)
        )
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise LayoutError(f"it names {module}.{name}, which no checkpoint has")


class Reader(FileSystemReader):
    """`FileSystemReader` for a folder that need not be trusted.

    Raises:
        LayoutError: the index is damaged, names anything but plain data, or files outside of the folder.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as stream:
                metadata = _Unpickler(stream).load()
        except LayoutError as error:
            raise LayoutError(f"{file}: {error}") from error
        except Exception as error:  # what unpickling raises depends on where the file is damaged
            raise LayoutError(f"{file}: is no whole index of a checkpoint: {error}") from error
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise LayoutError(f"{file}: is no index of a checkpoint")
        for stored in metadata.storage_data.values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise LayoutError(f"{file}: names {stored.relative_path!r}, which is no file in its folder")
        for key, item in stored_tensors(metadata).items():
            _check_stored(file, key, item)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _check_stored(file: Path, key: str, item: TensorStorageMetadata) -> None:
    """What it says of a tensor must be possible, and its chunks must be as many numbers as the tensor."""
    if not all(type(size) is int and size >= 0 for sizes in (item.size, *_sizes(item)) for size in sizes):
        raise LayoutError(f"{file}: says that {key} has the shape {tuple(item.size)}, in chunks of {_sizes(item)}")
    listed, whole = sum(map(math.prod, _sizes(item))), math.prod(item.size)
    if listed < whole:
        raise LayoutError(f"{file}: has only {listed} of the {whole} numbers of {key}")


def _sizes(item: TensorStorageMetadata) -> list[tuple[int, ...]]:
    return [tuple(chunk.sizes) for chunk in item.chunks]


def stored_tensors(metadata: Metadata, prefix: str = "") -> dict[str, TensorStorageMetadata]:
    """What the index says of the tensors whose keys begin with `prefix`, by key."""
    items = metadata.state_dict_metadata.items()
    return {key: item for key, item in items if key.startswith(prefix) and isinstance(item, TensorStorageMetadata)}


def refuse_what_dcp_mislabels(tensors: Mapping[str, Tensor]) -> None:
    """torch writes down an offset and a shape for each shard; they must be those of what the shard holds."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            continue
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        region = region_of(tensor)
        held = tuple(runs_length(runs) for runs in region)
        if 0 in held and 0 in shape:
            continue
        starts = tuple(runs[0].start for runs in region if runs)
        if held != tuple(shape) or starts != tuple(offset) or any(len(runs) > 1 for runs in region):
            raise LayoutError(
                f"{name} of shape {tuple(tensor.shape)}: torch.distributed.checkpoint would file this rank's shard "
                f"{region} under offset {tuple(offset)} and shape {tuple(shape)}; use sizes that divide evenly, or "
                "another number of shards"
            )


@contextmanager
def dcp_errors(what: str) -> Iterator[None]:
    """Raise a `PeerError` that names the ranks where torch raises a `BaseException`, which `except Exception` misses.

    It also warns of a save without process group even where that is asked for.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:
        failures = sorted(error.failures.items())
        if any(isinstance(cause, KeyboardInterrupt) for _, (cause, _) in failures):
            raise KeyboardInterrupt from error
        ranks = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in failures)
        raise PeerError(f"{what} failed on {ranks}") from error

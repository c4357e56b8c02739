"""Reading torch.distributed.checkpoint's files without running what may be hidden in their index, a pickle."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from ckpt_layout._errors import LayoutError

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
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

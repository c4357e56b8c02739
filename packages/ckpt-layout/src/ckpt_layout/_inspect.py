"""What a folder of weights holds, whether it is whole, and how two differ: either format as native tensors."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from ckpt_layout._checkpoint import read_meta, rng_name
from ckpt_layout._dcp import MODEL, Reader, dcp_errors, stored_tensors
from ckpt_layout._errors import LayoutError, some
from ckpt_layout._families import Family, resolve_family
from ckpt_layout._folders import latest_folder
from ckpt_layout._hf_folder import HfFolder
from ckpt_layout._layout import Piece, layouts, native_shapes, overlaps
from ckpt_layout._shards import full_runs, get_sharded_expert_range

_EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
"""What families call the number of experts in config.json."""

_STACK = re.compile(r"(^|\.)experts\.[^.]+$")


# -- native tensors by name, read one at a time ------------------------------------------------------------


class View(Protocol):
    """Native tensors by name."""

    @property
    def place(self) -> Path:
        """The folder that has the files."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Of the right shape and dtype, but without memory (on the meta device)."""
        ...

    def read(self, name: str) -> Tensor: ...


class DcpView:
    """The model's tensors of a checkpoint in torch.distributed.checkpoint's format."""

    def __init__(self, path: Path) -> None:
        folder = path if is_dcp(path) else latest_folder(path)
        if folder is None or not is_dcp(folder):
            raise LayoutError(f"{path}: holds no checkpoint: neither .metadata nor a file `latest` that names one")
        self.folder = self.place = folder
        self._reader = Reader(folder)
        stored = stored_tensors(self._reader.read_metadata())
        prefix = MODEL if any(key.startswith(MODEL) for key in stored) else ""
        self._keys = {key.removeprefix(prefix): key for key in stored if key.startswith(prefix)}
        self._infos = {
            name: _without_memory(folder, name, stored[key].size, stored[key].properties.dtype)
            for name, key in self._keys.items()
        }
        self.others = len(stored) - len(self._keys)

    def tensors(self) -> Mapping[str, Tensor]:
        return self._infos

    def read(self, name: str) -> Tensor:
        tensor = torch.empty_like(self._infos[name], device="cpu")
        with dcp_errors(f"reading {self.folder}"):
            dcp_load({self._keys[name]: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


class HfView:
    """A Hugging Face folder, put together as the family's native tensors."""

    def __init__(self, folder: HfFolder, family: Family) -> None:
        self.folder, self.family, self.place = folder, family, folder.path
        self._pieces: dict[str, list[Piece]] = {}
        self._infos: dict[str, Tensor] = {}
        for name, shape in native_shapes(family, folder.shapes()).items():
            way = next((w for w in layouts(family, name, shape) if {p.key for p in w} <= folder.keys()), None)
            if way is None:
                wanted = {piece.key for piece in layouts(family, name, shape)[0]}
                raise LayoutError(f"{folder.path}: {name} is not complete: no {some(wanted - folder.keys())}")
            self._pieces[name] = way
            self._infos[name] = _without_memory(folder.path, name, shape, folder.dtype(way[0].key))

    def tensors(self) -> Mapping[str, Tensor]:
        return self._infos

    def read(self, name: str) -> Tensor:
        tensor = torch.empty_like(self._infos[name], device="cpu")
        region = tuple(map(full_runs, tensor.shape))
        for piece in self._pieces[name]:
            for overlap in overlaps(tensor, region, piece):
                overlap.fill(self.folder.read(piece.key, overlap.disk, overlap.local))
        return tensor


def _without_memory(folder: Path, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    except (RuntimeError, TypeError) as error:
        told = str(error).splitlines()[0]
        raise LayoutError(f"{folder}: {name} is said to be {tuple(shape)} of {dtype}: {told}") from error


def is_dcp(path: Path) -> bool:
    return (path / ".metadata").is_file()


def is_hf(path: Path) -> bool:
    return any(path.glob("*.safetensors"))


def open_view(path: Path, family: str | Family | None = None) -> View:
    """The native tensors of a folder of either format.

    Raises:
        LayoutError: it is neither; its family is not known; experts or parts are missing.
    """
    if not path.is_dir():
        raise LayoutError(f"{path}: is no folder")
    if is_hf(path):
        folder = HfFolder(path)
        return HfView(folder, family_of(folder, family))
    return DcpView(path)


def family_of(folder: HfFolder, family: str | Family | None) -> Family:
    return resolve_family(family, folder.config(), folder.path / "config.json")


# -- the jobs of the command -------------------------------------------------------------------------------


def ranges(num_experts: int, ranks: int) -> Iterator[str]:
    """A table: which experts each rank of `Shard(0)` holds."""
    table = [get_sharded_expert_range(num_experts, ranks, rank) for rank in range(max(ranks, 1))]
    yield "rank  experts  first:end"
    for rank, held in enumerate(table):
        yield f"{rank:4}  {len(held):7}  " + (f"{held.start}:{held.stop}" if held else "none")


def describe(path: Path, family: str | None = None) -> Iterator[str]:
    """Format, family, sizes, dtypes, the experts of each layer, and which are missing."""
    if is_hf(path):
        folder = HfFolder(path)
        yield f"{path}: Hugging Face folder, model_type {folder.config().get('model_type')!r}"
        missing = list(missing_experts(folder))
        if missing:
            yield from missing
            return
        view: View = HfView(folder, row := family_of(folder, family))
        yield f"family {row.name}, {len(folder.keys())} tensors in files"
    else:
        view = dcp = DcpView(path)
        meta = _meta(dcp.folder)
        yield f"{dcp.folder}: torch.distributed.checkpoint, step {meta.get('step')}, {meta.get('world_size')} ranks"
        yield f"{dcp.others} tensors of the optimizer; plugins: {', '.join(meta.get('plugins', ())) or 'not stored'}"
    infos = view.tensors()
    yield f"{len(infos)} native tensors, {_size(sum(info.nbytes for info in infos.values()))}"
    by_dtype: dict[str, list[Tensor]] = defaultdict(list)
    for info in infos.values():
        by_dtype[str(info.dtype).removeprefix("torch.")].append(info)
    for dtype, those in sorted(by_dtype.items()):
        yield f"  {dtype}: {len(those)} tensors, {_size(sum(info.nbytes for info in those))}"
    for name, info in infos.items():
        if _STACK.search(name) and len(info.shape) > 1:
            yield f"  {name}: experts 0:{info.shape[0]} of {tuple(info.shape[1:])}, none missing"


def missing_experts(folder: HfFolder) -> Iterator[str]:
    """A line for each stack of per-expert tensors in which ids are missing."""
    ids: dict[tuple[str, str], set[int]] = defaultdict(set)
    for key in folder.keys():  # noqa: SIM118 - the folder is no dict, and cannot be iterated
        found = re.fullmatch(r"(.*\bexperts)\.(\d+)\.(.+)", key)
        if found:
            ids[found[1], found[3]].add(int(found[2]))
    told = [folder.config().get(name) for name in _EXPERT_COUNTS]
    count = max([n for n in told if isinstance(n, int)] + [max(those) + 1 for those in ids.values()], default=0)
    for (prefix, suffix), those in sorted(ids.items()):
        gone = sorted(set(range(count)) - those)
        if gone:
            yield f"{prefix}.*.{suffix}: {len(those)} of {count} experts; missing: {', '.join(map(str, gone))}"


def problems(path: Path, family: str | None = None) -> Iterator[str]:
    """Read everything; a line for each thing that is wrong."""
    try:
        if is_hf(path) and (missing := list(missing_experts(HfFolder(path)))):
            yield from missing
            return
        view = open_view(path, family)
        if isinstance(view, DcpView):
            yield from _problems_beside(view.folder)
    except (LayoutError, OSError) as error:
        yield str(error)
        return
    for name in view.tensors():
        try:
            tensor = view.read(name)
        except Exception as error:  # what reading damaged files raises depends on the format
            yield f"{name}: cannot be read: {error}"
            continue
        if tensor.is_floating_point() and not tensor.float().isfinite().all():
            yield f"{name}: holds values that are not finite"


def _problems_beside(folder: Path) -> Iterator[str]:
    meta = _meta(folder)
    if not meta:
        yield f"{folder / 'meta.json'}: is missing, or damaged"
        return
    try:
        torch.load(folder / "host.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        yield f"{folder / 'host.pt'}: cannot be read: {error}"
    for rank in range(meta["world_size"]):
        if not (folder / rng_name(rank)).is_file():
            yield f"{folder}: the generators of rank {rank} are missing"


def differences(a: Path, b: Path, family: str | None = None) -> Iterator[str]:
    """A line for each native tensor that differs: by how much at most, and in which experts."""
    one, two = open_view(a, family), open_view(b, family)
    mine, theirs = one.tensors(), two.tensors()
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if name not in theirs or name not in mine:
            yield f"{name}: only in {a if name in mine else b}"
        elif mine[name].shape != theirs[name].shape:
            yield f"{name}: {tuple(mine[name].shape)} and {tuple(theirs[name].shape)}"
        else:
            if mine[name].dtype != theirs[name].dtype:
                yield f"{name}: {mine[name].dtype} and {theirs[name].dtype}"
            yield from _by_expert(name, one.read(name), two.read(name))


def _by_expert(name: str, one: Tensor, two: Tensor) -> Iterator[str]:
    gap = _gap(one, two)
    if gap == 0.0:
        return
    if _STACK.search(name) and one.dim() > 1:
        gaps = {e: _gap(one[e], two[e]) for e in range(len(one))}
        worst = [f"{e}: {value:.3g}" for e, value in gaps.items() if value != 0.0]
        yield f"{name}: max difference {gap:.3g}; by expert {', '.join(worst)}"
    else:
        yield f"{name}: max difference {gap:.3g}"


def _gap(one: Tensor, two: Tensor) -> float:
    """The largest difference; infinite where only one is NaN."""
    if torch.equal(one, two) or one.numel() == 0:
        return 0.0
    one, two = one.double(), two.double()
    apart = (one - two).abs()
    apart = torch.where((one == two) | (one.isnan() & two.isnan()), torch.zeros_like(apart), apart)
    return float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _meta(folder: Path) -> Mapping[str, Any]:
    try:
        return read_meta(folder)
    except (OSError, LayoutError):
        return {}


def _size(count: int) -> str:
    units: Sequence[str] = ("B", "kB", "MB", "GB", "TB")
    power = min(len(units) - 1, int(math.log10(count) // 3)) if count else 0
    return f"{count / 1000**power:.4g} {units[power]}"

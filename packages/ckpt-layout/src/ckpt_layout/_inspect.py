"""What a folder of weights holds, whether it is whole, and how two differ: the jobs of the command, as functions."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_layout._errors import LayoutError
from ckpt_layout._families import Family
from ckpt_layout._hf_folder import HfFolder
from ckpt_layout._hf_load import resolve_family
from ckpt_layout._ranges import get_sharded_expert_range
from ckpt_layout._views import DcpView, HfView, TensorInfo, View, is_hf

_EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
"""What families call the number of experts in config.json."""

_STACK = re.compile(r"(^|\.)experts\.[^.]+$")


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
    yield f"{len(infos)} native tensors, {_size(sum(info.bytes for info in infos.values()))}"
    by_dtype: dict[str, list[TensorInfo]] = defaultdict(list)
    for info in infos.values():
        by_dtype[str(info.dtype).removeprefix("torch.")].append(info)
    for dtype, those in sorted(by_dtype.items()):
        yield f"  {dtype}: {len(those)} tensors, {_size(sum(info.bytes for info in those))}"
    for name, info in infos.items():
        if _STACK.search(name) and len(info.shape) > 1:
            yield f"  {name}: experts 0:{info.shape[0]} of {info.shape[1:]}, none missing"


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
        yield f"{folder / 'meta.json'}: is missing, or no JSON"
        return
    try:
        torch.load(folder / "host.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        yield f"{folder / 'host.pt'}: cannot be read: {error}"
    for rank in range(meta["world_size"]):
        if not (folder / f"rng-{rank:05d}.pt").is_file():
            yield f"{folder}: the generators of rank {rank} are missing"


def differences(a: Path, b: Path, family: str | None = None) -> Iterator[str]:
    """A line for each native tensor that differs: by how much at most, and in which experts."""
    one, two = open_view(a, family), open_view(b, family)
    mine, theirs = one.tensors(), two.tensors()
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if name not in theirs or name not in mine:
            yield f"{name}: only in {a if name in mine else b}"
        elif mine[name].shape != theirs[name].shape:
            yield f"{name}: {mine[name].shape} and {theirs[name].shape}"
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


def _meta(folder: Path) -> dict[str, Any]:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return meta if isinstance(meta, dict) else {}


def _size(count: int) -> str:
    units: Sequence[str] = ("B", "kB", "MB", "GB", "TB")
    power = min(len(units) - 1, int(math.log10(count) // 3)) if count else 0
    return f"{count / 1000**power:.4g} {units[power]}"

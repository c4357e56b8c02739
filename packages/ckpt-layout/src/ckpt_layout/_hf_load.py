"""`load_hf`: a Hugging Face folder into a model, each rank reading what it holds."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_layout._errors import LayoutError
from ckpt_layout._families import Family, families
from ckpt_layout._hf_folder import HfFolder, some
from ckpt_layout._model_tensors import model_tensors, without_ties
from ckpt_layout._pieces import Piece, check_parts, layouts, overlaps
from ckpt_layout._region import local_of, region_of
from ckpt_layout._together import together

_log = logging.getLogger(__name__)


def load_hf(model: nn.Module, path: str | Path, family: Family | str | None = None) -> None:
    """Fill every parameter and persistent buffer of `model` from a folder of safetensors files.

    Each rank reads only the bytes of its own shards, straight into them, under any layout; values take the
    dtype of the model's tensors (fp32 ones stay fp32). Experts may be one tensor each on disk or stacked. All
    ranks must call, and see the folder.

    Args:
        model: on its device; sharded or not.
        path: a folder with model.safetensors, or with an index and its files.
        family: a `Family`, or the name of one; None: by `model_type` in config.json.

    Raises:
        LayoutError: a ValueError, before anything is changed: keys on disk that nothing uses, tensors that
            nothing fills (both listed), shapes that differ, an unknown family, a damaged folder.
    """
    with together("reading the folder"):
        folder = HfFolder(path)
        row = resolve_family(family, folder.config(), folder.path / "config.json")
        tensors = model_tensors(model)
        _refuse_meta(tensors)
        regions = {name: region_of(tensor) for name, tensor in tensors.items()}
        plan = _plan(tensors, folder, row)
    with together("reading the tensors"), torch.no_grad():
        for name, pieces in plan.items():
            local = local_of(tensors[name])
            for piece in pieces:
                for overlap in overlaps(local, regions[name], piece):
                    overlap.fill(folder.read(piece.key, overlap.disk, overlap.local))


def resolve_family(family: Family | str | None, config: Mapping[str, Any], where: object) -> Family:
    """The family given, or that of the config's model type, with what it takes from the config; `where` is named
    in the error."""
    if isinstance(family, Family):
        return family.with_config(config)
    known = families()
    if family is not None:
        if family not in known:
            raise LayoutError(f"family = {family!r}: must be one of {', '.join(sorted(known))}, or a Family")
        return known[family].with_config(config)
    model_type = config.get("model_type")
    for row in known.values():
        if model_type in row.model_types:
            return row.with_config(config)
    raise LayoutError(
        f"{where}: model_type = {model_type!r} is of no known family ({', '.join(sorted(known))}): pass family="
    )


def _refuse_meta(tensors: dict[str, Tensor]) -> None:
    meta = {name for name, tensor in tensors.items() if tensor.is_meta}
    if meta:
        raise LayoutError(f"on the meta device: {some(meta)}; give them memory first (model.to_empty(device=...))")


def _plan(tensors: dict[str, Tensor], folder: HfFolder, family: Family) -> dict[str, list[Piece]]:
    """The pieces that fill each native tensor; an error unless all keys and all tensors are accounted for."""
    on_disk = folder.keys()
    plan: dict[str, list[Piece]] = {}
    unfilled: dict[str, set[str]] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        ways = layouts(family, name, tensor.shape)
        pieces = max(ways, key=lambda way: sum(piece.key in on_disk for piece in way) / len(way))
        keys = {piece.key for piece in pieces}
        used |= keys
        missing = keys - on_disk
        if missing:
            unfilled[name] = missing
        else:
            plan[name] = pieces
    filled = {id(tensors[name]) for name in plan}
    unfilled = {name: missing for name, missing in unfilled.items() if id(tensors[name]) not in filled}
    unused = on_disk - used
    ignored = {key for key in unused if any(key.endswith(end) for end in family.ignore)}
    if ignored:
        _log.info("%s: ignored, as the model computes them: %s", folder.path, some(ignored))
    _report(folder, family, unused - ignored, unfilled)
    check_parts((name, piece) for name in without_ties(tensors) if name in plan for piece in plan[name])
    _check_shapes(folder, plan)
    return plan


def _report(folder: HfFolder, family: Family, unused: set[str], unfilled: dict[str, set[str]]) -> None:
    if not unused and not unfilled:
        return
    lines = [f"{folder.path} does not fit the model (family {family.name}):"]
    if unfilled:
        missing = {f"{name} (no {some(keys, 3)})" for name, keys in unfilled.items()}
        lines.append(f"tensors that nothing fills: {some(missing)}")
    if unused:
        lines.append(f"keys that nothing uses: {some(unused)}")
    raise LayoutError("\n  ".join(lines))


def _check_shapes(folder: HfFolder, plan: dict[str, list[Piece]]) -> None:
    wrong = {
        f"{piece.key} is {folder.shape(piece.key)}, {name} needs {piece.shape}"
        for name, pieces in plan.items()
        for piece in pieces
        if folder.shape(piece.key) != piece.shape
    }
    if wrong:
        raise LayoutError(f"{folder.path}: shapes differ: {some(wrong)}")

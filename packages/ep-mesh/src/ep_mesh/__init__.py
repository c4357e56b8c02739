"""Parallel degrees to a validated DeviceMesh in which expert parallelism is carved out of the data-parallel shards.

The degrees and the rank table need no torch, so names are looked up on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ep_mesh._layout import MeshConfig as MeshConfig
    from ep_mesh._layout import MeshConfigError as MeshConfigError
    from ep_mesh._layout import RankRow as RankRow
    from ep_mesh._layout import rank_table as rank_table
    from ep_mesh._mesh import build_mesh as build_mesh
    from ep_mesh._mesh import resolve_sub_mesh as resolve_sub_mesh

_HOME = {
    "MeshConfig": "ep_mesh._layout",
    "MeshConfigError": "ep_mesh._layout",
    "RankRow": "ep_mesh._layout",
    "build_mesh": "ep_mesh._mesh",
    "rank_table": "ep_mesh._layout",
    "resolve_sub_mesh": "ep_mesh._mesh",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

"""Who holds which expert; Hugging Face to native and back; checkpoints that outlive a change of layout."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_layout._checkpoint import BackgroundSaves as BackgroundSaves
    from ckpt_layout._checkpoint import load_checkpoint as load_checkpoint
    from ckpt_layout._checkpoint import save_checkpoint as save_checkpoint
    from ckpt_layout._errors import LayoutError as LayoutError
    from ckpt_layout._errors import PeerError as PeerError
    from ckpt_layout._errors import ReplicaMismatchError as ReplicaMismatchError
    from ckpt_layout._families import Family as Family
    from ckpt_layout._families import Rule as Rule
    from ckpt_layout._families import families as families
    from ckpt_layout._hf import load_hf as load_hf
    from ckpt_layout._hf import save_hf as save_hf
    from ckpt_layout._layout import Block as Block
    from ckpt_layout._layout import hf_blocks as hf_blocks
    from ckpt_layout._ranks import assert_replicated as assert_replicated
    from ckpt_layout._shards import balanced_expert_range as balanced_expert_range
    from ckpt_layout._shards import chunk_range as chunk_range
    from ckpt_layout._shards import expert_range as expert_range
    from ckpt_layout._shards import get_sharded_expert_range as get_sharded_expert_range
    from ckpt_layout._shards import local_blocks as local_blocks
    from ckpt_layout._shards import split_experts as split_experts

_HOME = {
    "BackgroundSaves": "ckpt_layout._checkpoint",
    "Block": "ckpt_layout._layout",
    "Family": "ckpt_layout._families",
    "LayoutError": "ckpt_layout._errors",
    "PeerError": "ckpt_layout._errors",
    "ReplicaMismatchError": "ckpt_layout._errors",
    "Rule": "ckpt_layout._families",
    "assert_replicated": "ckpt_layout._ranks",
    "balanced_expert_range": "ckpt_layout._shards",
    "chunk_range": "ckpt_layout._shards",
    "expert_range": "ckpt_layout._shards",
    "families": "ckpt_layout._families",
    "get_sharded_expert_range": "ckpt_layout._shards",
    "hf_blocks": "ckpt_layout._layout",
    "load_checkpoint": "ckpt_layout._checkpoint",
    "load_hf": "ckpt_layout._hf",
    "local_blocks": "ckpt_layout._shards",
    "save_checkpoint": "ckpt_layout._checkpoint",
    "save_hf": "ckpt_layout._hf",
    "split_experts": "ckpt_layout._shards",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

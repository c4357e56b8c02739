"""The errors that name what a user has to mend, and how they list names; needs no torch."""

from collections.abc import Iterable


class LayoutError(ValueError):
    """A tensor, a folder or an argument does not have the layout that it must have."""


class ReplicaMismatchError(LayoutError):
    """Tensors that must be equal on several ranks are not."""


class PeerError(RuntimeError):
    """Another rank failed at what all ranks did together."""


def some(names: Iterable[str], most: int = 20) -> str:
    """The first of the sorted names, and how many more there are."""
    listed = sorted(set(names))
    shown = ", ".join(listed[:most]) or "none"
    return shown if len(listed) <= most else f"{shown}, and {len(listed) - most} more"

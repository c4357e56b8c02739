"""The errors that name what a user has to mend."""


class LayoutError(ValueError):
    """A tensor, a folder or an argument does not have the layout that it must have."""


class ReplicaMismatchError(LayoutError):
    """Tensors that must be equal on several ranks are not."""


class PeerError(RuntimeError):
    """Another rank failed at what all ranks did together."""

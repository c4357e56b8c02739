"""Autocast as the layers meet it: grouped products take no part in it, routers keep out of it."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast computes in on these devices; None where it is off or there is none."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """A block that autocast leaves alone."""
    return nullcontext() if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)

"""The machines that a plan is for, and how their numbers are written on the command line."""

import re
from typing import Any

import attrs

from nemotron_nano.planner._errors import PlanError

GIB = 2**30

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def _is_positive(_: object, attribute: "attrs.Attribute[Any]", value: float) -> None:
    if not value > 0:
        raise PlanError(attribute.name, value, "must be above 0")


@attrs.frozen(kw_only=True)
class Hardware:
    """GPUs all alike, in nodes all alike."""

    memory: float = attrs.field(default=80 * GIB, validator=_is_positive)
    """Bytes of one GPU's memory."""
    reserve: float = 2 * GIB
    """Bytes of it that driver, communicators and fragmentation take; a plan that needs them does not fit."""
    tflops: float = attrs.field(default=800.0, validator=_is_positive)
    """10^12 operations a second that one GPU reaches in large matrix products; MFU is relative to it."""
    intra: float = attrs.field(default=450e9, validator=_is_positive)
    """Bytes a second that one GPU sends to others of its node."""
    link: float = attrs.field(default=50e9, validator=_is_positive)
    """Bytes a second that one GPU sends to other nodes."""
    gpus_per_node: int = attrs.field(default=8, validator=_is_positive)


def parse_bytes(text: str) -> float:
    """ "80GiB", "300GB/s", "5e10" -> bytes (a second); G is 10^9, Gi is 2^30.

    Raises:
        PlanError: not a number with one of these units.
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]i?)?b?(?:/s)?", text.strip(), re.IGNORECASE)
    try:
        if match is not None:
            return float(match[1]) * _UNITS[(match[2] or "").upper()]
    except ValueError:
        pass
    raise PlanError("size", text, "must be a number of bytes, such as 80GiB or 300GB/s")

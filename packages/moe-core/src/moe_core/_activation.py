"""The experts' activation functions by name."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_core._row_invariance import elementwise

Activation = Callable[[Tensor], Tensor]


def relu2(rows: Tensor) -> Tensor:
    """max(x, 0)^2 (Primer)."""
    return F.relu(rows).square()


_EXACT: dict[str, Activation] = {"relu2": relu2, "relu": F.relu}
"""Made of operations that round correctly, so the same in vectors and alone."""

_BY_NAME: dict[str, Activation] = {
    **_EXACT,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}

ACTIVATIONS = tuple(_BY_NAME)


def resolve(activation: str | Activation) -> Activation:
    """The function that works on [R, F], by its name in `ACTIVATIONS` or as it is (elementwise)."""
    if isinstance(activation, str):
        if activation not in _BY_NAME:
            raise ValueError(f"activation = {activation!r}: must be a callable or one of {', '.join(ACTIVATIONS)}")
        if activation in _EXACT:
            return _EXACT[activation]
        activation = _BY_NAME[activation]
    return partial(elementwise, activation)

"""`compiled`: a loss with its numeric core, and nothing else, under torch.compile."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

LossT = TypeVar("LossT", bound=Callable)


def compiled(loss: LossT, **options: Any) -> LossT:
    """`loss` with only its arithmetic compiled; model, head and their collectives run as before.

    Args:
        loss: `clm_cross_entropy_loss`, `clm_cross_entropy_loss_sum` or any function on tensors, which is
            compiled as a whole; or a loss object with a method `compiled(compile_)`, as this package's have.
        options: for `torch.compile`.

    Raises:
        ValueError: an object that does not say what its core is.
    """
    compile_ = partial(torch.compile, **options)
    if hasattr(loss, "compiled"):
        return loss.compiled(compile_)
    if hasattr(loss, "__code__"):
        return compile_(loss)  # type: ignore[return-value]  # torch.compile keeps the signature
    raise ValueError(
        f"{type(loss).__name__} has no numeric core to compile: give a function on tensors, or an object with a method "
        "compiled(compile_) that returns a copy of it"
    )

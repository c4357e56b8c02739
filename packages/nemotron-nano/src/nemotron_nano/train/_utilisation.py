"""MFU: what share of a device's peak goes into the arithmetic of the model itself."""

from collections.abc import Sequence

from torch import nn

from moe_core.plugins import Batch


class UtilisationError(ValueError):
    """MFU is asked for, and the model does not say its FLOPs."""


class Utilisation:
    """Of one device.

    Args:
        model: with a method `flops_per_token(sequence_length)`: operations of forward and backward for one token.
        tflops: 10^12 operations a second that the device reaches in large matrix products.

    Raises:
        UtilisationError: the model has no such method.
    """

    def __init__(self, model: nn.Module, tflops: float) -> None:
        flops_per_token = getattr(model, "flops_per_token", None)
        if not callable(flops_per_token):
            raise UtilisationError(
                f"trainer.tflops = {tflops}: the model is a {type(model).__name__} and has no method "
                "flops_per_token(sequence_length) to compute MFU from; give it one, or leave trainer.tflops out"
            )
        self._flops_per_token = flops_per_token
        self._peak = tflops * 1e12

    def of_step(self, batches: Sequence[Batch], seconds: float) -> float:
        """1 where every operation of the peak was the model's; recomputation is none of them. Tokens whose labels are
        ignored count, since they are computed.
        """
        flops = sum(batch.tokens.numel() * self._flops_per_token(batch.tokens.shape[1]) for batch in batches)
        return flops / (seconds * self._peak)

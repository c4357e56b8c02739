"""What a step reports: the sums of all ranks, in one collective; the memory in use; and MFU."""

import resource
import sys
from collections.abc import Sequence

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moe_core.plugins import Batch, LossOutput


@attrs.frozen
class Totals:
    """Sums over ranks and microbatches."""

    tokens: int
    parts: dict[str, float]
    peak_memory_bytes: list[int]
    """By rank."""

    def mean(self, part: str) -> float:
        """Per valid token; 0 where there is none."""
        return self.parts[part] / self.tokens if self.tokens else 0.0


def sum_over_ranks(outputs: Sequence[LossOutput], dp_mesh: DeviceMesh, peak_memory: int) -> Totals:
    """Add up what the losses returned on every rank of `dp_mesh`; a loss has the same parts everywhere."""
    names = list(outputs[0].parts)
    rows = [[output.parts[name] for name in names] + [output.tokens] for output in outputs]
    mine = torch.stack([torch.stack([value.detach().double() for value in row]) for row in rows]).sum(0)
    mine = torch.cat([mine, mine.new_tensor([float(peak_memory)])])
    by_rank = [torch.empty_like(mine) for _ in range(dp_mesh.size())]
    dist.all_gather(by_rank, mine, group=dp_mesh.get_group())
    everyone = torch.stack(by_rank)
    *sums, tokens, _ = everyone.sum(0).tolist()
    memory = [int(value) for value in everyone[:, -1].tolist()]
    return Totals(int(tokens), dict(zip(names, sums, strict=True)), memory)


def peak_memory_bytes(device_type: str) -> int:
    """Most memory that this rank has used: of the accelerator, or on the CPU of the process."""
    if device_type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return torch.accelerator.max_memory_allocated()


class UtilisationError(ValueError):
    """MFU is asked for, and the model does not say its FLOPs."""


class Utilisation:
    """MFU: what share of one device's peak goes into the arithmetic of the model itself.

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

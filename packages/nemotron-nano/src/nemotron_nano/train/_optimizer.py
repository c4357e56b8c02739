"""AdamW over sharded parameters, and its learning-rate schedule."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from nemotron_nano.train.component import AdamWConfig


def adamw(model: nn.Module, config: "AdamWConfig") -> torch.optim.AdamW:
    """Parameters of two or more dims decay, vectors do not.

    DTensors and plain tensors go in groups of their own: batched kernels take DTensors of several meshes
    together, but not along with plain tensors.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault((parameter.ndim >= 2, isinstance(parameter, DTensor)), []).append(parameter)
    options: list[dict[str, Any]] = [
        {"params": groups[key], "weight_decay": config.weight_decay if key[0] else 0.0} for key in sorted(groups)
    ]
    return torch.optim.AdamW(options, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def warmup_cosine(
    optimizer: torch.optim.Optimizer, warmup_steps: int, decay_steps: int, floor: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """Step n (from 0) runs at (n+1)/warmup of the peak, then on a half cosine that ends at `floor`."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

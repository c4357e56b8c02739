"""The optimizer, scheduler and trainer components: config classes, which need no torch, and the factories of two."""

import math
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import validators

if TYPE_CHECKING:
    import torch
    from torch import nn

    from moe_core.plugins import Run

_fraction = validators.and_(validators.ge(0.0), validators.lt(1.0))


@attrs.frozen
class AdamWConfig:
    """`adamw`: decoupled weight decay on matrices, none on vectors."""

    lr: float = attrs.field(default=3e-3, validator=validators.gt(0))
    """Peak learning rate."""
    beta1: float = attrs.field(default=0.9, validator=_fraction)
    """Decay of the mean of gradients."""
    beta2: float = attrs.field(default=0.95, validator=_fraction)
    """Decay of the mean of squared gradients."""
    eps: float = attrs.field(default=1e-8, validator=validators.gt(0))
    """Added to the root of the second moment."""
    weight_decay: float = attrs.field(default=0.1, validator=validators.ge(0))
    """Per unit of learning rate; for parameters of two or more dims."""


def build_adamw(config: AdamWConfig, run: "Run") -> "torch.optim.Optimizer":
    return adamw(run.model, config)


def adamw(model: "nn.Module", config: AdamWConfig) -> "torch.optim.AdamW":
    """Parameters of two or more dims decay, vectors do not.

    DTensors and plain tensors go in groups of their own: batched kernels take DTensors of several meshes
    together, but not along with plain tensors.
    """
    import torch
    from torch.distributed.tensor import DTensor

    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault((parameter.ndim >= 2, isinstance(parameter, DTensor)), []).append(parameter)
    options: list[dict[str, Any]] = [
        {"params": groups[key], "weight_decay": config.weight_decay if key[0] else 0.0} for key in sorted(groups)
    ]
    return torch.optim.AdamW(options, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


@attrs.frozen
class WarmupCosineConfig:
    """`warmup_cosine`: linear from 0 to the peak, then half a cosine down."""

    warmup_steps: int = attrs.field(default=10, validator=validators.ge(0))
    """Steps of the linear part."""
    decay_steps: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    """Step at which the floor is reached. Left out: `run.steps`."""
    floor: float = attrs.field(default=0.1, validator=validators.and_(validators.ge(0.0), validators.le(1.0)))
    """The last learning rate, as a share of the peak."""


def build_warmup_cosine(config: WarmupCosineConfig, run: "Run") -> "torch.optim.lr_scheduler.LRScheduler":
    decay_steps = run.config.run.steps if config.decay_steps is None else config.decay_steps
    return warmup_cosine(run.optimizer, config.warmup_steps, max(decay_steps, 1), config.floor)


def warmup_cosine(
    optimizer: "torch.optim.Optimizer", warmup_steps: int, decay_steps: int, floor: float
) -> "torch.optim.lr_scheduler.LambdaLR":
    """Step n (from 0) runs at (n+1)/warmup of the peak, then on a half cosine that ends at `floor`."""
    from torch.optim.lr_scheduler import LambdaLR

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)


@attrs.frozen
class PretrainConfig:
    """`pretrain`: next-token training with validation and checkpoints."""

    evaluate_every: int = attrs.field(default=0, validator=validators.ge(0))
    """Steps between validations. 0: only after the last step."""
    checkpoint_every: int = attrs.field(default=0, validator=validators.ge(0))
    """Steps between checkpoints. 0: only after the last step."""
    router_bias_rate: float = attrs.field(default=1e-3, validator=validators.ge(0))
    """How far one step moves a router's selection bias towards an even load. 0: no balancing."""
    router_bias_rule: Literal["sign", "proportional"] = "sign"
    """Whether it moves by the whole rate, or by as much of it as the load is off its mean."""
    tflops: float | None = attrs.field(default=None, validator=validators.optional(validators.gt(0)))
    """10^12 operations a second that one device reaches; each step then reports its MFU, relative to that."""

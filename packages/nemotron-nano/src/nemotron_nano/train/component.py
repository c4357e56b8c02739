"""The optimizer, scheduler and trainer components: config classes, which need no torch, and their factories."""

from typing import TYPE_CHECKING

import attrs
from attrs import validators

if TYPE_CHECKING:
    import torch

    from moe_core.plugins import Run
    from moe_core.plugins.kinds import Trainer


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


@attrs.frozen
class WarmupCosineConfig:
    """`warmup_cosine`: linear from 0 to the peak, then half a cosine down."""

    warmup_steps: int = attrs.field(default=10, validator=validators.ge(0))
    """Steps of the linear part."""
    decay_steps: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    """Step at which the floor is reached. Left out: `run.steps`."""
    floor: float = attrs.field(default=0.1, validator=validators.and_(validators.ge(0.0), validators.le(1.0)))
    """The last learning rate, as a share of the peak."""


@attrs.frozen
class PretrainConfig:
    """`pretrain`: next-token training with validation and checkpoints."""

    evaluate_every: int = attrs.field(default=0, validator=validators.ge(0))
    """Steps between validations. 0: only after the last step."""
    checkpoint_every: int = attrs.field(default=0, validator=validators.ge(0))
    """Steps between checkpoints. 0: only after the last step."""
    router_bias_rate: float = attrs.field(default=1e-3, validator=validators.ge(0))
    """How far one step moves a router's selection bias towards an even load. 0: no balancing."""
    tflops: float | None = attrs.field(default=None, validator=validators.optional(validators.gt(0)))
    """10^12 operations a second that one device reaches; each step then reports its MFU, relative to that."""


def build_adamw(config: AdamWConfig, run: "Run") -> "torch.optim.Optimizer":
    from nemotron_nano.train._optimizer import adamw

    return adamw(run.model, config)


def build_warmup_cosine(config: WarmupCosineConfig, run: "Run") -> "torch.optim.lr_scheduler.LRScheduler":
    from nemotron_nano.train._optimizer import warmup_cosine

    decay_steps = run.config.run.steps if config.decay_steps is None else config.decay_steps
    return warmup_cosine(run.optimizer, config.warmup_steps, max(decay_steps, 1), config.floor)


def build_pretrain(config: PretrainConfig, run: "Run") -> "Trainer":
    from nemotron_nano.train._pretrain import Pretrain

    return Pretrain(config)

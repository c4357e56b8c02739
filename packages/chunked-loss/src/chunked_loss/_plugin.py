"""The components that chunked-loss registers with the plugin host."""

from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators

from moe_core.plugins import Batch, Component, LossOutput, Selected, component_field, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from moe_core.plugins import Run


_share = validators.and_(validators.ge(0.0), validators.le(1.0))
_positive = validators.gt(0)
_positive_or_none = validators.optional(_positive)


@attrs.frozen
class CLMCrossEntropyConfig:
    """Cross entropy on full logits [B, S, V]."""

    label_smoothing: float = attrs.field(default=0.0, validator=_share)
    """Share of the target that is spread over the vocabulary, 0 to 1."""
    z_loss: float = attrs.field(default=0.0, validator=validators.ge(0))
    """Coefficient of logsumexp(logits)^2 per token."""


@attrs.frozen
class ChunkedCLMCrossEntropyConfig:
    """Cross entropy from hidden states and the head module, without full logits."""

    chunk_tokens: int = attrs.field(default=512, validator=_positive)
    """How many tokens' logits are held at once."""
    num_chunks: int | None = attrs.field(default=None, validator=_positive_or_none)
    """The number of chunks, instead of `chunk_tokens`."""
    label_smoothing: float = attrs.field(default=0.0, validator=_share)
    """Share of the target that is spread over the vocabulary, 0 to 1."""
    z_loss: float = attrs.field(default=0.0, validator=validators.ge(0))
    """Coefficient of logsumexp(logits)^2 per token."""
    softcap: float | None = attrs.field(default=None, validator=_positive_or_none)
    """Logits become softcap * tanh(logits / softcap); unset: no cap."""
    vocab_size: int | None = attrs.field(default=None, validator=_positive_or_none)
    """The head's rows past it are padding of the vocabulary; unset: all rows are classes."""
    head: str = "lm_head"
    """Name of the model's output projection; under FSDP it must be a unit of its own."""
    skip_head: bool = False
    """For models without `return_hidden`, such as transformers': run them with the head left out."""
    keep_head_unsharded: bool = False
    """Under FSDP and accumulation, gather the head once a step instead of once a microbatch, and hold it."""


@attrs.frozen
class CompiledLossConfig:
    """Another loss, with its arithmetic under torch.compile."""

    inner: Selected | None = component_field("loss")
    """The loss to compile, as a sub-table `[loss.inner]`."""
    backend: str = "inductor"
    """torch.compile's backend."""


@attrs.frozen
class _HostLoss:
    """A loss of this package with the host's result type."""

    loss: "Callable[..., Any]"

    def __call__(self, model: "nn.Module", batch: Batch) -> LossOutput:
        return LossOutput(*self.loss(model, batch))

    def compiled(self, compile_: "Callable[[Callable], Callable]") -> "_HostLoss":
        return _HostLoss(self.loss.compiled(compile_))  # type: ignore[attr-defined]  # both losses have it


def build_clm_cross_entropy(config: CLMCrossEntropyConfig, run: "Run") -> _HostLoss:
    from chunked_loss._clm import CLMCrossEntropyLoss

    return _HostLoss(CLMCrossEntropyLoss(**attrs.asdict(config)))


def build_chunked_clm_cross_entropy(config: ChunkedCLMCrossEntropyConfig, run: "Run") -> _HostLoss:
    from chunked_loss._clm import ChunkedCLMCrossEntropyLoss

    loss = ChunkedCLMCrossEntropyLoss(**attrs.asdict(config))
    loss.check_head(run.model)
    return _HostLoss(loss)


def build_compiled(config: CompiledLossConfig, run: "Run") -> Any:
    from chunked_loss._clm import compiled

    if config.inner is None:
        raise ValueError('loss.inner: must name the loss to compile, e.g. [loss.inner] type = "clm_cross_entropy"')
    return compiled(config.inner.build(run), backend=config.backend)


@hookimpl
def moe_components() -> list[Component]:
    here = "chunked_loss._plugin:"
    return [
        Component("loss", "clm_cross_entropy", f"{here}CLMCrossEntropyConfig", f"{here}build_clm_cross_entropy"),
        Component(
            "loss",
            "chunked_clm_cross_entropy",
            f"{here}ChunkedCLMCrossEntropyConfig",
            f"{here}build_chunked_clm_cross_entropy",
        ),
        Component("loss", "compiled", f"{here}CompiledLossConfig", f"{here}build_compiled"),
    ]

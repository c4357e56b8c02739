"""The components that chunked-loss registers with the plugin host."""

from typing import TYPE_CHECKING, Any

import attrs

from moe_core.plugins import Batch, Component, LossOutput, Selected, component_field, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from moe_core.plugins import Run


def _at_least_zero(_: Any, attribute: Any, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{attribute.name} = {value}: must be at least 0")


def _is_share(_: Any, attribute: Any, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{attribute.name} = {value}: must be between 0 and 1")


def _is_positive(_: Any, attribute: Any, value: Any) -> None:
    if not value > 0:
        raise ValueError(f"{attribute.name} = {value}: must be above 0")


@attrs.frozen
class CLMCrossEntropyConfig:
    """Cross entropy on full logits [B, S, V]."""

    label_smoothing: float = attrs.field(default=0.0, validator=_is_share)
    """Share of the target that is spread over the vocabulary, 0 to 1."""
    z_loss: float = attrs.field(default=0.0, validator=_at_least_zero)
    """Coefficient of logsumexp(logits)^2 per token."""


@attrs.frozen
class ChunkedCLMCrossEntropyConfig:
    """Cross entropy from hidden states and the head module, without full logits."""

    chunk_tokens: int = attrs.field(default=512, validator=_is_positive)
    """How many tokens' logits are held at once."""
    num_chunks: int | None = attrs.field(default=None, validator=attrs.validators.optional(_is_positive))
    """The number of chunks, instead of `chunk_tokens`."""
    label_smoothing: float = attrs.field(default=0.0, validator=_is_share)
    """Share of the target that is spread over the vocabulary, 0 to 1."""
    z_loss: float = attrs.field(default=0.0, validator=_at_least_zero)
    """Coefficient of logsumexp(logits)^2 per token."""
    softcap: float | None = attrs.field(default=None, validator=attrs.validators.optional(_is_positive))
    """Logits become softcap * tanh(logits / softcap); unset: no cap."""
    vocab_size: int | None = attrs.field(default=None, validator=attrs.validators.optional(_is_positive))
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

    return _HostLoss(CLMCrossEntropyLoss(label_smoothing=config.label_smoothing, z_loss=config.z_loss))


def build_chunked_clm_cross_entropy(config: ChunkedCLMCrossEntropyConfig, run: "Run") -> _HostLoss:
    from chunked_loss._clm import ChunkedCLMCrossEntropyLoss

    return _HostLoss(
        ChunkedCLMCrossEntropyLoss(
            chunk_tokens=config.chunk_tokens,
            num_chunks=config.num_chunks,
            label_smoothing=config.label_smoothing,
            z_loss=config.z_loss,
            softcap=config.softcap,
            vocab_size=config.vocab_size,
            head=config.head,
            skip_head=config.skip_head,
            keep_head_unsharded=config.keep_head_unsharded,
        )
    )


def build_compiled(config: CompiledLossConfig, run: "Run") -> Any:
    from chunked_loss._compiled import compiled

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

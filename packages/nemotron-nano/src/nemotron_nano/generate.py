"""Text from a model, one token at a time, each at the cost of one token."""

from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Generator, Tensor

from nemotron_nano.model import LayerState, NemotronNano


@overload
def generate(
    model: NemotronNano,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: Generator | None = None,
) -> Tensor: ...


@overload
def generate(
    model: NemotronNano,
    tokens: Sequence[Tensor],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: Generator | None = None,
) -> list[Tensor]: ...


def generate(
    model: NemotronNano,
    tokens: Tensor | Sequence[Tensor],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: Generator | None = None,
) -> Tensor | list[Tensor]:
    """Continue each row of `tokens` [B, S] int64: [B, S + max_new_tokens].

    Args:
        tokens: or a sequence of prompts [S_b], which may differ in length: a list of [S_b + max_new_tokens] then.
        temperature: 0 takes the likeliest token; above it, tokens are drawn from softmax(logits / temperature).
        top_p: draw only among the likeliest tokens that together have this probability (at least one).
        generator: what draws, on the device of `tokens`; None: torch's global one.

    Raises:
        ValueError: no token to start from, or a setting out of range.
    """
    if not isinstance(tokens, Tensor):
        return _continue_prompts(model, tokens, max_new_tokens, temperature, top_p, generator)
    stream = generate_stream(model, tokens, max_new_tokens, temperature=temperature, top_p=top_p, generator=generator)
    return torch.cat([tokens, *(new.unsqueeze(1) for new in stream)], dim=1)


def _continue_prompts(
    model: NemotronNano,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    generator: Generator | None,
) -> list[Tensor]:
    """All start together, so that no row ever meets padding, which a recurrence could not forget.

    Past the end of the shortest prompt the longer ones give their own tokens, step by step, instead of chosen ones.
    """
    for prompt in prompts:
        _check(prompt.unsqueeze(0) if isinstance(prompt, Tensor) else prompt, max_new_tokens, temperature, top_p)
    if not prompts:
        return []
    rows = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True)
    rows = torch.nn.functional.pad(rows, (0, max_new_tokens))
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=rows.device)
    shortest = min(len(prompt) for prompt in prompts)
    cache, piece = model.new_cache(), rows[:, :shortest]
    for end in range(shortest, rows.shape[1] if max_new_tokens else 0):
        chosen = _choose(_next_logits(model, piece, cache), temperature, top_p, generator)
        rows[:, end] = torch.where(lengths > end, rows[:, end], chosen)
        piece = rows[:, end : end + 1]
    return [row[: len(prompt) + max_new_tokens] for row, prompt in zip(rows, prompts, strict=True)]


def generate_stream(
    model: NemotronNano,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: Generator | None = None,
) -> Iterator[Tensor]:
    """As `generate`, but yields the new tokens [B] of each step as soon as they are known."""
    _check(tokens, max_new_tokens, temperature, top_p)
    return _steps(model, tokens, max_new_tokens, temperature, top_p, generator)


def _steps(
    model: NemotronNano,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    generator: Generator | None,
) -> Iterator[Tensor]:
    cache = model.new_cache()
    for _ in range(max_new_tokens):
        logits = _next_logits(model, tokens, cache)
        tokens = _choose(logits, temperature, top_p, generator).unsqueeze(1)
        yield tokens.squeeze(1)


@torch.no_grad()
def _next_logits(model: NemotronNano, tokens: Tensor, cache: list[LayerState]) -> Tensor:
    """The logits [B, V] after `tokens`, which the cache then holds too."""
    was_training = model.training
    model.eval()  # routers count no loads
    try:
        return model(tokens, cache=cache)[:, -1]
    finally:
        model.train(was_training)


def _choose(logits: Tensor, temperature: float, top_p: float, generator: Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    probabilities, order = (logits / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.masked_fill(before >= top_p, 0.0)
    kept[:, 0] = probabilities[:, 0]
    return order.gather(1, torch.multinomial(kept, 1, generator=generator)).squeeze(1)


def _check(tokens: object, max_new_tokens: int, temperature: float, top_p: float) -> None:
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.shape[1] == 0:
        shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(
            f"tokens = {shape}: must be a tensor [B, S] of prompts of one length, at least 1, or for `generate` "
            "a sequence of prompts [S]"
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens}: must not be negative")
    if not temperature >= 0:
        raise ValueError(f"temperature = {temperature}: must not be negative")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p}: must be above 0 and at most 1")

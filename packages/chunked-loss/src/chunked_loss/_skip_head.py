"""`skip_lm_head`: the hidden states of any model that would return logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from chunked_loss._head_call import find_head


class SkippedHead(nn.Module):
    """Stands where the head was: hands its input on, and remembers it."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head  # a submodule still, so that what walks over the model, like FSDP's set-up, meets it
        self._hidden: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """[..., D]: what the head was given in the model's last call.

        Raises:
            RuntimeError: the model has not called its head.
        """
        if self._hidden is None:
            raise RuntimeError("the model has not called its head inside `with skip_lm_head(model)`")
        return self._hidden

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._hidden = hidden
        return hidden


@contextmanager
def skip_lm_head(model: nn.Module, head: str = "lm_head") -> Iterator[SkippedHead]:
    """Inside the block, `model` gives out what it would give its head: no logits are formed, no hook of it runs.

        with skip_lm_head(model) as skipped:
            model(tokens)
        loss = linear_cross_entropy(skipped.hidden, model.lm_head.weight, labels)

    What the model does with its logits afterwards (a cap, a scale) happens to its output, not to `skipped.hidden`:
    pass the cap to the loss. The head is back in its place after the block, also after an exception.

    Args:
        head: name of the submodule with the weight [V, D].

    Raises:
        ValueError: the model has no such submodule.
    """
    module = find_head(model, head)
    parent_name, _, name = head.rpartition(".")
    parent = model.get_submodule(parent_name)
    skipped = SkippedHead(module)
    skipped.train(module.training)
    setattr(parent, name, skipped)
    try:
        yield skipped
    finally:
        setattr(parent, name, module)

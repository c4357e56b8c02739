"""Which rows can be left out before the products: the ignored ones, where knowing them costs no synchronisation."""

import torch
from torch import Tensor


def kept_rows(valid: Tensor, valid_tokens: int | None, *, on_host: bool) -> Tensor | None:
    """Indices of the rows to compute, in order and every valid one among them; None for all rows.

    Args:
        valid: [T] bool.
        valid_tokens: how many are True, if the host knows.
        on_host: `valid` may be read without a synchronisation.

    Raises:
        ValueError: `valid_tokens` is too small, where that can be read. Elsewhere the device raises RuntimeError, when
            it gets there.
    """
    if torch.compiler.is_compiling():  # the number of rows would depend on data
        return None
    if on_host:
        count = int(valid.sum())
        if valid_tokens is not None and valid_tokens < count:
            raise ValueError(f"valid_tokens = {valid_tokens}: {count} labels are valid")
        return None if count == len(valid) else valid.nonzero()[:, 0]
    if valid_tokens is None or valid_tokens >= len(valid):
        return None
    torch._assert_async(valid.sum() <= valid_tokens, f"more labels are valid than valid_tokens = {valid_tokens}")
    first_the_valid = torch.argsort(valid.logical_not().to(torch.uint8), stable=True)
    return first_the_valid[:valid_tokens]

"""What `linear_cross_entropy` refuses, before anything is computed."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def check_options(
    *,
    reduction: str,
    chunk_tokens: int,
    num_chunks: int | None,
    label_smoothing: float,
    softcap: float | None,
    denominator: Any,
    accumulate_dtype: torch.dtype,
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction = {reduction!r}: must be "mean", "sum" or "none"')
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens = {chunk_tokens}: must be at least 1")
    if num_chunks is not None and num_chunks < 1:
        raise ValueError(f"num_chunks = {num_chunks}: must be at least 1, or None to go by chunk_tokens")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing = {label_smoothing}: must be between 0 and 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap = {softcap}: must be above 0, or None for none")
    if denominator is not None and reduction != "mean":
        raise ValueError(f'denominator with reduction = {reduction!r}: only "mean" divides')
    if accumulate_dtype not in (torch.float32, torch.float64):
        raise ValueError(f"accumulate_dtype = {accumulate_dtype}: must be torch.float32 or torch.float64")


def check_tensors(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    vocab_size: int | None,
    valid_tokens: int | None,
) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{name} is a DTensor: call the head's module, so that its hooks gather the weight once "
                "(ChunkedCLMCrossEntropyLoss does), or pass .full_tensor()"
            )
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}: must be [..., D] and [V, D]")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels {tuple(labels.shape)}: must have hidden's shape without its last dim, {tuple(hidden.shape[:-1])}"
        )
    if vocab_size is not None and not 1 <= vocab_size <= weight.shape[0]:
        raise ValueError(f"vocab_size = {vocab_size}: must be between 1 and the rows of weight, {weight.shape[0]}")
    if valid_tokens is not None and not 0 <= valid_tokens <= labels.numel():
        raise ValueError(f"valid_tokens = {valid_tokens}: must be between 0 and the number of labels, {labels.numel()}")
    _check_vectors(weight, labels, bias, class_weight, token_weight)


def _check_vectors(
    weight: Tensor, labels: Tensor, bias: Tensor | None, class_weight: Tensor | None, token_weight: Tensor | None
) -> None:
    for name, vector in (("bias", bias), ("class_weight", class_weight)):
        if vector is not None and vector.shape != weight.shape[:1]:
            raise ValueError(f"{name} {tuple(vector.shape)}: must be [V] = [{weight.shape[0]}]")
    if token_weight is not None and token_weight.shape != labels.shape:
        raise ValueError(
            f"token_weight {tuple(token_weight.shape)}: must have the shape of labels {tuple(labels.shape)}"
        )
    for name, constant in (("class_weight", class_weight), ("token_weight", token_weight)):
        if constant is not None and constant.requires_grad:
            raise ValueError(f"{name} requires a gradient, which is not formed: detach it")

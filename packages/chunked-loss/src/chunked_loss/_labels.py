"""Labels: what is one, which rows they leave to be computed, and how many of a whole step count."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


class LabelError(ValueError):
    """A label that is no class and not ignored; the message says where."""


def as_labels(labels: Tensor) -> Tensor:
    """`labels` as int64, from any integer dtype.

    Raises:
        LabelError: another dtype.
    """
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise LabelError(f"labels are {labels.dtype}: must be integers, best torch.int64")
    return labels.long()


def check_labels(labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Each label must be a class, 0 to `vocab_size` - 1, or `ignore_index`.

    Args:
        labels: [...] int64, aligned with the logits.

    Raises:
        LabelError: one is not, with its position, where labels are on the CPU. On a device nothing is read back: it
            stops with an assertion when it gets there (CUDA prints the message to stderr, and every later call of
            the process raises), and so does compiled code anywhere (on the CPU as RuntimeError).
    """
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= vocab_size))
    rule = f"must be 0 to {vocab_size - 1} (V = {vocab_size}), or ignore_index = {ignore_index}"
    if torch.compiler.is_compiling() or labels.device.type != "cpu":
        torch._assert_async(wrong.any().logical_not(), f"a label is out of range: {rule}")
    elif wrong.any():
        position = wrong.nonzero()[0].tolist()
        others = int(wrong.sum()) - 1
        and_more = f"; {others} more are out of range" if others else ""
        raise LabelError(f"labels{position or ''} = {int(labels[tuple(position)])}: {rule}{and_more}")


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


def global_denominator(
    labels_of_all_microbatches: Iterable[Tensor],
    dp_mesh: DeviceMesh | ProcessGroup | None,
    *,
    ignore_index: int = -100,
) -> Tensor:
    """Valid tokens of the whole step / number of data-parallel ranks.

    FSDP and DDP average gradients over the data-parallel ranks. A rank that divides the *sum* of its own
    losses by this number therefore contributes to the mean over all valid tokens of the step, whatever the
    share of each rank and microbatch, and the trainer needs no factor of its own.

    Args:
        labels_of_all_microbatches: this rank's label tensors of one optimizer step, int64, any shapes.
        dp_mesh: all data-parallel ranks: a mesh (one all-reduce per axis, so 1-D means one collective), or
            a process group; None for one process. Every rank must call.

    Returns:
        [] fp32 on the labels' device, without a host synchronisation. Never 0: with no valid token anywhere it
        is 1.0, so that the loss is 0.0 and not NaN.

    Raises:
        ValueError: no label tensor is given, or one of no integers.
    """
    counts = [(as_labels(labels) != ignore_index).sum() for labels in labels_of_all_microbatches]
    if not counts:
        raise ValueError("labels_of_all_microbatches is empty: give the labels of each microbatch of the step")
    total = torch.stack(counts).sum()
    ranks = 1
    for group in _groups(dp_mesh):
        dist.all_reduce(total, group=group)
        ranks *= group.size()
    return torch.where(total == 0, ranks, total).to(torch.float32) / ranks


def _groups(dp_mesh: DeviceMesh | ProcessGroup | None) -> list[ProcessGroup]:
    if dp_mesh is None:
        return []
    if isinstance(dp_mesh, ProcessGroup):
        return [dp_mesh]
    return [dp_mesh.get_group(axis) for axis in range(dp_mesh.ndim)]

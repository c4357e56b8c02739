"""The scale of gradients on every mesh, and when they are reduced."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule


def set_gradient_scale(unit: FSDPModule, mesh: DeviceMesh, dp_size: int) -> None:
    """Make `unit` reduce its gradients to their mean over all `dp_size` data-parallel ranks.

    An expert has already seen the tokens of the whole ep axis, so the sum over the rest of the ranks is the
    sum over all of them. FSDP would divide it by the size of `mesh` alone, `ep` times too little.

    Args:
        unit: what `fully_shard` made on `mesh`.
        mesh: 1-D (shard) or 2-D (replicate, shard).
        dp_size: all ranks that read different data.
    """
    unit.set_gradient_divide_factor(float(dp_size))
    # A factor other than the size of the group asks for PREMUL_SUM, which gloo lacks; a plain SUM that is
    # divided afterwards works everywhere. But where the shard axis has one rank FSDP copies and divides
    # instead of reducing, and would then divide a second time after the SUM.
    unit.set_force_sum_reduction_for_comms(mesh.size(mesh.ndim - 1) > 1)


def set_requires_gradient_sync(model: nn.Module, flag: bool) -> None:
    """Whether the next backward passes reduce gradients, in all FSDP units of `model`.

    For gradient accumulation: False for all microbatches of a step but the last, True for the last.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(flag, recurse=False)

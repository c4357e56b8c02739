"""What is gathered ahead: a block and its experts are two units, and FSDP foresees only one."""

import itertools
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_ep._units import Units


def set_prefetch(model: nn.Module, units: Units) -> None:
    """Let each block gather the next one together with its experts, in forward and in backward.

    Only where there are expert units. Their dispatch waits for a transfer to the host, so the host cannot run
    ahead and issue the next gather early, as FSDP counts on. And left alone it foresees one unit in backward, so
    that a block would gather its own experts only when it needs them.

    PyTorch 2.13 can also keep parameters of two meshes in one unit, by what `shard_placement_fn` returns, and
    gathers them together. 2.11 cannot, and two units leave each its own precision and gradient scale.

    Source: TorchTitan sets the same by hand for its models.
    """
    if not units.experts:
        return
    experts = {id(module) for module in units.experts}
    groups = [
        cast(list[FSDPModule], [block, *(m for m in block.modules() if m is not block and id(m) in experts)])
        for block in units.blocks
    ]
    # the root runs first, and the embedding inside it; a head of its own starts backward, else the root does
    forward = [_alone(units.embedding or model), *groups]
    backward = [_alone(units.head or model), *reversed(groups)]
    if units.embedding is not None:
        backward.append(_alone(units.embedding))
    for here, ahead in itertools.pairwise(forward):
        here[0].set_modules_to_forward_prefetch(ahead)
    for here, ahead in itertools.pairwise(backward):
        here[0].set_modules_to_backward_prefetch(ahead)


def _alone(module: nn.Module) -> list[FSDPModule]:
    return [cast(FSDPModule, module)]

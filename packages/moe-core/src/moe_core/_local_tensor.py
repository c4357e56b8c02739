"""The part of a parameter that this rank computes with."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate


def local_tensor(weight: Tensor) -> Tensor:
    """A plain tensor as it is; of a DTensor the local shard, with the right gradient.

    Where a weight is replicated, ranks use it on different tokens: their gradients are parts of a sum.
    """
    if not isinstance(weight, DTensor):
        return weight
    gradient = [Partial() if isinstance(p, Replicate) else p for p in weight.placements]
    return weight.to_local(grad_placements=gradient)

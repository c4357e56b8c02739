"""Documents that share a row: a run of equal ids is one, and an id that comes back begins another."""

import torch
import torch.nn.functional as F
from torch import Tensor


def number_runs(ids: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """ids [b, S], any integers -> [b, S]: 0 for the first run of each row, 1 for the next, ..."""
    if ids.shape[1] == 0:
        return ids.to(dtype)
    return F.pad(ids[:, 1:] != ids[:, :-1], (1, 0)).cumsum(1, dtype=dtype)

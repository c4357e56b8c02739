"""The process that ranks are forked from: has imported what they need, and done nothing with it."""

import gc
import sys

import torch._dynamo  # what a first process group imports, and the slowest of all
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401 - imported for the forks

from moe_core.testing._process import serve
from moe_core.testing._worker import main

if __name__ == "__main__":
    # what is imported is never garbage: the collections of the ranks need not look at it
    gc.freeze()
    serve(int(sys.argv[1]), main)

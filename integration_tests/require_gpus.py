"""Exit with status 1 and one line where this machine has fewer GPUs than the argument."""

import sys

import torch

wanted, found = int(sys.argv[1]), torch.accelerator.device_count() if torch.accelerator.is_available() else 0
if found < wanted:
    sys.exit(f"gpu_integration needs {wanted} GPUs and found {found}: run it on a machine that has them")

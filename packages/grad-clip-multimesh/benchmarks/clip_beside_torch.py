"""Clipping of 400 gradients on one mesh and on two, beside torch on one mesh and transformers on two.

    python packages/grad-clip-multimesh/benchmarks/clip_beside_torch.py [--tensors 400] [--repeats 12]

All run on the same four gloo ranks, one thread each, in turns; a figure is the least processor time of all turns,
for one call and one rank in the mean. On two meshes a quarter of the gradients lies on dp_shard_mod_ep, over half of
the ranks. Targets: on one mesh at most 1.1 of torch's time, on two meshes at most 1.3 of that. torch refuses two
meshes; transformers takes them in its trainer (one norm and its collectives for each mesh), and is left out where it
is not installed.
"""

import argparse
import sys
import time
from typing import Any

from moe_core.testing import run_ranks

TARGETS = {"one mesh, ours": 1.1, "two meshes, ours": 1.1 * 1.3}
TORCH = "one mesh, torch"


def measure(tensors: int, repeats: int, calls: int) -> dict[str, float]:
    """Processor seconds of one call on this rank, by contestant."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from grad_clip_multimesh import clip_grad_norm_

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard_mod_ep", "ep"))
    flat = grid["dp_shard_mod_ep", "ep"]._flatten("dp_shard")

    def model(every_fourth: Any) -> nn.ParameterList:
        parameters = nn.ParameterList()
        for index in range(tensors):
            mesh = every_fourth if index % 4 == 3 else flat
            gradient = distribute_tensor(torch.randn(256, 64), mesh, [Shard(0)])
            parameters.append(nn.Parameter(torch.zeros_like(gradient)))
            parameters[-1].grad = gradient
        return parameters

    one, two = model(flat), model(grid["dp_shard_mod_ep"])
    contestants = {
        TORCH: lambda: nn.utils.clip_grad_norm_(one.parameters(), 1.0),
        "one mesh, ours": lambda: clip_grad_norm_(one.parameters(), 1.0),
        "two meshes, ours": lambda: clip_grad_norm_(two.parameters(), 1.0),
    }
    try:
        from transformers import Trainer
    except ImportError:
        pass
    else:
        contestants["two meshes, transformers"] = lambda: Trainer._mixed_mesh_grad_norm(None, two, 1.0)
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(repeats):
        for name, clip in contestants.items():
            clip()
            began = time.process_time()
            for _ in range(calls):
                clip()
            best[name] = min(best[name], (time.process_time() - began) / calls)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--calls", type=int, default=10, help="calls in one turn")
    options = parser.parse_args()
    by_rank = run_ranks(measure, 4, options.tensors, options.repeats, options.calls, timeout=600)
    times = {name: sum(rank[name] for rank in by_rank) / len(by_rank) for name in by_rank[0]}
    print(f"{options.tensors} gradients, best of {options.repeats} turns")
    print(f"{'':<28}{'CPU ms':>9}{'of torch':>10}{'target':>8}")
    for name, seconds in times.items():
        target = f"{TARGETS[name]:.2f}" if name in TARGETS else ""
        print(f"{name:<28}{seconds * 1000:>9.2f}{seconds / times[TORCH]:>10.2f}{target:>8}")
    missed = [name for name, target in TARGETS.items() if times[name] > target * times[TORCH]]
    if missed:
        sys.exit(f"above the target: {', '.join(missed)}")


if __name__ == "__main__":
    main()

"""Forward and backward of the model, and of a Mamba mixer alone, beside transformers' `nemotron_h`.

    python packages/nemotron-nano/benchmarks/model_beside_transformers.py [--dtype float32 bfloat16] [--repeats 8]

D 512, 64 experts of width 384, top-6, S 512; transformers multiplies its experts by `F.grouped_mm` and scans in plain
torch. Both run in this process, in turns; a figure is processor time, the best of all turns. "Mixer" is a Mamba mixer
whose two projections are left out on both sides. Targets: the models at most 0.85 of transformers', the mixer at most
0.6.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from nemotron_nano import NemotronNano, NemotronNanoConfig, presets

TARGET, MIXER_TARGET = 0.85, 0.6
CONFIG = attrs.evolve(
    presets["nano-30b-a3b"],
    hidden_size=512,
    vocab_size=1024,
    num_experts=64,
    expert_hidden_size=384,
    shared_expert_hidden_size=768,
    num_attention_heads=8,
    head_dim=64,
    mamba_num_heads=16,
)


def transformers_model(config: NemotronNanoConfig, dtype: torch.dtype) -> nn.Module:
    theirs = transformers.NemotronHConfig(**config.to_hf())
    theirs._experts_implementation, theirs._attn_implementation = "grouped_mm", "sdpa"
    return transformers.NemotronHForCausalLM(theirs).to(dtype).train()


def models(pattern: str, tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    config = attrs.evolve(CONFIG, pattern=pattern)
    ours, theirs = NemotronNano(config).to(dtype), transformers_model(config, dtype)
    ids = torch.randint(config.vocab_size, (1, tokens))

    def step(model: nn.Module, logits: Tensor) -> None:
        F.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()
        model.zero_grad()

    return {
        "nemotron-nano": lambda: step(ours, ours(ids)),
        "transformers": lambda: step(theirs, theirs(ids, use_cache=False).logits),
    }


def mixers(pattern: str, tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    config = attrs.evolve(CONFIG, pattern=pattern)
    ours = NemotronNano(config).to(dtype).backbone.layers[0].mixer
    theirs = transformers_model(config, dtype).model.layers[0].mixer.eval()  # in training it asks for out_proj's weight
    projected = torch.randn(1, tokens, ours.in_proj.out_features).to(dtype).requires_grad_()
    for mixer in (ours, theirs):
        mixer.in_proj = mixer.out_proj = nn.Identity()
    grad = torch.randn(1, tokens, config.mamba_hidden_size)

    def step(mixer: nn.Module) -> None:
        out = mixer(projected)
        out.backward(grad.to(out.dtype))
        mixer.zero_grad()
        projected.grad = None

    return {"nemotron-nano": lambda: step(ours), "transformers": lambda: step(theirs)}


def best_of(contestants: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, tuple[float, float]]:
    """CPU and wall milliseconds of each, taken in turns; one turn first to warm up."""
    best = {name: (float("inf"), float("inf")) for name in contestants}
    for turn in range(repeats + 1):
        for name, run in contestants.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            taken = (time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3
            if turn:
                best[name] = min(best[name][0], taken[0]), min(best[name][1], taken[1])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--case", nargs="+", default=["ME*E", "MEM*", "mixer"], metavar="PATTERN", help='or "mixer"')
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    table = Table(
        "", "dtype", "CPU ms", "transformers'", "CPU ratio", "target", "wall ratio", title="forward + backward"
    )
    for dtype in options.dtype:
        for case in options.case:
            make = mixers if case == "mixer" else models
            best = best_of(
                make("M" if case == "mixer" else case, options.tokens, getattr(torch, dtype)), options.repeats
            )
            (cpu, wall), (their_cpu, their_wall) = best["nemotron-nano"], best["transformers"]
            target = MIXER_TARGET if case == "mixer" else TARGET
            ratios = f"{cpu / their_cpu:.2f}", f"{target:.2f}", f"{wall / their_wall:.2f}"
            table.add_row(case, dtype, f"{cpu:.0f}", f"{their_cpu:.0f}", *ratios)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

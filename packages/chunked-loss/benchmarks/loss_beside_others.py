"""Time, memory and gradient error of the head and its loss, forward and backward, beside other ways to compute them.

    python packages/chunked-loss/benchmarks/loss_beside_others.py [--dtypes float32 bfloat16] [--rows NAME ...]
        [--tokens 4096 --dim 512 --vocab 131072 --threads 2 --repeats 1]

Every row runs in a process of its own, in turns, so that no allocator and no cache of another one is in its figures.
CPU time is that of all threads; memory is the peak of resident memory over what was resident when the inputs were
there. Both are the least of all repeats. The errors are those of the gradient of the weight and of the loss against
float64 on the same inputs, for a small problem in the same process. Targets, against `naive` in fp32, and in bf16
against `naive, fp32 logits`: time at most 1.0 and 1.05, memory at most 0.11.

Liger and CCE are Triton kernels: their rows run where they are installed and there is a GPU.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from chunked_loss import linear_cross_entropy

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(**options: Any) -> Loss:
    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, **options)


def naive(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


def naive_with_fp32_logits(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def torchs(batch_chunk_size: int) -> Loss:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=batch_chunk_size)
    return lambda hidden, weight, labels: F.linear_cross_entropy(hidden, weight, labels, options=options)


def liger(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: torch.Tensor = liger_fused_linear_cross_entropy(hidden, weight, labels)
    return loss


def cce(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from cut_cross_entropy import linear_cross_entropy as cut

    loss: torch.Tensor = cut(hidden, weight, labels)
    return loss


ROWS: dict[str, Callable[[], Loss]] = {
    "naive": lambda: naive,
    "naive, fp32 logits": lambda: naive_with_fp32_logits,
    "ours, chunk 256": lambda: ours(chunk_tokens=256),
    "ours, chunk 512": lambda: ours(chunk_tokens=512),
    "ours, chunk 1024": lambda: ours(chunk_tokens=1024),
    "ours, recomputing": lambda: ours(chunk_tokens=512, recompute=True),
    "torch, chunk 512": lambda: torchs(512),
    "torch, chunk 1024": lambda: torchs(1024),
    "liger": lambda: liger,
    "cce": lambda: cce,
}
BASELINE = {"float32": "naive", "bfloat16": "naive, fp32 logits"}


def inputs(tokens: int, dim: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, dim, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, dim, generator=g) / dim**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (tokens,), generator=g)


def measure(name: str, arguments: argparse.Namespace, dtype: torch.dtype) -> dict[str, float]:
    """One row, in this process."""
    torch.set_num_threads(arguments.threads)
    loss = ROWS[name]()
    errors = small_errors(loss, dtype)
    hidden, weight, labels = inputs(arguments.tokens, arguments.dim, arguments.vocab, dtype)
    before = resident_bytes()
    wall, cpu = time.perf_counter(), time.process_time()
    loss(hidden, weight, labels).backward()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"cpu": cpu, "wall": wall, "bytes": peak_bytes() - before, **errors}


def small_errors(loss: Loss, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors against float64: of the loss, and of the weight's gradient, in 16 chunks or fewer."""
    hidden, weight, labels = inputs(2048, 64, 1024, dtype)
    value = loss(hidden, weight, labels)
    value.backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    reference = naive(*exact, labels)
    reference.backward()
    assert weight.grad is not None
    assert exact[1].grad is not None
    gradient_error = (weight.grad.double() - exact[1].grad).norm() / exact[1].grad.norm()
    return {
        "loss error": float((value.double() - reference).abs() / reference),
        "gradient error": float(gradient_error),
    }


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_processes(arguments: argparse.Namespace, dtype: str) -> Iterator[tuple[str, dict[str, float] | str]]:
    """The best of each row, or why it did not run."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.rows}
    reasons: dict[str, str] = {}
    for _ in range(arguments.repeats):
        for name in arguments.rows:
            if name in reasons:
                continue
            sizes = [f"--{key}={getattr(arguments, key)}" for key in ("tokens", "dim", "vocab", "threads")]
            command = [sys.executable, __file__, "--one", name, "--dtypes", dtype, *sizes]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                reasons[name] = run.stderr.strip().splitlines()[-1][:60]
                continue
            results[name].append(json.loads(run.stdout.splitlines()[-1]))
            print(f"  {dtype} {name}: {results[name][-1]}", file=sys.stderr, flush=True)
    for name in arguments.rows:
        yield name, reasons[name] if name in reasons else least(results[name])


def least(results: Iterable[dict[str, float]]) -> dict[str, float]:
    rows = list(results)
    return {key: min(row[key] for row in rows) for key in rows[0]}


def processor() -> str:
    known = getattr(torch.cpu, "get_capabilities", dict)()
    names = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16")
    has = ", ".join(name for name in names if known.get(name)) or "none of " + ", ".join(names)
    return f"{known.get('cpu_name', platform.processor() or platform.machine())} ({has}), torch {torch.__version__}"


def table(arguments: argparse.Namespace, dtype: str) -> None:
    rows = dict(in_processes(arguments, dtype))
    base = rows.get(BASELINE[dtype])
    print(f"\n{dtype}, T={arguments.tokens} D={arguments.dim} V={arguments.vocab}, {arguments.threads} threads")
    print(f"on {processor()}\n")
    print("| | CPU s | wall s | time, x | added MB | memory, x | error of dW | of the loss |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        if isinstance(row, str):
            print(f"| {name} | not run: {row} |")
            continue
        time_ratio = memory_ratio = ""
        if isinstance(base, dict):
            time_ratio, memory_ratio = f"{row['cpu'] / base['cpu']:.2f}", f"{row['bytes'] / base['bytes']:.3f}"
        print(
            f"| {name} | {row['cpu']:.1f} | {row['wall']:.1f} | {time_ratio} "
            f"| {row['bytes'] / 1e6:.0f} | {memory_ratio} | {row['gradient error']:.1e} | {row['loss error']:.1e} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=BASELINE, default=list(BASELINE))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--one", choices=ROWS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments, getattr(torch, arguments.dtypes[0]))))
        return
    for dtype in arguments.dtypes:
        table(arguments, dtype)


if __name__ == "__main__":
    main()

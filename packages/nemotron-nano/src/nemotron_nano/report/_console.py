"""Progress on the terminal: plain lines that also read well in a log file."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_core.plugins import Run


class ConsoleTracker:
    """Prints on the first rank."""

    def __init__(self, *, every: int, enabled: bool) -> None:
        self._every = every
        self._console = Console(quiet=not enabled, highlight=False, soft_wrap=True)
        self._first_step = 0
        self._begin = time.monotonic()

    def run_start(self, *, run: Run, first_step: int, steps: int, description: Mapping[str, Any], **_: Any) -> None:
        self._first_step, self._begin = first_step, time.monotonic()
        parameters = sum(parameter.numel() for parameter in run.model.parameters())
        where = f"{run.world_size} rank{'s' if run.world_size > 1 else ''} on {run.device_type}"
        self._console.print(f"[bold]{run.config.run.name}[/]: {parameters:,} parameters, {where}, {_layout(run)}")
        if "digest" in description:
            self._console.print(
                f"{description['corpus']}, digest {description['digest']}: {description['training_files']} files, "
                f"{description['training_bytes']:,} bytes for training; {description['validation_files']} files, "
                f"{description['validation_bytes']:,} bytes for validation"
            )
        if first_step:
            self._console.print(f"resumed after step {first_step}; {steps - first_step} to go")

    def step_end(self, *, step: int, steps: int, metrics: Mapping[str, Any], **_: Any) -> None:
        if step % self._every and step not in (self._first_step + 1, steps):
            return
        per_step = (time.monotonic() - self._begin) / (step - self._first_step)
        memory = " ".join(f"{size / 2**20:.0f}" for size in metrics["peak_memory_bytes"])
        count = f"{step:>{len(str(steps))}}/{steps}"
        mfu = f"MFU {metrics['mfu']:.1%}  " if "mfu" in metrics else ""
        self._console.print(
            f"step {count}  loss {metrics['loss']:.4f}  grad norm {metrics['grad_norm']:.3f}  "
            f"{metrics['tokens_per_second']:,.0f} tokens/s  {mfu}peak memory {memory} MiB  "
            f"{_duration(per_step * (steps - step))} left"
        )

    def evaluated(self, *, step: int, metrics: Mapping[str, Any], **_: Any) -> None:
        line = f"validation after step {step}: loss {metrics['loss']:.4f}"
        if "bits_per_byte" in metrics:
            bits, entropy = metrics["bits_per_byte"], metrics["byte_entropy_bits"]
            less = f"{1 - bits / entropy:.0%} less"
            line += f", [bold]{bits:.3f} bits per byte[/] (single bytes alone: {entropy:.3f}, {less})"
        self._console.print(line)

    def checkpoint_saved(self, *, step: int, path: Path, **_: Any) -> None:
        self._console.print(f"checkpoint after step {step}: {path}")


def _layout(run: Run) -> str:
    """The mesh's axes with their sizes."""
    names = run.mesh.mesh_dim_names or ()
    return ", ".join(f"{name} {size}" for name, size in zip(names, run.mesh.shape, strict=True))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"

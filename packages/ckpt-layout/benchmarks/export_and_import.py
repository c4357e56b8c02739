"""Export and import of a synthetic Mixtral, beside plain files, transformers and torch's own HF consolidation.

    python benchmarks/export_and_import.py --gb 2

Prints the seconds (best of the rounds), the rate beside a plain sequential write or read of as many bytes in the same
run, and how far the peak of resident memory rose above what was there before. Then the bytes that each rank reads
when experts that two ranks held are loaded by four.
"""

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import nn

from ckpt_layout import load_hf, save_hf
from moe_core.testing import run_ranks

BLOCK = 64 * 2**20

SLOWEST = "torch, consolidated"
"""By far; it has one turn."""


def mixtral(gigabytes: float) -> nn.Module:
    """bf16, four layers of 16 experts, random bits that are finite numbers."""
    layers, experts, dim = 4, 16, 1024
    hidden = max(64, int(gigabytes * 1e9 / (layers * experts * 3 * dim * 2)) // 64 * 64)
    config = transformers.MixtralConfig(
        vocab_size=1024,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=experts,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    model.to(torch.bfloat16).to_empty(device="cpu")
    pattern = torch.randn(2**20).bfloat16()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            flat = tensor.view(-1)
            for start in range(0, flat.numel(), 2**20):
                part = flat[start : start + 2**20]
                part.copy_(pattern[: part.numel()].roll(start // 2**20))
    return model


def write_plainly(file: Path, data: memoryview) -> None:
    with file.open("wb", buffering=0) as stream:
        for start in range(0, len(data), BLOCK):
            stream.write(data[start : start + BLOCK])
        os.fsync(stream.fileno())


def read_plainly(file: Path, data: memoryview) -> None:
    with file.open("rb", buffering=0) as stream:
        for start in range(0, len(data), BLOCK):
            stream.readinto(data[start : start + BLOCK])


def consolidated(model: nn.Module, folder: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    names = dict.fromkeys(state, 1)
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=names, save_distributed=True, enable_consolidation=True
    )
    save(state, storage_writer=writer, no_dist=True)


def measured(job: Callable[[], object]) -> tuple[float, float]:
    """(seconds, GB by which the peak of resident memory rose); the second is nan where the system cannot tell."""
    before = memory("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    except OSError:
        before = float("nan")
    begin = time.perf_counter()
    job()
    seconds = time.perf_counter() - begin
    return seconds, memory("VmHWM") - before


def memory(field: str) -> float:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e9


def compare(model: nn.Module, folder: Path, rounds: int) -> None:
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    buffer = memoryview(bytearray(size))
    buffer[:] = os.urandom(2**20) * (size // 2**20) + bytes(size % 2**20)
    ours, theirs, torchs, plain = folder / "ours", folder / "theirs", folder / "torchs", folder / "plain"

    writes: dict[str, Callable[[], object]] = {
        "plain write": lambda: write_plainly(plain, buffer),
        "save_hf": lambda: save_hf(model, ours),
        "transformers save_pretrained": lambda: model.save_pretrained(theirs),
        SLOWEST: lambda: consolidated(model, torchs),
    }
    targets = dict(zip(list(writes)[1:], (ours, theirs, torchs), strict=True))
    reads: dict[str, Callable[[], object]] = {
        "plain read": lambda: read_plainly(plain, buffer),
        "load_hf": lambda: load_hf(model, ours),
        "transformers from_pretrained": lambda: transformers.MixtralForCausalLM.from_pretrained(
            theirs, dtype=torch.bfloat16
        ),
    }
    print(f"{size / 1e9:.2f} GB, {len(model.state_dict())} native tensors, best of {rounds} rounds")
    print(f"{'':32}{'seconds':>9}{'GB/s':>8}{'of plain':>10}{'peak +GB':>10}")
    for jobs in (writes, reads):
        best: dict[str, tuple[float, float]] = {}
        for turn in range(rounds):
            for name, job in jobs.items():
                if turn > 0 and name == SLOWEST:
                    continue
                if name in targets:
                    shutil.rmtree(targets[name], ignore_errors=True)  # before the clock starts
                result = measured(job)
                best[name] = min(best.get(name, (float("inf"), 0.0)), result)
        first = next(iter(best.values()))[0]
        for name, (seconds, peak) in best.items():
            print(f"{name:32}{seconds:9.2f}{size / seconds / 1e9:8.2f}{first / seconds:9.2f}x{peak:10.2f}", flush=True)


def read_by_four(source: str, experts: int, hidden: int, dim: int) -> tuple[int, int]:
    """(bytes read, bytes held) by this rank of four, of experts that lie one by one in a folder."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from ckpt_layout import Family, Rule, get_sharded_expert_range, load_hf
    from ckpt_layout._hf_folder import HfFolder

    family = Family("synthetic", (), (Rule("experts.down_proj", "experts.{e}.down_proj.weight"),))
    mesh = init_device_mesh("cpu", (4,))
    held = len(get_sharded_expert_range(experts, 4, mesh.get_rank()))
    model = nn.Module()
    model.experts = nn.Module()
    shape = torch.Size((experts, dim, hidden))
    local = torch.empty(held, dim, hidden)
    stack = DTensor.from_local(local, mesh, (Shard(0),), shape=shape, stride=(dim * hidden, hidden, 1))
    model.experts.down_proj = nn.Parameter(stack)
    read, count = HfFolder.read, 0

    def counting(self: HfFolder, key: str, block: tuple[slice, ...], out: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal count
        values = read(self, key, block, out)
        count += values.numel() * values.element_size()
        return values

    HfFolder.read = counting  # type: ignore[method-assign]  # counts what is asked of the files
    try:
        load_hf(model, source, family=family)
    finally:
        HfFolder.read = read  # type: ignore[method-assign]  # as it was
    return count, local.numel() * local.element_size()


def reshard(folder: Path) -> None:
    def save_by_two(target: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        from ckpt_layout import Family, Rule, save_hf

        family = Family("synthetic", (), (Rule("experts.down_proj", "experts.{e}.down_proj.weight"),))
        model = nn.Module()
        model.experts = nn.Module()
        stack = distribute_tensor(torch.randn(30, 256, 512), init_device_mesh("cpu", (2,)), (Shard(0),))
        model.experts.down_proj = nn.Parameter(stack)
        save_hf(model, target, family=family)

    target = str(folder / "resharded")
    run_ranks(save_by_two, 2, target)
    for rank, (read, held) in enumerate(run_ranks(read_by_four, 4, target, 30, 512, 256)):
        print(f"ep 2 -> 4, rank {rank}: read {read / 1e6:.2f} MB, holds {held / 1e6:.2f} MB: {read / held:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the model (default: 2)")
    parser.add_argument("--rounds", type=int, default=2, help="the best of so many is printed (default: 2)")
    parser.add_argument("--folder", type=Path, help="where the files go (default: a temporary folder)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        compare(mixtral(options.gb), folder, options.rounds)
        reshard(folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""`prepare` beside `tokenizers` alone, with as many processes, and how long a step waits for its batch.

    python packages/nemotron-nano/benchmarks/prepare_beside_tokenizers.py [--workers 2] [--megabytes 40] [--rounds 3]

The corpus is Python's standard library as JSON lines, over and over; the tokenizer the one of 131,072 tokens that
mistral-common ships. `tokenizers` alone gets the texts from memory, shared out over its processes, and keeps nothing;
both start their processes and load the tokenizer in them. Megabytes of text a second, the best of several rounds, taken
in turns. Targets: 0.8 of tokenizers' speed; less than 1% of a step's time (tiny model, on 1 process).
"""

import argparse
import json
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TARGET, WAIT_TARGET = 0.8, 0.01


def corpus(path: Path, size: int) -> list[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [file.read_text(encoding="utf-8") for file in sorted(library.glob("*.py"))]
    chosen: list[str] = []
    while sum(map(len, chosen)) < size:
        chosen += texts
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen), encoding="utf-8")
    return chosen


_rust: Any = None


def start(tokenizer: str) -> None:
    global _rust
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    _rust = Tokenizer.from_file(tokenizer)


def count_ids(texts: Sequence[str]) -> int:
    return sum(len(encoding.ids) for encoding in _rust.encode_batch_fast(texts, add_special_tokens=False))


def alone(texts: Sequence[str], tokenizer: str, workers: int) -> int:
    with ProcessPoolExecutor(workers, get_context("spawn"), start, (tokenizer,)) as pool:
        return sum(pool.map(count_ids, [texts[i : i + 64] for i in range(0, len(texts), 64)]))


def timed(job: Callable[[], object]) -> float:
    begin = time.perf_counter()
    job()
    return time.perf_counter() - begin


def waiting(folder: Path) -> tuple[float, float]:
    """Seconds of steps, and of them those that waited for a batch."""
    from nemotron_nano.cli import main

    words = ["model.vocab_size=131072", "data.type=tokens", f"data.files={json.dumps([str(folder / 'out')])}"]
    words += [
        "run.steps=12",
        f"run.output_dir={folder / 'run'}",
        "data.sequence_length=256",
        "tracker=[{type='jsonl'}]",
    ]
    words += ["data.global_batch_size=8", 'transform=[{type="fsdp"}]', "loss.type=chunked_clm_cross_entropy"]
    assert main(["train", *words, "transform.fsdp.separate_lm_head=true"]) == 0
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step_end"][2:]
    return sum(step["seconds"] for step in steps), sum(step["data_seconds"] for step in steps)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    from transformers.integrations.mistral import convert_tekken_tokenizer

    from nemotron_nano.data.prepare import Work, prepare

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = corpus(folder / "corpus.jsonl", int(options.megabytes * 1e6))
        convert_tekken_tokenizer(str(files("mistral_common") / "data" / "tekken_240911.json")).save_pretrained(folder)
        tokenizer = str(folder / "tokenizer.json")
        work = Work((folder / "corpus.jsonl",), tokenizer, workers=options.workers)

        def ours() -> None:
            for file in folder.glob("out.*"):
                file.unlink()
            prepare(folder / "out", work)

        best = {"tokenizers alone": float("inf"), "prepare": float("inf")}
        for _ in range(options.rounds):
            best["tokenizers alone"] = min(
                best["tokenizers alone"], timed(lambda: alone(texts, tokenizer, options.workers))
            )
            best["prepare"] = min(best["prepare"], timed(ours))
        size = sum(len(text.encode()) for text in texts) / 1e6
        for what, seconds in best.items():
            print(f"{what:20}{seconds:8.2f} s{size / seconds:8.2f} MB/s{best['tokenizers alone'] / seconds:8.2f}x")
        step, wait = waiting(folder)
    print(f"waiting for a batch  {wait * 1e3 / 10:.2f} ms of {step * 1e3 / 10:.0f} ms a step: {wait / step:.2%}")
    met = best["tokenizers alone"] / best["prepare"] >= TARGET and wait / step < WAIT_TARGET
    print("targets met" if met else f"targets missed: {TARGET} of tokenizers' speed, {WAIT_TARGET:.0%} of a step")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

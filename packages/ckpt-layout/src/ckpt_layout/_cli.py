"""The command `ckpt-layout`: ranges, inspect, verify, diff, convert. One process, on the CPU, no process group."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

_OK, _DIFFERENT, _USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 0, or 1 where something is wrong or differs, or 2 where it cannot be done."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (ValueError, OSError) as error:
        print(f"ckpt-layout: {error}", file=sys.stderr)
        return _USAGE
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckpt-layout", description="Who holds which expert, and what is in the files."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('ckpt-layout')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    ranges = command("ranges", _ranges, "print which experts each rank of a sharded stack holds")
    ranges.add_argument("--experts", type=int, required=True, help="experts in one layer")
    ranges.add_argument("--ranks", type=int, required=True, help="ranks that the stack is sharded over")

    inspect = command("inspect", _inspect, "print format, family, dtypes, sizes and experts of a folder of weights")
    verify = command("verify", _verify, "read everything and print what is wrong; status 1 if something is")
    diff = command("diff", _diff, "print the tensors that differ, by expert; status 1 if any does")
    convert = command("convert", _convert, "write the weights in another format; optimizer state is not carried along")
    for parser_of_path in (inspect, verify):
        parser_of_path.add_argument("path", type=Path, metavar="PATH")
    for each in (inspect, verify, diff, convert):
        each.add_argument("--family", help="of a Hugging Face folder; default: by model_type in config.json")
    diff.add_argument("a", type=Path, metavar="A")
    diff.add_argument("b", type=Path, metavar="B")
    convert.add_argument("source", type=Path, metavar="SRC")
    convert.add_argument("target", type=Path, metavar="DST")
    convert.add_argument("--to", choices=("hf", "dcp", "stacked"), required=True, help="the format of DST")
    convert.add_argument("--config", type=Path, help="config.json for DST, where SRC has none")
    convert.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as in SRC")
    convert.add_argument("--max-shard-size", default="5GB", help="of a file (default: 5GB)")
    return parser


def _ranges(options: argparse.Namespace) -> int:
    from ckpt_layout._inspect import ranges

    return _print(ranges(options.experts, options.ranks), _OK)


def _inspect(options: argparse.Namespace) -> int:
    from ckpt_layout._inspect import describe

    return _print(describe(options.path, options.family), _OK)


def _verify(options: argparse.Namespace) -> int:
    from ckpt_layout._inspect import problems

    status = _print(problems(options.path, options.family), _DIFFERENT)
    if status == _OK:
        print(f"{options.path}: whole")
    return status


def _diff(options: argparse.Namespace) -> int:
    from ckpt_layout._inspect import differences

    status = _print(differences(options.a, options.b, options.family), _DIFFERENT)
    if status == _OK:
        print("equal, bit by bit")
    return status


def _print(lines: Iterator[str], if_any: int) -> int:
    status = _OK
    for line in lines:
        print(line)
        status = if_any
    return status


def _convert(options: argparse.Namespace) -> int:
    import torch

    from ckpt_layout._convert import convert, total_bytes

    with _progress(total_bytes(options.source, options.family)) as step:
        convert(
            options.source,
            options.target,
            options.to,
            family=options.family,
            config=options.config,
            dtype=getattr(torch, options.dtype) if options.dtype else None,
            max_shard_size=options.max_shard_size,
            step=step,
        )
    print(f"{options.target}: written as {options.to}")
    return _OK


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal, if the extra is there: pip install 'ckpt-layout[progress]'."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
    except ImportError:
        yield lambda count: None
        return
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)

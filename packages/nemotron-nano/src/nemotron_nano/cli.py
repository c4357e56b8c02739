"""The command `nemotron-nano`: prepare, train, plan, components, generate, export, report."""

import argparse
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from moe_core.config import Config, ConfigError, load_config, validate
from moe_core.plugins import load_registry
from nemotron_nano._exit import is_user_error, leave
from nemotron_nano.train.launch import check_start, launch

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 500
"""Columns of a table that goes into a file or a pipe."""

PACKAGES = (
    "nemotron-nano", "moe-core", "ep-mesh", "ep-dispatch", "fsdp-ep", "grad-clip-multimesh", "chunked-loss",
    "ckpt-layout",
)  # fmt: skip
"""The eight distributions, whose versions belong in a report of a fault."""

MOST_RANKS_TRIED = 64
"""How far the search for a number of ranks goes that fits a config."""

USER_ERROR = 2
"""Exit status of a mistake in what the user gave; nothing was started."""


def command() -> NoReturn:
    """`main` as a process of its own."""
    try:
        status = main()
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except Exception:  # a defect, shown as Python shows it; but threads may be about that forbid Python's own end
        traceback.print_exc()
        status = 1
    leave(status)


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(words)
    try:
        return int(options.command(options, words))
    except Exception as error:  # only what users are meant to read is kept
        if is_user_error(error):
            return _refuse(error)
        raise


class UserError(ValueError):
    """A mistake in the command's words or paths, with its fix."""


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """argparse takes positional words in one run only; overrides may also stand behind the options."""
    parser = _parser()
    options, rest = parser.parse_known_args(words)
    unknown = [word for word in rest if word.startswith("-") or not hasattr(options, "words")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        options.words += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nemotron-nano", description="Train Nemotron-3 Nano with expert parallelism.")
    parser.add_argument("--version", action=_Versions, help="versions of the eight packages, torch and Python")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    prepare = commands.add_parser("prepare", help="turn text into a file of token ids", description=_prepare.__doc__)
    prepare.add_argument("out", type=Path, metavar="OUT", help="writes OUT.bin, OUT.idx and what belongs to them")
    kinds = "JSON lines (.gz, .zst too), parquet, text files, folders of these, or a saved dataset"
    prepare.add_argument("inputs", type=Path, nargs="+", metavar="INPUT", help=kinds)
    prepare.add_argument("--tokenizer", required=True, metavar="PATH", help='a tokenizer.json, or "bytes"')
    prepare.add_argument("--end", metavar="TOKEN", help='ends each document (default: the tokenizer\'s own); or "none"')
    prepare.add_argument("--field", default="text", metavar="NAME", help='of an object or a table (default "text")')
    prepare.add_argument("--workers", type=_positive, default=1, metavar="N", help="processes (default 1)")
    bad = "what a damaged document does (default stop)"
    prepare.add_argument("--on-bad-line", choices=("skip", "stop"), default="stop", help=bad)
    prepare.add_argument("--verify", action="store_true", help="tokenise again and compare; alone where OUT exists")
    prepare.set_defaults(command=_prepare)

    train = commands.add_parser("train", help="train from a config", description=_train.__doc__)
    train.add_argument("words", nargs="+", metavar="CONFIG... [key.path=value ...]", help="TOML files, then overrides")
    train.add_argument("--nproc", type=_positive, metavar="N", help="start N ranks on this machine (default 1)")
    train.add_argument("--resume", action="store_true", help="go on from the latest checkpoint of the run's folder")
    train.add_argument("--dry-run", action="store_true", help="check the config, print it in full, start nothing")
    train.set_defaults(command=_train)

    plan = commands.add_parser("plan", help="what each expert-parallel degree will cost", description=_plan.__doc__)
    plan.add_argument("words", nargs="+", metavar="CONFIG... [key.path=value ...]", help="TOML files, then overrides")
    plan.add_argument("--gpus", type=_positive, default=8, metavar="N", help="ranks (default 8)")
    plan.add_argument("--memory", default="80GiB", metavar="SIZE", help="of a GPU (default 80GiB)")
    plan.add_argument("--reserve", default="2GiB", metavar="SIZE", help="of it for driver and fragments (default 2GiB)")
    tflops = "a GPU reaches in products (default 800)"
    plan.add_argument("--tflops", type=_above_zero, default=800.0, metavar="N", help=tflops)
    plan.add_argument("--intra", default="450GB/s", metavar="SPEED", help="of a GPU in its node (default 450GB/s)")
    plan.add_argument("--link", default="50GB/s", metavar="SPEED", help="of a GPU to other nodes (default 50GB/s)")
    plan.add_argument("--gpus-per-node", type=_positive, default=8, metavar="N", help="(default 8)")
    plan.add_argument("--json", action="store_true", help="everything, as JSON")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="also draw it, as PNG, SVG or PDF")
    plan.set_defaults(command=_plan)

    components = commands.add_parser("components", help="list the installed components")
    components.set_defaults(command=_components)

    generate = commands.add_parser("generate", help="continue a text with a trained model")
    generate.add_argument("run", type=Path, metavar="RUN", help="folder of a run that has a checkpoint")
    generate.add_argument("--prompt", default="def ", help='text to continue (default "def ")')
    generate.add_argument("--max-new-tokens", type=_positive, default=100, metavar="N", help="how far (default 100)")
    generate.add_argument("--temperature", type=_not_negative, default=0.8, help="0: the likeliest token (default 0.8)")
    generate.add_argument("--top-p", type=_share, default=0.95, help="share of the probability kept (default 0.95)")
    generate.add_argument("--seed", type=_whole, default=0, help="of the sampling (default 0)")
    generate.set_defaults(command=_generate)

    export = commands.add_parser("export", help="write a checkpoint in the Hugging Face layout")
    export.add_argument("run", type=Path, metavar="RUN", help="folder of a run that has a checkpoint")
    export.add_argument("--output", type=Path, metavar="DIR", help="where to (default RUN/hf)")
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (default 5GB)")
    export.set_defaults(command=_export)

    report = commands.add_parser("report", help="plots and a table of finished runs")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs; plots go into the first")
    report.set_defaults(command=_report)
    return parser


class _Versions(argparse.Action):
    """Prints a line for each package, torch and Python, and ends; no torch is imported."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        for name in (*PACKAGES, "torch"):
            try:
                print(name, version(name))
            except PackageNotFoundError:
                print(name, "is not installed")
        print("Python", platform.python_version())
        parser.exit()


def _number(type_: Callable[[str], float], rule: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """An argparse type that says what an option must be, whatever stands there instead."""

    def parse(text: str) -> float:
        try:
            number = type_(text)
        except ValueError:
            number = None
        if number is None or not holds(number):
            raise argparse.ArgumentTypeError(f"{text!r}: must be {rule}")
        return number

    return parse


_positive = _number(int, "a whole number, at least 1", lambda number: number >= 1)
_whole = _number(int, "a whole number", lambda number: True)
_above_zero = _number(float, "a number above 0", lambda number: number > 0)
_not_negative = _number(float, "a number, not negative", lambda number: number >= 0)
_share = _number(float, "a number above 0 and at most 1", lambda number: 0 < number <= 1)


def _prepare(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Tokenise documents into Megatron's indexed format, for the data component "tokens" and for other trainers. An
    interrupted preparation goes on when the same command is given again."""
    from nemotron_nano.data.prepare import Work, prepare, total_size, verify

    work = Work(
        tuple(options.inputs),
        options.tokenizer,
        end=options.end,
        field=options.field,
        on_bad_line=options.on_bad_line,
        workers=options.workers,
    )
    out = options.out
    if not (options.verify and out.with_name(f"{out.name}.idx").is_file()):
        with _progress("tokenising", total_size(work)) as position:
            done = prepare(out, work, position=position)
        print(f"{out}.bin: {done.documents:,} documents, {done.tokens:,} tokens of {done.text_bytes:,} bytes of text")
        if done.bad:
            print(f"{done.bad:,} damaged documents were left out; they are listed in {out}.bad.txt", file=sys.stderr)
    if options.verify:
        with _progress("comparing", total_size(work)) as position:
            print(f"{out}.bin: all {verify(out, work, position=position):,} documents are those of the inputs")
    return 0


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal, with the time that is left; told how many bytes are done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _train(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Train from one or more TOML files, the later over the earlier, and key.path=value words over all."""
    config = _load(options.words)
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if started else (options.nproc or 1)
    try:
        validate(config, world_size)
    except ConfigError as error:
        if started or options.nproc or not (ranks := _ranks_that_fit(config)):
            raise
        raise UserError(
            f"{error}\nThis was checked for one process, which is the default; on {ranks} the config holds: start them "
            f"with --nproc {ranks}, or under torchrun"
        ) from error
    if options.dry_run:
        print(config.to_toml(), end="")
        return 0
    if not started:
        check_start(config, resume=options.resume)
    if started or world_size == 1:
        from nemotron_nano.train.rank import train_on_this_rank

        return train_on_this_rank(config, resume=options.resume)
    return launch("nemotron_nano", words, world_size)


def _load(words: Sequence[str], *overrides: str) -> Config:
    """The config of these files and `key.path=value` words, and of what the command itself sets."""
    files = [word for word in words if "=" not in word]
    return load_config(files, [*(word for word in words if "=" in word), *overrides])


def _ranks_that_fit(config: Config) -> int | None:
    """The smallest number of ranks, of several, for which all rules between the tables hold."""
    for ranks in range(2, MOST_RANKS_TRIED + 1):
        try:
            validate(config, ranks)
        except ConfigError:
            continue
        return ranks
    return None


def _plan(options: argparse.Namespace, words: Sequence[str]) -> int:
    """What a step costs at every valid expert-parallel degree: memory, collectives, time; mesh.ep plays no part."""
    config = _load(options.words, "mesh.ep=1")
    validate(config, options.gpus)

    from nemotron_nano.planner import Hardware, parse_bytes, plan, show, to_json

    hardware = Hardware(
        memory=parse_bytes(options.memory),
        reserve=parse_bytes(options.reserve),
        tflops=options.tflops,
        intra=parse_bytes(options.intra),
        link=parse_bytes(options.link),
        gpus_per_node=options.gpus_per_node,
    )
    result = plan(config, gpus=options.gpus, hardware=hardware)
    if options.json:
        print(to_json(result))
    else:
        show(result, _table_console())
    if options.plot:
        from nemotron_nano.planner import plot

        print(f"wrote {plot(result, options.plot)}", file=sys.stderr)
    return 0


def _table_console() -> "Console":
    """Into a pipe nothing is wrapped, so that a line stays a row."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.file.isatty():  # not sys.stdout, which is None in a process that was started without one
        console.width = PIPE_WIDTH
    return console


def _components(options: argparse.Namespace, words: Sequence[str]) -> int:
    """One line per component, and one per plugin that failed to load."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    registry = load_registry()
    table = Table("kind", "name", "distribution", "version", box=SIMPLE_HEAD)
    for entry in sorted(registry.entries, key=lambda entry: (entry.component.kind, entry.component.name)):
        table.add_row(entry.component.kind, entry.component.name, entry.distribution, entry.version)
    console = _table_console()
    console.print(table)
    for failure in registry.failures:
        console.print(str(failure), soft_wrap=True, markup=False)
    return 0


def _generate(options: argparse.Namespace, words: Sequence[str]) -> int:
    folder = _run_folder(options.run)
    from nemotron_nano.trained import continue_text

    for piece in continue_text(
        folder,
        options.prompt,
        options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    ):
        print(piece, end="", flush=True)
    print()
    return 0


def _export(options: argparse.Namespace, words: Sequence[str]) -> int:
    folder = _run_folder(options.run)
    from nemotron_nano.trained import export

    output = options.output or folder / "hf"
    export(folder, output, options.max_shard_size)
    print(f"wrote {output}")
    return 0


def _report(options: argparse.Namespace, words: Sequence[str]) -> int:
    from nemotron_nano.report.summary import report

    report([_run_folder(folder) for folder in options.runs])
    return 0


def _run_folder(folder: Path) -> Path:
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder} is not the folder of a run: it has no config.toml (runs write to runs/NAME)")
    return folder


def _refuse(error: Exception) -> int:
    """The error in words; of several ranks only the first one says it."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"nemotron-nano: {error}", file=sys.stderr)
    return USER_ERROR

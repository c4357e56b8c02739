"""The command `ep-mesh`: prints which rank is what, without starting any process."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

import attrs

from ep_mesh._layout import REST, MeshConfig, MeshConfigError, RankRow, rank_table

_EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 where the degrees break a rule."""
    options = _parser().parse_args(arguments)
    if options.dp_replicate is None:  # what is left, unless dp_shard takes it
        options.dp_replicate = 1 if options.dp_shard == REST else REST
    try:
        config = MeshConfig(**{field.name: getattr(options, field.name) for field in attrs.fields(MeshConfig)})
        broken = config.broken_rules(options.world_size, options.num_experts)
    except MeshConfigError as error:
        broken = [error]
    for problem in broken:
        print(f"ep-mesh: {problem}", file=sys.stderr)
    if broken:
        return _EXIT_USAGE
    print(format_table(rank_table(config, options.world_size, options.num_experts)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ep-mesh", description="Parallel degrees and the ranks they make.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('ep-mesh')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="print a table: rank, coordinates, experts, data shard, peers")
    show.add_argument("--world-size", type=int, required=True, help="number of ranks")
    show.add_argument("--dp-shard", type=int, default=REST, help="default: what is left of the world")
    show.add_argument("--dp-replicate", type=int, help="default: what is left of the world if --dp-shard is given")
    for degree in ("ep", "tp", "pp", "cp"):
        show.add_argument(f"--{degree}", type=int, default=1, help="default: 1")
    show.add_argument("--num-experts", type=int, help="experts in one layer")
    return parser


def format_table(rows: Sequence[RankRow]) -> str:
    """The rows as a plain-text table."""
    has_experts = rows[0].experts is not None
    header = ["rank", *rows[0].coordinates, *(["experts"] if has_experts else []), "data shard"]
    header += ["all-to-all with", "gathers from", "gathers experts from"]
    lines = [header]
    for row in rows:
        experts = [_span(tuple(row.experts))] if row.experts is not None else []
        peers = [row.all_to_all_peers, row.gather_peers, row.expert_gather_peers]
        numbers = [row.rank, *row.coordinates.values()]
        lines.append([*map(str, numbers), *experts, str(row.data_shard), *map(_span, peers)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def _span(numbers: tuple[int, ...]) -> str:
    """(4, 5, 6, 7) -> "4-7", (0, 4, 8) -> "0-8:4", (3,) -> "3"."""
    if len(numbers) == 1:
        return str(numbers[0])
    step = numbers[1] - numbers[0]
    if numbers != tuple(range(numbers[0], numbers[-1] + 1, step)):
        return ",".join(map(str, numbers))
    return f"{numbers[0]}-{numbers[-1]}" + (f":{step}" if step > 1 else "")

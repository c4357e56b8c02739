"""From files and words to a `Config`: layers, types, then the rules that span tables."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from moe_core.config._layers import Sources, read_layers, source_of
from moe_core.config._positions import dotted, undotted
from moe_core.config._structure import structure, structure_selected
from moe_core.plugins import Config, ConfigError, Problem, Registry, RunConfig, Selected, load_registry
from moe_core.plugins._components import nearest
from moe_core.plugins.kinds import ARRAYS, KINDS, TABLES

PathLike = str | os.PathLike[str]


def load_config(
    paths: PathLike | Iterable[PathLike] = (),
    overrides: Iterable[str] = (),
    *,
    registry: Registry | None = None,
) -> Config:
    """Read, merge and type a config.

    Args:
        paths: TOML files, the later over the earlier. Tables merge, arrays of tables replace whole.
        overrides: `key.path=value` words over the files; a table of an array goes by its type
            (`transform.fsdp.reshard_after_forward=false`).
        registry: the components to choose from; the installed ones if left out.

    The string "none" switches an optional value off. No value is coerced, but for an integer where a
    number is asked.

    Raises:
        ConfigError: with all problems, each with file, key path, value, rule and nearest valid name.
    """
    registry = load_registry() if registry is None else registry
    files = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    merged, sources, problems = read_layers([Path(path) for path in files], overrides)
    problems += _unknown_tables(merged)
    run, found = structure(RunConfig, merged.get("run", {}), ("run",), registry)
    problems += found
    tables: dict[str, Any] = {}
    for kind, default in TABLES.items():
        tables[kind], found = structure_selected(kind, merged.get(kind, {}), default, (kind,), registry)
        problems += found
    for kind, defaults in ARRAYS.items():
        tables[kind], found = _array(kind, merged, defaults, registry)
        problems += found
    if problems:
        raise ConfigError(_placed(problem, merged, sources) for problem in problems)
    assert run is not None
    return Config(run, tables, registry, sources)


def validate(config: Config, world_size: int) -> None:
    """Ask every plugin that the config uses whether the tables fit together, on this many ranks.

    Raises:
        ConfigError: with the problems of all of them.
    """
    used = {config.registry.find(selected.kind, selected.name).plugin for selected in config.selected()}
    answers = config.registry.validators(used)(config=config, world_size=world_size)
    problems = [problem for answer in answers for problem in answer]
    if problems:
        raise ConfigError(_placed(problem, {}, dict(config.sources)) for problem in problems)


def _unknown_tables(merged: dict[str, Any]) -> list[Problem]:
    names = ["run", *TABLES, *ARRAYS]
    inner = "it is a sub-table of the component that uses it"
    return [
        Problem(
            dotted([name]),
            "is not a table of a config",
            hint=inner if name in KINDS else nearest(name, names, "tables"),
        )
        for name in merged
        if name not in names
    ]


def _array(
    kind: str, merged: dict[str, Any], defaults: tuple[str, ...], registry: Registry
) -> tuple[tuple[Selected, ...], list[Problem]]:
    given = merged.get(kind, [{"type": name} for name in defaults])
    if not isinstance(given, list):
        return (), [Problem(kind, f"must be an array of tables: [[{kind}]]", given)]
    items, problems = [], []
    for position, table in enumerate(given):
        item, found = structure_selected(kind, table, None, (kind, str(position)), registry)
        items.append(item)
        problems += found
    return tuple(item for item in items if item is not None), problems


def _placed(problem: Problem, merged: dict[str, Any], sources: Sources) -> Problem:
    """The problem with the source of its value; tables of arrays go by their type instead of position."""
    path = undotted(problem.key)
    source = problem.source or source_of(path, sources)
    key = problem.key
    if len(path) > 1 and path[0] in ARRAYS and path[1].isdigit() and path[0] in merged:
        table = merged[path[0]][int(path[1])]
        if isinstance(table, dict) and isinstance(table.get("type"), str) and path[2:] != ("type",):
            key = dotted((path[0], table["type"], *path[2:]))
    return attrs.evolve(problem, key=key, source=source)

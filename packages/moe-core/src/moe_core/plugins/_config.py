"""What loading a config gives: the typed tables, or all problems at once."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import tomli_w
from attrs import validators

from moe_core.plugins._components import Registry, Selected

NONE = "none"
"""How a config spells "switched off": TOML has no null."""


@attrs.frozen
class Problem:
    """What is wrong where: file, key path, value, the rule that it breaks, and a way out."""

    key: str
    """Dotted path, e.g. `mesh.ep`; the tables of an array are named by their type: `transform.fsdp.x`."""
    rule: str
    """What holds for this key, as a sentence without its subject: "must be at least 1"."""
    value: object = attrs.field(factory=lambda: attrs.NOTHING)
    """What stands there; `attrs.NOTHING` where there is nothing to show."""
    hint: str = ""
    """The nearest valid name, or the fix."""
    source: str = ""
    """`file:line:column` of the key, or the command-line word, that set the value. Filled by the loader where empty."""

    def __str__(self) -> str:
        where = f"{self.source}: " if self.source else ""
        value = "" if self.value is attrs.NOTHING else f" = {self.value!r}"
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}{self.key}{value}: {self.rule}{hint}"


class ConfigError(ValueError):
    """All that is wrong with a config; `problems` has the pieces."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} in the config:\n{lines}")


def _default_output_dir(run: "RunConfig") -> str:
    return f"runs/{run.name}"


@attrs.frozen
class RunConfig:
    """The table `[run]`: what no component owns."""

    name: str = attrs.field(default="run", validator=validators.matches_re(r"\w[\w.-]*"))
    """Names the run, and by default its folder."""
    steps: int = attrs.field(default=100, validator=validators.ge(1))
    """Optimizer steps in all, those before a resume included."""
    seed: int = attrs.field(default=0, validator=[validators.ge(0), validators.lt(2**32)])
    """Seed of the weights and of the order of the data."""
    output_dir: str = attrs.field(default=attrs.Factory(_default_output_dir, takes_self=True))
    """Folder for all that the run writes."""
    device_type: str = "auto"
    """"cpu", "cuda", ...; "auto" takes the accelerator that torch finds, else the CPU."""
    threads: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    """CPU threads per rank. Left out: the machine's cores shared out among its ranks."""
    timeout_s: float = attrs.field(default=600.0, validator=[validators.gt(0), validators.le(1e7)])
    """Seconds that a collective may take before the run is given up."""


def _read_only(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(tables))


@attrs.frozen
class Config(Mapping[str, Any]):
    """A complete config: `run`, and for each kind its `Selected`, or a tuple of them (`transform`, `tracker`).

    `config["mesh"].config` is what the mesh component's own config class made of the table `[mesh]`.
    """

    run: RunConfig
    tables: Mapping[str, Any] = attrs.field(converter=_read_only)
    registry: Registry = attrs.field(repr=False, eq=False)
    sources: Mapping[tuple[str, ...], str] = attrs.field(repr=False, eq=False)

    def __getitem__(self, kind: str) -> Any:
        return self.tables[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def selected(self) -> Iterator[Selected]:
        """Every component that the config names, sub-tables included."""
        for value in self.tables.values():
            for selected in value if isinstance(value, tuple) else (value,):
                yield from _nested(selected)

    def to_toml(self) -> str:
        """The config with every value written out; loading this text gives an equal config."""
        return tomli_w.dumps({"run": _plain(self.run), **{kind: _plain(value) for kind, value in self.tables.items()}})


def _nested(selected: Selected) -> Iterator[Selected]:
    yield selected
    for field in attrs.fields(type(selected.config)):
        value = getattr(selected.config, field.name)
        if isinstance(value, Selected):
            yield from _nested(value)


def _plain(value: Any) -> Any:
    if value is None:
        return NONE
    if isinstance(value, Selected):
        return {"type": value.name, **_plain(value.config)}
    if attrs.has(type(value)):
        return {field.name: _plain(getattr(value, field.name)) for field in attrs.fields(type(value)) if field.init}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value

"""What plugins offer, what a config selects of it, and the registry of all that is offered."""

import difflib
import hashlib
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import attrs
import pluggy

_KIND_KEY = "moe_core.component_kind"


def _is_reference(_: object, attribute: "attrs.Attribute[str]", value: str) -> None:
    module, colon, name = value.partition(":")
    if not (module and colon and name):
        raise ValueError(f'Component.{attribute.name} = {value!r}: must be "module:attribute"')


@attrs.frozen
class Component:
    """A named thing of one kind: its config class and its factory, as references that load on demand.

    `config` and `factory` are "module:attribute" strings. The config class is an attrs class that can be
    imported without torch; the factory is called as `factory(config, run)` and may import what it likes.
    """

    kind: str
    name: str
    config: str = attrs.field(validator=_is_reference)
    factory: str = attrs.field(validator=_is_reference)

    def load_config_class(self) -> type:
        return _load(self.config)

    def load_factory(self) -> Any:
        return _load(self.factory)


@attrs.frozen
class Selected:
    """A component together with the config that a table gave it."""

    component: Component
    config: Any

    @property
    def kind(self) -> str:
        return self.component.kind

    @property
    def name(self) -> str:
        return self.component.name

    def build(self, run: object) -> Any:
        """What the component's factory makes of its config and of the run as far as it is built."""
        return self.component.load_factory()(self.config, run)


def component_field(kind: str) -> Any:
    """A field of a config class that holds another component, written as a sub-table with a `type`.

    Its value is a `Selected`, or None where the table is left out.
    """
    return attrs.field(default=None, metadata={_KIND_KEY: kind})


def component_kind(field: "attrs.Attribute[Any]") -> str | None:
    """The kind that a field made by `component_field` takes; None for every other field."""
    return field.metadata.get(_KIND_KEY)


def nearest(name: object, names: Iterable[object], known: str = "") -> str:
    """For a message: which of `names` was meant, or else all of them, introduced by `known`; "" without `known`."""
    words = [str(other) for other in names]
    if near := difflib.get_close_matches(str(name), words, n=1):
        return f"did you mean {near[0]!r}?"
    return f"{known}: {', '.join(words) or 'none'}" if known else ""


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


class UnknownComponentError(ValueError):
    """No loaded plugin offers this kind and name."""


@attrs.frozen
class Entry:
    """A component and the distribution that brought it."""

    component: Component
    distribution: str
    version: str
    plugin: str


@attrs.frozen
class PluginFailure:
    """A plugin that could not be used, and why."""

    distribution: str
    entry_point: str
    error: str

    def __str__(self) -> str:
        return f"plugin {self.entry_point!r} of {self.distribution} failed to load: {self.error}"


@attrs.frozen
class Registry:
    """All components that the loaded plugins offer, in a deterministic order."""

    entries: tuple[Entry, ...]
    failures: tuple[PluginFailure, ...]
    manager: pluggy.PluginManager = attrs.field(repr=False, eq=False)

    def names(self, kind: str) -> list[str]:
        return [entry.component.name for entry in self.entries if entry.component.kind == kind]

    def find(self, kind: str, name: str) -> Entry:
        """The entry for (kind, name); `UnknownComponentError` names the nearest, and plugins that failed."""
        for entry in self.entries:
            if (entry.component.kind, entry.component.name) == (kind, name):
                return entry
        failed = "".join(f"; {failure}" for failure in self.failures)
        hint = nearest(name, self.names(kind), "there are")
        raise UnknownComponentError(f"no {kind} component is called {name!r}; {hint}{failed}")

    def validators(self, plugins: Iterable[str]) -> pluggy.HookCaller:
        """The hook `moe_validate`, of these plugins only."""
        wanted = set(plugins)
        others = [plugin for name, plugin in self.manager.list_name_plugin() if name not in wanted]
        return self.manager.subset_hook_caller("moe_validate", others)

    def fingerprint(self) -> str:
        """A digest of what is loaded; equal on all ranks that can train together."""
        lines = [f"{e.component.kind} {e.component.name} {e.distribution} {e.version}" for e in self.entries]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

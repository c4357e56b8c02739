"""Discovery: which distributions are installed, which of their plugins load, and what they offer."""

import difflib
import hashlib
import logging
import os
import re
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

import attrs
import pluggy

from moe_core.plugins import _specs
from moe_core.plugins._component import Component
from moe_core.plugins.kinds import KINDS

_log = logging.getLogger(__name__)

DISABLE_VARIABLE = "MOE_PLUGINS_DISABLE"


class DuplicateComponentError(ValueError):
    """Two distributions offer the same kind and name."""


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
        names = self.names(kind)
        near = difflib.get_close_matches(name, names, n=1)
        message = f"no {kind} component is called {name!r}; "
        message += f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"
        for failure in self.failures:
            message += f"; {failure}"
        raise UnknownComponentError(message)

    def validators(self, plugins: Iterable[str]) -> pluggy.HookCaller:
        """The hook `moe_validate`, of these plugins only."""
        wanted = set(plugins)
        others = [plugin for name, plugin in self.manager.list_name_plugin() if name not in wanted]
        return self.manager.subset_hook_caller("moe_validate", others)

    def fingerprint(self) -> str:
        """A digest of what is loaded; equal on all ranks that can train together."""
        lines = [f"{e.component.kind} {e.component.name} {e.distribution} {e.version}" for e in self.entries]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def load_registry(points: Iterable[EntryPoint] | None = None) -> Registry:
    """Load every installed plugin that is not disabled; `points` replaces the installed ones.

    A plugin that raises while it is imported, or whose hook raises, is left out with a warning that names
    it, and the others load all the same. `MOE_PLUGINS_DISABLE=dist,...` leaves out distributions.

    Raises:
        DuplicateComponentError: two distributions offer the same (kind, name).
    """
    if points is None:
        points = entry_points(group=_specs.PROJECT)
    manager = pluggy.PluginManager(_specs.PROJECT)
    manager.add_hookspecs(_specs)
    entries: list[Entry] = []
    failures: list[PluginFailure] = []
    for point in _once_each(points):
        distribution, version = _origin(point)
        plugin = f"{distribution}:{point.name}"
        try:
            components = _register(manager, plugin, point)
        except (Exception, SystemExit) as error:  # a stranger's import may raise anything
            failure = PluginFailure(distribution, point.name, f"{type(error).__name__}: {error}")
            _log.warning("%s", failure)
            failures.append(failure)
            continue
        entries += [Entry(component, distribution, version, plugin) for component in components]
    _refuse_duplicates(entries)
    return Registry(tuple(entries), tuple(failures), manager)


def _once_each(points: Iterable[EntryPoint]) -> list[EntryPoint]:
    """Sorted by distribution and name; without those disabled, and without second sightings.

    An editable install can list the same entry point twice.
    """
    disabled = {_normalise(name) for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip()}
    seen: dict[tuple[str, str, str], EntryPoint] = {}
    for point in points:
        distribution = _normalise(_origin(point)[0])
        if distribution not in disabled:
            seen.setdefault((distribution, point.name, point.value), point)
    return [seen[key] for key in sorted(seen)]


def _normalise(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def _origin(point: EntryPoint) -> tuple[str, str]:
    if point.dist is None:
        return "(no distribution)", ""
    return point.dist.name, point.dist.version


def _register(manager: pluggy.PluginManager, plugin: str, point: EntryPoint) -> list[Component]:
    """Import one plugin and ask it for its components; leaves no trace in `manager` if it raises."""
    module = point.load()
    manager.register(module, plugin)
    try:
        _refuse_unknown_hooks(manager, module)
        others = [other for other in manager.get_plugins() if other is not module]
        offered = manager.subset_hook_caller("moe_components", others)()
        components = [component for listed in offered for component in listed]
        for component in components:
            if component.kind not in KINDS:
                near = difflib.get_close_matches(component.kind, KINDS, n=1)
                raise ValueError(
                    f"{component.name!r} has the unknown kind {component.kind!r}; "
                    f"{f'did you mean {near[0]!r}?' if near else 'kinds: ' + ', '.join(KINDS)}"
                )
    except BaseException:
        manager.unregister(module)
        raise
    return components


def _refuse_unknown_hooks(manager: pluggy.PluginManager, module: object) -> None:
    for caller in manager.get_hookcallers(module) or []:
        if not caller.has_spec():
            known = [name for name in vars(_specs) if name.startswith("moe_")]
            raise ValueError(f"implements the unknown hook {caller.name!r}; hooks: {', '.join(known)}")


def _refuse_duplicates(entries: list[Entry]) -> None:
    first: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        key = (entry.component.kind, entry.component.name)
        other = first.setdefault(key, entry)
        if other is not entry:
            raise DuplicateComponentError(
                f"the {key[0]} component {key[1]!r} is offered by both {other.distribution} and "
                f"{entry.distribution}: uninstall one of them, or leave one out with "
                f"{DISABLE_VARIABLE}={entry.distribution}"
            )

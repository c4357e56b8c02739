"""The two hooks that a plugin may implement, and discovery: which installed plugins load, and what they offer."""

import logging
import os
import re
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

import pluggy

from moe_core.plugins._components import Component, Entry, PluginFailure, Registry, nearest
from moe_core.plugins._config import Config, Problem
from moe_core.plugins.kinds import KINDS

_log = logging.getLogger(__name__)

PROJECT = "moe_core"
"""pluggy's name for the project, and the group of its entry points."""

SPEC_VERSION = 1
"""Version of the hook specifications, apart from the version of the distribution."""

DISABLE_VARIABLE = "MOE_PLUGINS_DISABLE"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """The hook specifications; a plugin implements them as functions of its module."""

    @hookspec
    def moe_components(self) -> list[Component]:
        """The components that this plugin offers. Called once, at discovery; must not import torch."""
        raise NotImplementedError

    @hookspec
    def moe_validate(self, config: Config, world_size: int) -> list[Problem]:
        """Problems that need more than one table to see, before any process group exists.

        Called only when the config names a component of this plugin. `config` is complete and typed;
        `world_size` is the number of ranks that the run will have.
        """
        raise NotImplementedError


class DuplicateComponentError(ValueError):
    """Two distributions offer the same kind and name."""


def load_registry(points: Iterable[EntryPoint] | None = None) -> Registry:
    """Load every installed plugin that is not disabled; `points` replaces the installed ones.

    A plugin that raises while it is imported, or whose hook raises, is left out with a warning that names
    it, and the others load all the same. `MOE_PLUGINS_DISABLE=dist,...` leaves out distributions.

    Raises:
        DuplicateComponentError: two distributions offer the same (kind, name).
    """
    if points is None:
        points = entry_points(group=PROJECT)
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
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
                hint = nearest(component.kind, KINDS, "kinds")
                raise ValueError(f"{component.name!r} has the unknown kind {component.kind!r}; {hint}")
    except BaseException:
        manager.unregister(module)
        raise
    return components


def _refuse_unknown_hooks(manager: pluggy.PluginManager, module: object) -> None:
    for caller in manager.get_hookcallers(module) or []:
        if not caller.has_spec():
            known = [name for name in vars(Hooks) if name.startswith("moe_")]
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

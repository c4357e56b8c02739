"""The two hooks that a plugin may implement."""

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from moe_core.config import Config
    from moe_core.plugins._component import Component
    from moe_core.plugins._problem import Problem

PROJECT = "moe_core"

SPEC_VERSION = 1
"""Version of the hook specifications, apart from the version of the distribution."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def moe_components() -> "list[Component]":
    """The components that this plugin offers. Called once, at discovery; must not import torch."""
    raise NotImplementedError


@hookspec
def moe_validate(config: "Config", world_size: int) -> "list[Problem]":
    """Problems that need more than one table to see, before any process group exists.

    Called only when the config names a component of this plugin. `config` is complete and typed;
    `world_size` is the number of ranks that the run will have.
    """
    raise NotImplementedError

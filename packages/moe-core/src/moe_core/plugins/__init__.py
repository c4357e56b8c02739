"""The plugin host: components that any installed distribution offers, found through entry points.

A distribution takes part by naming a module in the entry-point group `moe_core` and implementing
`moe_components` there:

    from moe_core.plugins import Component, hookimpl

    @hookimpl
    def moe_components():
        return [Component("loss", "my_loss", config="my_pkg.conf:MyLossConfig", factory="my_pkg.loss:build")]

A config then selects it by name (`[loss] type = "my_loss"`). Nothing in here imports torch.
"""

from moe_core.plugins._components import Component as Component
from moe_core.plugins._components import Entry as Entry
from moe_core.plugins._components import PluginFailure as PluginFailure
from moe_core.plugins._components import Registry as Registry
from moe_core.plugins._components import Selected as Selected
from moe_core.plugins._components import UnknownComponentError as UnknownComponentError
from moe_core.plugins._components import component_field as component_field
from moe_core.plugins._components import component_kind as component_kind
from moe_core.plugins._config import Config as Config
from moe_core.plugins._config import ConfigError as ConfigError
from moe_core.plugins._config import Problem as Problem
from moe_core.plugins._config import RunConfig as RunConfig
from moe_core.plugins._host import SPEC_VERSION as SPEC_VERSION
from moe_core.plugins._host import DuplicateComponentError as DuplicateComponentError
from moe_core.plugins._host import hookimpl as hookimpl
from moe_core.plugins._host import load_registry as load_registry
from moe_core.plugins.kinds import Batch as Batch
from moe_core.plugins.kinds import LossOutput as LossOutput
from moe_core.plugins.kinds import Run as Run
from moe_core.plugins.kinds import RunOrderError as RunOrderError

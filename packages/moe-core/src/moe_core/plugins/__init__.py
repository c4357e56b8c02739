"""The plugin host: components that any installed distribution offers, found through entry points.

A distribution takes part by naming a module in the entry-point group `moe_core` and implementing
`moe_components` there:

    from moe_core.plugins import Component, hookimpl

    @hookimpl
    def moe_components():
        return [Component("loss", "my_loss", config="my_pkg.conf:MyLossConfig", factory="my_pkg.loss:build")]

A config then selects it by name (`[loss] type = "my_loss"`). Nothing in here imports torch.
"""

from moe_core.plugins._component import Component as Component
from moe_core.plugins._component import Selected as Selected
from moe_core.plugins._component import component_field as component_field
from moe_core.plugins._host import DuplicateComponentError as DuplicateComponentError
from moe_core.plugins._host import Entry as Entry
from moe_core.plugins._host import PluginFailure as PluginFailure
from moe_core.plugins._host import Registry as Registry
from moe_core.plugins._host import UnknownComponentError as UnknownComponentError
from moe_core.plugins._host import load_registry as load_registry
from moe_core.plugins._problem import Problem as Problem
from moe_core.plugins._run import Run as Run
from moe_core.plugins._run import RunOrderError as RunOrderError
from moe_core.plugins._specs import SPEC_VERSION as SPEC_VERSION
from moe_core.plugins._specs import hookimpl as hookimpl
from moe_core.plugins.kinds import Batch as Batch
from moe_core.plugins.kinds import LossOutput as LossOutput

"""What a plugin registers, and what a config selects."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from moe_core.plugins._run import Run

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

    def build(self, run: "Run") -> Any:
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


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)

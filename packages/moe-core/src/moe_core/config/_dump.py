"""A config as TOML, with every value written out."""

from typing import TYPE_CHECKING, Any

import attrs
import tomli_w

from moe_core.plugins import Selected

if TYPE_CHECKING:
    from moe_core.config._config import Config

NONE = "none"
"""How a config spells "switched off": TOML has no null."""


def to_toml(config: "Config") -> str:
    tables = {"run": _plain(config.run)}
    for kind, value in config.tables.items():
        tables[kind] = _plain(value)
    return tomli_w.dumps(tables)


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

"""Plain tables to attrs classes through cattrs, without coercion, with every problem and its key path."""

import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

import attrs
from cattrs import (
    AttributeValidationNote,
    ClassValidationError,
    Converter,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn, override

from moe_core.config._positions import dotted
from moe_core.plugins import Problem, Registry, Selected, UnknownComponentError, component_kind
from moe_core.plugins._components import nearest
from moe_core.plugins._config import NONE


class _Broken(ValueError):
    """A value breaks a rule."""

    def __init__(self, rule: str, value: object = attrs.NOTHING, hint: str = "", key: str | None = None) -> None:
        super().__init__(rule)
        self.rule, self.value, self.hint, self.key = rule, value, hint, key


def structure(cls: type, table: Any, path: tuple[str, ...], registry: Registry) -> tuple[Any, list[Problem]]:
    """`table` as a `cls`, or None and what is wrong with it. `path` is where the table stands."""
    try:
        return _converter(registry).structure(table, cls), []
    except Exception as error:  # whatever a config class of a stranger raises is a problem of the config
        return None, list(_problems(error, path))


def structure_selected(
    kind: str, table: Any, default: str | None, path: tuple[str, ...], registry: Registry
) -> tuple[Selected | None, list[Problem]]:
    """A table with a `type` as the component of that name; `default` where it has none."""
    try:
        return _select(kind, table, default, registry, _converter(registry)), []
    except Exception as error:  # as above
        return None, list(_problems(error, path))


def _select(kind: str, table: Any, default: str | None, registry: Registry, converter: Converter) -> Selected:
    if not isinstance(table, dict):
        raise _Broken(f"must be a table with the type of a {kind}", table)
    name = table.get("type", default)
    if not isinstance(name, str):
        known = ", ".join(registry.names(kind))
        raise _Broken(f"must name a {kind} component", name, f"there are: {known}", key="type")
    try:
        component = registry.find(kind, name).component
    except UnknownComponentError as error:
        raise _Broken(str(error), name, key="type") from None
    fields = {key: value for key, value in table.items() if key != "type"}
    return Selected(component, converter.structure(fields, component.load_config_class()))


def _converter(registry: Registry) -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=True)
    for kind in (bool, int, float, str):
        converter.register_structure_hook(kind, _exactly)
    converter.register_structure_hook_factory(_is_optional, lambda cls: _optional(cls, converter))
    converter.register_structure_hook_factory(_is_value_or_table, lambda cls: _value_or_table(cls, converter))
    converter.register_structure_hook_factory(_is_literal, lambda _: _literal)
    converter.register_structure_hook_factory(_is_array, lambda cls: _array(cls, converter))
    converter.register_structure_hook_factory(attrs.has, lambda cls: _attrs_class(cls, registry, converter))
    return converter


def _exactly(value: Any, cls: type) -> Any:
    """No coercion but int -> float: "false" is no bool, 7.9 no int, and True no int either."""
    if cls is float and type(value) is int:
        return float(value)
    if type(value) is not cls:
        raise _Broken(f"must be {_NAMES[cls]}, not {_NAMES.get(type(value), type(value).__name__)}", value)
    return value


_NAMES = {
    bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "an array", dict: "a table",
}  # fmt: skip


def _is_optional(cls: Any) -> bool:
    return get_origin(cls) in (Union, types.UnionType) and type(None) in get_args(cls)


def _optional(cls: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    inner = [option for option in get_args(cls) if option is not type(None)]
    target: Any = inner[0] if len(inner) == 1 else Union[tuple(inner)]  # noqa: UP007 - built at run time

    def hook(value: Any, _: Any) -> Any:
        return None if value is None or value == NONE else converter.structure(value, target)

    return hook


def _is_value_or_table(cls: Any) -> bool:
    """`str | SomeAttrsClass`: the short and the long way to write one thing."""
    options = get_args(cls)
    return get_origin(cls) in (Union, types.UnionType) and len(options) == 2 and sum(map(attrs.has, options)) == 1


def _value_or_table(cls: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    table, plain = sorted(get_args(cls), key=attrs.has, reverse=True)

    def hook(value: Any, _: Any) -> Any:
        return converter.structure(value, table if isinstance(value, dict) else plain)

    return hook


def _is_literal(cls: Any) -> bool:
    return get_origin(cls) is Literal


def _literal(value: Any, cls: Any) -> Any:
    options = get_args(cls)
    if not any(type(value) is type(option) and value == option for option in options):
        raise _Broken(f"must be one of {', '.join(map(repr, options))}", value, nearest(value, options))
    return value


def _is_array(cls: Any) -> bool:
    return get_origin(cls) in (tuple, list)


def _array(cls: Any, converter: Converter) -> Callable[[Any, Any], Any]:
    args = get_args(cls)
    fixed = get_origin(cls) is tuple and not (len(args) == 2 and args[1] is Ellipsis)

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _Broken(f"must be an array, not {_NAMES.get(type(value), type(value).__name__)}", value)
        if fixed and len(value) != len(args):
            raise _Broken(f"must have {len(args)} items, not {len(value)}", value)
        targets = args if fixed else [args[0]] * len(value)
        items, errors = [], []
        for position, (item, target) in enumerate(zip(value, targets, strict=True)):
            try:
                items.append(converter.structure(item, target))
            except Exception as error:  # every item reports for itself
                error.add_note(IterableValidationNote(f"item {position}", position, target))
                errors.append(error)
        if errors:
            raise IterableValidationError("array", errors, list)
        return get_origin(cls)(items)

    return hook


def _attrs_class(cls: type, registry: Registry, converter: Converter) -> Callable[[Any, Any], Any]:
    overrides: dict[str, Any] = {}
    for field in attrs.fields(attrs.resolve_types(cls)):
        kind = component_kind(field)
        if kind is None:
            overrides[field.name] = override(struct_hook=_field_hook(field, converter))
        else:
            overrides[field.name] = override(struct_hook=_component_hook(kind, registry, converter))
    build: Callable[[Any, Any], Any] = make_dict_structure_fn(
        cls, converter, _cattrs_forbid_extra_keys=True, **overrides
    )

    def hook(value: Any, target: Any) -> Any:
        if not isinstance(value, dict):
            raise _Broken(f"must be a table, not {_NAMES.get(type(value), type(value).__name__)}", value)
        return build(value, target)

    return hook


def _field_hook(field: "attrs.Attribute[Any]", converter: Converter) -> Callable[[Any, Any], Any]:
    """Type first, then the field's own validator, so that each field reports for itself."""

    def hook(value: Any, _: Any) -> Any:
        assert field.type is not None
        result = converter.structure(value, field.type)
        if field.validator is not None:
            try:
                field.validator(None, field, result)
            except ValueError as error:
                raise _broken_rule(error, field, value) from None
        return result

    return hook


def _broken_rule(error: ValueError, field: "attrs.Attribute[Any]", value: object) -> _Broken:
    """What a validator said, less the name and value that the problem has already.

    An error with attributes `rule` and `hint` says them apart; of others the message is the rule.
    """
    if isinstance(rule := getattr(error, "rule", None), str):
        return _Broken(rule, value, str(getattr(error, "hint", "")))
    return _Broken(_rule_of(error, field, value), value)


def _rule_of(error: ValueError, field: "attrs.Attribute[Any]", value: object) -> str:
    message = str(error.args[0] if error.args else error)
    message = message.removeprefix(f"'{field.name}' ").removeprefix(f"{field.name} = {value!r}: ")
    return message.split(" (got ")[0].split(": ")[0] if message.startswith("must ") else message


def _component_hook(kind: str, registry: Registry, converter: Converter) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        return None if value is None or value == NONE else _select(kind, value, None, registry, converter)

    return hook


def _problems(error: BaseException, path: tuple[str, ...]) -> "list[Problem]":
    """The leaves of cattrs' tree of errors, each with its key path."""
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            path = (*path, note.name)
        elif isinstance(note, IterableValidationNote):
            path = (*path, str(note.index))
    key = dotted(path)
    if isinstance(error, (ClassValidationError, IterableValidationError)):
        return [problem for inner in error.exceptions for problem in _problems(inner, path)]
    if isinstance(error, ForbiddenExtraKeysError):
        names = [field.name for field in attrs.fields(error.cl)]
        return [
            Problem(dotted((*path, name)), "is not a key of this table", hint=nearest(name, names, "keys"))
            for name in sorted(error.extra_fields)
        ]
    if isinstance(error, _Broken):
        key = f"{key}.{error.key}" if error.key else key
        return [Problem(key, error.rule, error.value, error.hint)]
    if isinstance(error, KeyError):
        return [Problem(key, "is required")]
    return [Problem(key, str(error))]

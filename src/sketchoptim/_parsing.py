"""Tables of a TOML or JSON file as dataclasses; errors name the key and what it may be."""

import dataclasses
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def parse_table(kind: type[T], table: object, *, where: str, **given: Any) -> T:
    """The dataclass `kind` made from a table; `given` are fields that do not come from it.

    Example:
        >>> @dataclasses.dataclass
        ... class Sizes:
        ...     dim: int
        >>> parse_table(Sizes, {"dims": 3}, where="small.model")
        Traceback (most recent call last):
        ...
        ValueError: small.model.dims is not known; allowed are dim
    """
    table = check_table(table, where=where)
    hints = get_type_hints(kind)
    assert dataclasses.is_dataclass(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    allowed = [name for name in fields if name not in given]
    for key in table:
        if key not in allowed:
            raise ValueError(f"{where}.{key} is not known; allowed are {', '.join(allowed)}")
    for name in allowed:
        field = fields[name]
        has_default = not (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if name not in table and not has_default:
            raise ValueError(f"{where}.{name} is missing")
    values = {key: _value(hints[key], value, f"{where}.{key}") for key, value in table.items()}
    try:
        return kind(**values, **given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def check_table(value: object, *, where: str) -> Mapping[str, Any]:
    """The value, if it is a table."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a table, got {value!r}")
    return value


def _value(hint: Any, value: object, where: str) -> object:
    """The value, checked against a type: a number, a string, a Literal, a tuple or None of such."""
    others = [kind for kind in get_args(hint) if kind is not NoneType]
    if get_origin(hint) is UnionType and len(others) == 1:
        return None if value is None else _value(others[0], value, where)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(f"{where} must be one of {list(get_args(hint))}, got {value!r}")
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, got {value!r}")
        return tuple(_value(get_args(hint)[0], item, where) for item in value)
    if get_origin(hint) is dict:
        table = check_table(value, where=where)
        of_values = get_args(hint)[1]
        return {key: _value(of_values, item, f"{where}.{key}") for key, item in table.items()}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        int: isinstance(value, int) and is_number,
        float: is_number,
        bool: isinstance(value, bool),
        str: isinstance(value, str),
    }
    if not fits.get(hint, True):
        raise ValueError(f"{where} must be {_ARTICLES[hint]}, got {value!r}")
    return value


_ARTICLES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}

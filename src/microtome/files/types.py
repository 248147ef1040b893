"""Convert dataclasses to plain data and back, and check values from files, by the annotations of the classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

#: Builds a value of a type from plain data.
Build = Callable[[Any], Any]
#: Compares a value with a type: where it is not of it and what is there, or None if it is.
Check = Callable[[Any], str | None]

#: Numbers are below this, so that sums and products of them are numbers too.
_MOST = 1e100


def to_plain(value: Any) -> Any:
    """A value as dicts, lists, numbers and strings; dataclasses and named tuples are dicts of their fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        return {name: to_plain(part) for name, part in value._asdict().items()}
    if isinstance(value, list | tuple):
        return [to_plain(part) for part in value]
    return {key: to_plain(part) for key, part in value.items()} if isinstance(value, dict) else value


def from_plain(data: dict[str, Any], cls: type[Any]) -> Any:
    """The instance of a class that `to_plain` made the dict of; fields that the class does not have are ignored.

    A field whose default is None or NaN, unknown, may be missing: files of an older microtome lack it. A part that is
    not of its type is left as it is, for `mismatch` to find.
    """
    return _construct(cls, _parts(cls), data)


def _parts(cls: Any) -> list[tuple[str, Build, bool]]:
    """The fields of a class, how each is built, and whether it may be missing."""
    hints = get_type_hints(cls)
    defaults = {field.name: field.default for field in fields(cls)} if is_dataclass(cls) else cls._field_defaults
    names = defaults if is_dataclass(cls) else cls._fields
    unknown = [name for name, default in defaults.items() if default is None or default != default]
    return [(name, _build_of(hints[name]), name in unknown) for name in names]


def _construct(cls: Any, parts: list[tuple[str, Build, bool]], data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    for name, _, may_be_missing in parts:
        if name not in data and not may_be_missing:
            raise ValueError(f"expected the field {name!r} of {cls.__name__}")
    return cls(**{name: make(data[name]) for name, make, _ in parts if name in data})


@cache
def _build_of(hint: Any) -> Build:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        some = [_build_of(part) for part in parts if part is not NoneType]
        return some[0] if len(some) == 1 else _as_it_is
    if origin is tuple and parts[1:] == (...,):
        item = _build_of(parts[0])
        return lambda data: tuple(map(item, data)) if isinstance(data, list) else data
    if origin is tuple:
        return lambda data: tuple(data) if isinstance(data, list) else data
    if origin is dict:
        value = _build_of(parts[1])
        return lambda data: {key: value(part) for key, part in data.items()} if isinstance(data, dict) else data
    if hasattr(hint, "from_dict"):
        made: Build = hint.from_dict
        return made
    return partial(_construct, hint, _parts(hint)) if is_dataclass(hint) or hasattr(hint, "_fields") else _as_it_is


def _as_it_is(data: Any) -> Any:
    return data


def find_mismatch(value: Any, hint: Any, *, finite: bool = True) -> str | None:
    """Say where a value is not of the type that it is annotated with, and what is there; None where it is.

    It looks at dataclasses, named tuples, tuples of any or of a fixed length, lists, dicts, numbers, strings, booleans
    and literals.

    Args:
        finite: Whether a float must be one that results hold; else it may be any.
    """
    return _check_of(hint, finite)(value)


@cache
def _check_of(hint: Any, finite: bool) -> Check:
    """The check for a type, cached since a profile has a hundred numbers a call."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _in_union(
            [_check_of(part, finite) for part in parts if part is not NoneType], is_optional=NoneType in parts
        )
    if origin is Literal:
        return partial(_one_of, parts)
    if origin is list:
        return partial(_in_items, _check_of(parts[0], finite), enumerate, list)
    if origin is tuple and parts[1:] == (...,):
        return partial(_in_items, _check_of(parts[0], finite), enumerate, tuple)
    if origin is tuple:
        return partial(_in_places, [_check_of(part, finite) for part in parts])
    if origin is dict:
        return partial(_in_items, _check_of(parts[1], finite), dict.items, dict)
    if is_dataclass(hint) or hasattr(hint, "_fields"):  # or a named tuple
        hints = get_type_hints(hint)
        names = [field.name for field in fields(hint)] if is_dataclass(hint) else hint._fields
        return partial(_in_fields, hint, [(name, _check_of(hints[name], finite)) for name in names])
    if hint is float and not finite:
        return lambda value: None if type(value) is float else _number(value)
    return _SIMPLE.get(hint, _nothing)


def _nothing(value: Any) -> None:
    return None


def _one_of(parts: tuple[Any, ...], value: Any) -> str | None:
    return None if type(value) is str and value in parts else f": expected one of {parts}, got {value!r:.80}"


def _whole(value: Any) -> str | None:
    return None if type(value) is int and abs(value) < _MOST else f": expected a whole number, got {value!r:.80}"


def _number(value: Any) -> str | None:
    # NaN is not in files: there it is a string. It is the default of fields that files of before have not got.
    return (
        None if type(value) in (int, float) and not abs(value) >= _MOST else f": expected a number, got {value!r:.80}"
    )


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else f": expected a string, got {value!r:.80}"


def _truth(value: Any) -> str | None:
    return None if isinstance(value, bool) else f": expected true or false, got {value!r:.80}"


_SIMPLE: dict[Any, Check] = {int: _whole, float: _number, str: _text, bool: _truth}


def _in_union(checks: list[Check], *, is_optional: bool) -> Check:
    def check(value: Any) -> str | None:
        wrong = None
        for one in () if is_optional and value is None else checks:
            if (wrong := one(value)) is None:
                return None
        return wrong

    return check


def _in_fields(kind: Any, checks: list[tuple[str, Check]], value: Any) -> str | None:
    if not isinstance(value, kind):
        return f": expected a {kind.__name__}, got {value!r:.80}"
    for name, check in checks:
        if (wrong := check(getattr(value, name))) is not None:
            return f".{name}{wrong}"
    return None


def _in_places(checks: list[Check], value: Any) -> str | None:
    if not isinstance(value, tuple) or len(value) != len(checks):
        return f": expected a tuple of {len(checks)}, got {value!r:.80}"
    for at, (check, part) in enumerate(zip(checks, value, strict=True)):
        if (wrong := check(part)) is not None:
            return f"[{at}]{wrong}"
    return None


def _in_items(check: Check, pairs: Callable[[Any], Iterable[Any]], kind: type, value: Any) -> str | None:
    if not isinstance(value, kind):
        return f": expected a {kind.__name__}, got {value!r:.80}"
    for key, part in pairs(value) if check is not _nothing else ():
        if (wrong := check(part)) is not None:
            return f"[{key!r:.80}]{wrong}"
    return None

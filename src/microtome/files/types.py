"""Convert dataclasses to plain data and back, and check values from files against annotations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

#: Builds a value of a type from plain data.
Builder = Callable[[Any], Any]
#: Returns the location of the first value of a wrong type, and that value; None if there is none.
Check = Callable[[Any], str | None]

_SCALARS = (int, float, str, bool, NoneType)

#: Numbers are smaller, so that sums and products of them are finite.
_MAX_NUMBER = 1e100


def to_plain(value: Any, *, compact: bool = False) -> Any:
    """Convert a value to dicts, lists, numbers and strings; dataclasses and named tuples become dicts.

    Args:
        compact: Omit the fields of named tuples that have their default, if that is None or empty.
    """
    cls: Any = type(value)
    return _dumper(cls, compact)(value)


@cache
def _dumper(cls: Any, compact: bool) -> Callable[[Any], Any]:
    """Return the conversion of a type, cached since a boundary has many small records."""
    dump = partial(to_plain, compact=compact)
    if is_dataclass(cls) or hasattr(cls, "_fields"):
        names = [field.name for field in fields(cls)] if is_dataclass(cls) else cls._fields
        defaults = getattr(cls, "_field_defaults", {}) if compact else {}
        if empty := {name: default for name, default in defaults.items() if default is None or default == ()}:
            return lambda value: {
                name: dump(item)
                for name, item in zip(names, value, strict=True)
                if name not in empty or item != empty[name]
            }
        return lambda value: {name: dump(getattr(value, name)) for name in names}
    if issubclass(cls, list | tuple):
        return lambda value: [item if type(item) in _SCALARS else dump(item) for item in value]
    if issubclass(cls, dict):
        return lambda value: {key: dump(item) for key, item in value.items()}
    return _identity


def from_plain(data: dict[str, Any], cls: Any) -> Any:
    """Build an instance of a class from the dict of `to_plain`; unknown fields are ignored.

    A field whose default is None, NaN or empty may be missing, as in files of an older microtome. Values of a wrong
    type are left for `find_mismatch`. The members of a union of named tuples are told apart by the default of a field
    `kind`.
    """
    return _construct(cls, _fields_of(cls), data)


class _Field(NamedTuple):
    """A field of a dataclass or named tuple."""

    name: str
    hint: Any
    build: Builder
    is_optional: bool


@cache
def _fields_of(cls: Any) -> list[_Field]:
    hints = get_type_hints(cls)
    if is_dataclass(cls):
        defaults = {field.name: field.default for field in fields(cls)}
    else:
        defaults = {name: cls._field_defaults.get(name, MISSING) for name in cls._fields}
    return [
        _Field(name, hints[name], _builder(hints[name]), default is None or default == () or default != default)
        for name, default in defaults.items()
    ]


def _construct(cls: Any, fields: list[_Field], data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    values = {}
    for name, _, build, is_optional in fields:
        if name in data:
            values[name] = build(data[name])
        elif not is_optional:
            raise ValueError(f"expected the field {name!r} of {cls.__name__}")
    return cls(**values)


@cache
def _builder(hint: Any) -> Builder:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if (members := _tagged_members(args)) is not None:
            return partial(_construct_tagged, {tag: _builder(member) for tag, member in members.items()})
        builders = [_builder(arg) for arg in args if arg is not NoneType]
        return builders[0] if len(builders) == 1 else _identity
    if origin is tuple:
        item = _builder(args[0]) if args[1:] == (...,) else _identity
        return lambda data: tuple(map(item, data)) if isinstance(data, list) else data
    if origin is dict:
        value = _builder(args[1])
        return lambda data: {key: value(item) for key, item in data.items()} if isinstance(data, dict) else data
    if hasattr(hint, "from_dict"):
        from_dict: Builder = hint.from_dict
        return lambda data: from_dict(data) if isinstance(data, dict) else data
    return partial(_construct, hint, _fields_of(hint)) if is_dataclass(hint) or hasattr(hint, "_fields") else _identity


def _identity(data: Any) -> Any:
    return data


def _tagged_members(members: tuple[Any, ...]) -> dict[str, Any] | None:
    """The members of a union by their tag, the default of a field `kind`; None if one has no tag."""
    tags: dict[Any, Any] = {getattr(member, "_field_defaults", {}).get("kind"): member for member in members}
    return None if None in tags else tags


def _construct_tagged(builders: dict[str, Builder], data: Any) -> Any:
    kind = data.get("kind") if isinstance(data, dict) else None
    return builders[kind](data) if isinstance(kind, str) and kind in builders else data


def find_mismatch(value: Any, hint: Any, *, finite: bool = True) -> str | None:
    """Find the first value that is not of its annotated type; return its location and a description, or None.

    Dataclasses, named tuples, tuples, lists, dicts, numbers, strings, booleans, literals and unions are checked.

    Args:
        finite: Refuse numbers beyond those of results, such as infinity.
    """
    return _check(hint, finite)(value)


@cache
def _check(hint: Any, finite: bool) -> Check:
    """Return the check of a type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if (members := _tagged_members(args)) is not None:
            return partial(_check_tagged, {member: _check(member, finite) for member in members.values()})
        return partial(_check_union, args, [_check(arg, finite) for arg in args if arg is not NoneType])
    if origin is Literal:
        return _expect(f"one of {args}", lambda value: type(value) is str and value in args)
    if origin is tuple and args[1:] != (...,):
        return partial(_check_tuple, [_check(arg, finite) for arg in args])
    if origin in (list, tuple, dict):
        return partial(_check_items, origin, _check(args[1] if origin is dict else args[0], finite))
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        return partial(_check_fields, hint, [(field.name, _check(field.hint, finite)) for field in _fields_of(hint)])
    if not finite and hint in (int, float):
        types = (int, float) if hint is float else (int,)
        return lambda value: None if type(value) in types else _SIMPLE[hint](value)
    return _SIMPLE.get(hint, _accept)


def _accept(value: Any) -> None:
    return None


def _expect(description: str, is_valid: Callable[[Any], bool]) -> Check:
    return lambda value: None if is_valid(value) else f": expected {description}, got {value!r:.80}"


_SIMPLE: dict[Any, Check] = {
    int: _expect("an integer", lambda value: type(value) is int and abs(value) < _MAX_NUMBER),
    # NaN is valid: it is the default of fields that older files lack. Files contain it as a string only.
    float: _expect("a number", lambda value: type(value) in (int, float) and not abs(value) >= _MAX_NUMBER),
    str: _expect("a string", lambda value: isinstance(value, str)),
    bool: _expect("true or false", lambda value: isinstance(value, bool)),
}


def _check_union(members: tuple[Any, ...], checks: list[Check], value: Any) -> str | None:
    if value is None and NoneType in members:
        return None
    mismatches = [check(value) for check in checks]
    if None in mismatches or len(checks) == 1:
        return None if None in mismatches else mismatches[0]
    *names, last = ({str: "string", NoneType: "None"}.get(member, member.__name__) for member in members)
    return f": expected a {', '.join(names)} or {last}, got {value!r:.80}"


def _check_tagged(checks: dict[Any, Check], value: Any) -> str | None:
    if type(value) not in checks:
        return f": expected a {' or '.join(member.__name__ for member in checks)}, got {value!r:.80}"
    return checks[type(value)](value)


def _check_fields(cls: Any, checks: list[tuple[str, Check]], value: Any) -> str | None:
    if not isinstance(value, cls):
        return f": expected a {cls.__name__}, got {value!r:.80}"
    for name, check in checks:
        if (mismatch := check(getattr(value, name))) is not None:
            return f".{name}{mismatch}"
    return None


def _check_tuple(checks: list[Check], value: Any) -> str | None:
    if not isinstance(value, tuple) or len(value) != len(checks):
        return f": expected a tuple of {len(checks)}, got {value!r:.80}"
    for index, (check, item) in enumerate(zip(checks, value, strict=True)):
        if (mismatch := check(item)) is not None:
            return f"[{index}]{mismatch}"
    return None


def _check_items(cls: Any, check: Check, value: Any) -> str | None:
    if not isinstance(value, cls):
        return f": expected a {cls.__name__}, got {value!r:.80}"
    if check is not _accept:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if (mismatch := check(item)) is not None:
                return f"[{key!r:.80}]{mismatch}"
    return None

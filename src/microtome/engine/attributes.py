"""Read the attributes of any object without running code of its class, such as properties."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from types import FunctionType, MemberDescriptorType
from typing import Any


def dict_of(value: Any) -> dict[str, Any]:
    """The `__dict__` of an object, read past a `__getattribute__` of its class; an empty one if it has none."""
    try:
        namespace: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return namespace


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes in the `__dict__` and the slots of an object, sorted by name."""
    attributes = dict(dict_of(value))
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # it has not been set
                    attributes[name] = member.__get__(value)
    return dict(sorted(attributes.items()))


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass instance, read without running its properties; None for a field without a value."""
    namespace = dict_of(value)
    names = (field.name for field in fields(value))
    return {name: namespace[name] if name in namespace else _class_value(value, name) for name in names}


def _class_value(value: Any, name: str) -> Any:
    """The value of a slot or of a plain class attribute; None for a property, which would run code."""
    member = next((vars(base)[name] for base in type(value).__mro__ if name in vars(base)), None)
    if isinstance(member, MemberDescriptorType):
        with suppress(AttributeError):  # it has not been set
            return member.__get__(value)
        return None
    return None if hasattr(type(member), "__get__") else member


def read_attribute(value: Any, name: str) -> Any:
    """An attribute of any object, read without running code of its class; None if that is not possible."""
    hooks = ("__getattribute__", "__getattr__", name)
    if any(isinstance(vars(base).get(hook), FunctionType | property) for base in type(value).__mro__ for hook in hooks):
        return dict_of(value).get(name)
    return getattr(value, name, None)

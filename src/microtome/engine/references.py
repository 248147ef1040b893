"""Which globals the code of a model refers to, and which it assigns."""

from __future__ import annotations

import dis
import weakref
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn


class Global(NamedTuple):
    """A name in the namespace of a Python module."""

    namespace: dict[str, Any]
    name: str
    is_assigned: bool


_known: weakref.WeakKeyDictionary[type, tuple[Any, list[Global]]] = weakref.WeakKeyDictionary()


def globals_of(classes: Iterable[type]) -> list[Global]:
    """The globals that `forward` of these classes refers to, itself and in what it calls of the same package.

    Read from compiled code: what is reached by `getattr` with a computed name, or through another package, is missed.
    """
    found: dict[tuple[int, str], Global] = {}
    for cls in classes:
        forward = getattr(cls, "forward", None)
        known = _known.get(cls)
        if known is None or known[0] is not forward:
            known = _known[cls] = forward, list(_search(cls))
        for one in known[1]:
            key = id(one.namespace), one.name
            if key not in found or one.is_assigned:
                found[key] = one
    return list(found.values())


def _search(cls: type) -> Iterator[Global]:
    own = [base for base in cls.__mro__ if base is not object and not base.__module__.startswith("torch.")]
    methods: dict[str, list[FunctionType]] = {}
    for base in own:
        for name, value in vars(base).items():
            if (function := _function_of(value)) is not None:
                methods.setdefault(name, []).append(function)
    pending = [*methods.get("forward", []), *methods.get("__call__", [])]
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        names, assigned = _names_in(function.__code__)
        namespace, package = function.__globals__, _package(function.__module__)
        spaces = [namespace]
        for name in names:
            pending.extend(methods.get(name, ()))
            value = namespace.get(name)
            if isinstance(value, ModuleType) and _package(value.__name__) == package:
                spaces.append(vars(value))
        for space in spaces:
            for name in names:
                callee = _function_of(space.get(name))
                if callee is not None and _package(callee.__module__) == package:
                    pending.append(callee)
                elif name in space or name in assigned:
                    yield Global(space, name, space is namespace and name in assigned)


def _function_of(value: Any) -> FunctionType | None:
    """A function in whatever decorates it."""
    for name in ("fget", "__func__", "__wrapped__"):
        value = getattr(value, name, value) if not isinstance(value, ModuleType | nn.Module) else None
    return value if isinstance(value, FunctionType) else None


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


@lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names that code refers to, with those of functions inside it; and the globals that it assigns or deletes."""
    instructions = dis.get_instructions(code)
    assigned = {one.argval for one in instructions if one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inside, also = _names_in(constant)
            names |= inside
            assigned |= also
    return frozenset(names), frozenset(assigned)

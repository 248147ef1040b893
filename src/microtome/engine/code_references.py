"""Globals, closures and function caches that the code of a model refers to."""

from __future__ import annotations

import dis
import weakref
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from microtome.engine.pytree import read_attribute


class Global(NamedTuple):
    """A name in the namespace of a Python module."""

    namespace: dict[str, Any]
    name: str
    is_assigned: bool


class Holder(NamedTuple):
    """A place that holds a function: a name in a namespace, an attribute of a class, or a cell of a closure."""

    place: dict[str, Any] | type | CellType
    name: str = ""

    def get(self) -> Any:
        if isinstance(self.place, CellType):
            return _content(self.place)
        return (self.place if isinstance(self.place, dict) else vars(self.place)).get(self.name)

    def set(self, value: Any) -> None:
        if isinstance(self.place, CellType):
            self.place.cell_contents = value
        elif isinstance(self.place, dict):
            self.place[self.name] = value
        else:
            setattr(self.place, self.name, value)


class References(NamedTuple):
    """Globals, closures and caches that the code of some classes refers to.

    Attributes:
        functions: The functions that it may call; they may keep state in closures, defaults and attributes.
        caches: The holders of `functools.lru_cache` functions that it may call.
    """

    globals: list[Global]
    functions: list[FunctionType]
    caches: list[Holder]


Cached = type(lru_cache(int))
_known: weakref.WeakKeyDictionary[type, tuple[Any, References]] = weakref.WeakKeyDictionary()


def references_of(classes: Iterable[type]) -> References:
    """Find what `forward` of these classes refers to, itself and in what it calls of the same package.

    Read from compiled code: what is reached by `getattr` with a computed name, or through another package, is missed.
    """
    found: dict[tuple[int, str], Global] = {}
    functions: dict[int, FunctionType] = {}
    caches: dict[tuple[int, str], Holder] = {}
    for cls in classes:
        forward = getattr(cls, "forward", None)
        known = _known.get(cls)
        if known is None or known[0] is not forward:
            search = _Search(cls)
            known = _known[cls] = forward, References(list(search.run()), search.functions, search.caches)
        for one in known[1].globals:
            key = id(one.namespace), one.name
            if key not in found or one.is_assigned:
                found[key] = one
        functions.update((id(function), function) for function in known[1].functions)
        caches.update(((id(holder.place), holder.name), holder) for holder in known[1].caches)
    return References(list(found.values()), list(functions.values()), list(caches.values()))


def globals_of(classes: Iterable[type]) -> list[Global]:
    """The globals among what these classes refer to."""
    return references_of(classes).globals


class _Search:
    """A search through the code that a class runs, from its `forward` on."""

    def __init__(self, cls: type) -> None:
        self.functions: list[FunctionType] = []
        self.caches: list[Holder] = []
        self._methods: dict[str, list[Holder]] = {}
        self._add_methods(cls)
        self._pending: list[FunctionType] = []
        self._seen: set[int] = set()

    def _add_methods(self, cls: type) -> None:
        for base in cls.__mro__:
            if base is not object and not base.__module__.startswith("torch."):
                for name in vars(base):
                    self._methods.setdefault(name, []).append(Holder(base, name))

    def run(self) -> Iterator[Global]:
        self._call_methods(("forward", "__call__"))
        while self._pending:
            function = self._pending.pop()
            if id(function) in self._seen:
                continue
            self._seen.add(id(function))
            self.functions.append(function)
            for cell in function.__closure__ or ():
                self._call(Holder(cell), function)
            names, assigned = _names_in(function.__code__)
            self._call_methods(names)
            namespace, package = function.__globals__, _package(function.__module__)
            spaces = [namespace]
            for name in names:
                value = namespace.get(name)
                if isinstance(value, ModuleType) and _package(value.__name__) == package:
                    spaces.append(vars(value))
                elif isinstance(value, type) and _package(value.__module__) == package:
                    for base in value.__mro__[:-1]:
                        for method in names & vars(base).keys():
                            self._call(Holder(base, method), function)
            for space in spaces:
                for name in names:
                    is_own = self._call(Holder(space, name), function)
                    if not is_own and (name in space or name in assigned):
                        yield Global(space, name, space is namespace and name in assigned)

    def _call_methods(self, names: Iterable[str]) -> None:
        for name in names:
            for holder in self._methods.get(name, ()):
                self._call(holder)

    def _call(self, holder: Holder, caller: FunctionType | None = None) -> bool:
        """Follow a call of what a holder holds; return whether it is a function of the caller's package."""
        value = holder.get()
        if cached_in(value) is not None:
            self.caches.append(holder)
        function = _function_of(value)
        if function is None or (caller and _package(function.__module__) != _package(caller.__module__)):
            return False
        self._pending.append(function)
        return True


def cached_in(value: Any) -> Any:
    """The `lru_cache` function that a value is, or that it makes a method or property of; None for anything else."""
    inside = value
    if isinstance(value, staticmethod | classmethod):
        inside = value.__func__
    elif isinstance(value, property):
        inside = value.fget
    return inside if isinstance(inside, Cached) else None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _function_of(value: Any) -> FunctionType | None:
    """A function, or the one in a property, a method or a cache; one that decorates it holds it in its closure."""
    if isinstance(value, ModuleType | nn.Module):
        return None
    for name in ("fget", "__func__", "__wrapped__"):
        if not isinstance(value, FunctionType):
            value = read_attribute(value, name) or value
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

"""Find the globals, closures and function caches that the code of a model refers to."""

from __future__ import annotations

import dis
import weakref
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from microtome.engine.attributes import read_attribute


class Global(NamedTuple):
    """A global variable of a Python module."""

    namespace: dict[str, Any]
    name: str
    is_assigned: bool


class Holder(NamedTuple):
    """A variable that refers to a function: a global, an attribute of a class, or a cell of a closure."""

    owner: dict[str, Any] | type | CellType
    name: str = ""

    def get(self) -> Any:
        if isinstance(self.owner, CellType):
            try:
                return self.owner.cell_contents
            except ValueError:  # the cell is empty
                return None
        return (self.owner if isinstance(self.owner, dict) else vars(self.owner)).get(self.name)

    def set(self, value: Any) -> None:
        if isinstance(self.owner, CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


class References(NamedTuple):
    """The globals, functions and caches that the code of some classes refers to.

    Attributes:
        functions: The functions that it may call, which may keep state in closures, defaults and attributes.
        caches: The variables that refer to `functools.lru_cache` functions.
    """

    globals: list[Global]
    functions: list[FunctionType]
    caches: list[Holder]


CachedFunction = type(lru_cache(int))
#: The references of each class, with the `forward` that was searched.
_cache: weakref.WeakKeyDictionary[type, tuple[Any, References]] = weakref.WeakKeyDictionary()


def references_of(classes: Iterable[type]) -> References:
    """Find what `forward` of these classes, and what it calls in the same package, refers to.

    The search reads bytecode. It misses what is reached by `getattr` with a computed name, or through another package.
    """
    variables: dict[tuple[int, str], Global] = {}
    functions: dict[int, FunctionType] = {}
    caches: dict[tuple[int, str], Holder] = {}
    for cls in classes:
        forward = getattr(cls, "forward", None)
        cached = _cache.get(cls)
        if cached is None or cached[0] is not forward:
            search = _CodeSearch(cls)
            cached = _cache[cls] = forward, References(list(search.run()), search.functions, search.caches)
        for variable in cached[1].globals:
            key = id(variable.namespace), variable.name
            if key not in variables or variable.is_assigned:
                variables[key] = variable
        functions.update((id(function), function) for function in cached[1].functions)
        caches.update(((id(holder.owner), holder.name), holder) for holder in cached[1].caches)
    return References(list(variables.values()), list(functions.values()), list(caches.values()))


class _CodeSearch:
    """A search of the code that a class runs, beginning with its `forward`."""

    def __init__(self, cls: type) -> None:
        self.functions: list[FunctionType] = []
        self.caches: list[Holder] = []
        self._methods: dict[str, list[Holder]] = {}
        self._pending: list[FunctionType] = []
        self._visited: set[int] = set()
        for base in cls.__mro__:
            if base is not object and not base.__module__.startswith("torch."):
                for name in vars(base):
                    self._methods.setdefault(name, []).append(Holder(base, name))

    def run(self) -> Iterator[Global]:
        self._call_methods(("forward", "__call__"))
        while self._pending:
            function = self._pending.pop()
            if id(function) in self._visited:
                continue
            self._visited.add(id(function))
            self.functions.append(function)
            for cell in function.__closure__ or ():
                self._call(Holder(cell), function)
            names, assigned = _names_in(function.__code__)
            self._call_methods(names)
            namespace, package = function.__globals__, _package(function.__module__)
            namespaces = [namespace]
            for name in names:
                value = namespace.get(name)
                if isinstance(value, ModuleType) and _package(value.__name__) == package:
                    namespaces.append(vars(value))
                elif isinstance(value, type) and _package(value.__module__) == package:
                    for base in value.__mro__[:-1]:
                        for method in names & vars(base).keys():
                            self._call(Holder(base, method), function)
            for place in namespaces:
                for name in names:
                    is_own = self._call(Holder(place, name), function)
                    if not is_own and (name in place or name in assigned):
                        yield Global(place, name, place is namespace and name in assigned)

    def _call_methods(self, names: Iterable[str]) -> None:
        for name in names:
            for holder in self._methods.get(name, ()):
                self._call(holder)

    def _call(self, holder: Holder, caller: FunctionType | None = None) -> bool:
        """Follow a call of a holder's function; return whether it is a function of the caller's package."""
        value = holder.get()
        if cached_in(value) is not None:
            self.caches.append(holder)
        function = _function_of(value)
        if function is None or (caller and _package(function.__module__) != _package(caller.__module__)):
            return False
        self._pending.append(function)
        return True


def cached_in(value: Any) -> Any:
    """The `lru_cache` function that a value is, or that it wraps as a method or property; None for anything else."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    return value if isinstance(value, CachedFunction) else None


def _function_of(value: Any) -> FunctionType | None:
    """A function, or the one inside a property, a method or a cache. A decorator has it in its closure."""
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
    """The names that code and functions inside it refer to, and the globals that they assign or delete."""
    assigning = ("STORE_GLOBAL", "DELETE_GLOBAL")
    assigned = {step.argval for step in dis.get_instructions(code) if step.opname in assigning}
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner_names, inner_assigned = _names_in(constant)
            names |= inner_names
            assigned |= inner_assigned
    return frozenset(names), frozenset(assigned)

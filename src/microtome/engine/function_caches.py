"""Keep substitute tensors out of `functools.lru_cache`s, closures and defaults of the functions that a model calls.

A function that cached a substitute would return it to the next real run. So, during a run on substitutes, each function
whose cache has tensors or is empty is replaced by one with an empty cache of its own. A cache of other results stays:
computing them again would be of no use.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import lru_cache, wraps
from types import FunctionType, ModuleType
from typing import Any

from torch import device, dtype

from microtome.engine.code_references import Holder, cached_in
from microtome.engine.composite_ops import is_meta_or_fake
from microtome.engine.pytree import children_of, tensors_in
from microtome.engine.signals import complete_step
from microtome.engine.snapshot import CONTAINERS, copy_container, restore_containers

#: Caches that were empty, and then had no tensors: they are not replaced again.
_without_tensors: weakref.WeakSet[Any] = weakref.WeakSet()


def replace_caches(holders: Iterable[Holder], stack: ExitStack) -> None:
    """Replace cached functions, in calls of this thread, until the exit stack closes.

    A cache that gets substitutes nevertheless, through another thread or an unknown reference, is cleared.
    """
    replaced: dict[int, tuple[Any, Any]] = {}
    misses: dict[int, tuple[Any, int]] = {}
    before: list[tuple[Holder, Any]] = []
    stack.callback(_remember_caches_without_tensors, replaced)
    stack.callback(complete_step, _clear_substitutes, misses)
    stack.callback(complete_step, _restore_holders, before)
    for holder in holders:
        value = holder.get()
        cached = cached_in(value)
        if cached is None:
            continue
        misses[id(cached)] = cached, cached.cache_info().misses
        if not _may_hold_tensors(cached):
            continue
        if id(cached) not in replaced:
            replaced[id(cached)] = cached, lru_cache(**cached.cache_parameters())(cached.__wrapped__)
        before.append((holder, value))
        function = _use_in_this_thread(*replaced[id(cached)])
        holder.set(function if value is cached else type(value)(function))


def preserve_closures(functions: Iterable[FunctionType], stack: ExitStack) -> None:
    """Restore closures, defaults and attributes of functions that contain substitutes when the exit stack closes."""
    holders = [Holder(cell) for function in functions for cell in function.__closure__ or ()]
    pending: list[Any] = [holder.get() for holder in holders]
    for function in functions:
        pending += [function.__defaults__, function.__kwdefaults__, function.__dict__]
    containers: dict[int, tuple[Any, Any]] = {}
    while pending:
        item = pending.pop()
        if id(item) not in containers and isinstance(item, CONTAINERS):
            containers[id(item)] = item, copy_container(item)
            pending.extend(children_of(item))
        elif isinstance(item, tuple):
            pending.extend(item)
    stack.callback(complete_step, _restore_containers, list(containers.values()))
    stack.callback(complete_step, _restore_cells, [(holder, holder.get()) for holder in holders])


def _restore_cells(before: list[tuple[Holder, Any]]) -> None:
    for holder, value in before:
        if holder.get() is not value and any(map(is_meta_or_fake, tensors_in(holder.get()))):
            holder.set(value)


def _restore_containers(states: list[tuple[Any, Any]]) -> None:
    restore_containers([(item, before) for item, before in states if any(map(is_meta_or_fake, tensors_in(item)))])


def _use_in_this_thread(cached: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    here = threading.get_ident()

    @wraps(cached)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (own if threading.get_ident() == here else cached)(*args, **kwargs)

    for name in ("cache_info", "cache_clear", "cache_parameters"):
        setattr(call, name, getattr(own, name))
    return call


def _restore_holders(before: list[tuple[Holder, Any]]) -> None:
    for holder, value in before:
        holder.set(value)


def _remember_caches_without_tensors(replaced: dict[int, tuple[Any, Any]]) -> None:
    for cached, own in replaced.values():
        if own.cache_info().currsize and all(map(_is_data, _entries(own))):
            _without_tensors.add(cached)


def _clear_substitutes(misses: dict[int, tuple[Any, int]]) -> None:
    for cached, before in misses.values():
        has_grown = cached.cache_info().misses != before
        if has_grown and any(map(is_meta_or_fake, tensors_in(list(_entries(cached))))):
            cached.cache_clear()


def _may_hold_tensors(cached: Any) -> bool:
    if not cached.cache_info().currsize:
        return cached not in _without_tensors
    return not all(map(_is_data, _entries(cached)))


def _entries(cached: Any) -> Iterator[Any]:
    """The arguments and results in a cache, which only the garbage collector has access to."""
    for item in gc.get_referents(cached):
        if isinstance(item, dict):
            if item is not vars(cached):
                yield from item
                yield from (result for result in item.values() if type(result).__name__ != "_lru_list_elem")
        elif item is not cached.__wrapped__ and not isinstance(item, type):
            yield item


def _is_data(value: Any) -> bool:
    """Whether a value is neither a tensor nor anything that might contain one."""
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_data, value))
    if isinstance(value, dict):
        return all(map(_is_data, (*value, *value.values())))
    return type(value) in _DATA or isinstance(value, type)


#: `object` is the type of the separator of positional and keyword arguments in the key of an entry.
_DATA = (type(None), bool, int, float, complex, str, bytes, object, dtype, device, ModuleType, FunctionType)

"""Keep stand-ins out of what the functions that a model calls remember: `functools.lru_cache`, closures, defaults.

A function that remembers what it returned would return a stand-in to the next real run. So, for the time of a run on
stand-ins, a function with an empty cache of its own takes the place of each that holds tensors or nothing. A cache that
holds other results stays: nothing would be gained by computing them again.
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

#: Caches that were empty and then held no tensors: they are not replaced again.
_without_tensors: weakref.WeakSet[Any] = weakref.WeakSet()


def replace_caches(holders: Iterable[Holder], stack: ExitStack) -> None:
    """Replace cached functions for the time of a run on stand-ins, in the thread that calls this.

    Where another thread, or a holder that is not known, fills a cache with stand-ins, it is cleared.
    """
    replaced: dict[int, tuple[Any, Any]] = {}
    found: dict[int, tuple[Any, int]] = {}
    before: list[tuple[Holder, Any]] = []
    stack.callback(_remember_caches_without_tensors, replaced)
    stack.callback(complete_step, _clear_substitutes, found)
    stack.callback(complete_step, _restore_holders, before)
    for holder in holders:
        value = holder.get()
        cached = cached_in(value)
        if cached is None:
            continue
        found[id(cached)] = cached, cached.cache_info().misses
        if not _may_hold_tensors(cached):
            continue
        if id(cached) not in replaced:
            replaced[id(cached)] = cached, lru_cache(**cached.cache_parameters())(cached.__wrapped__)
        before.append((holder, value))
        function = _use_in_this_thread(*replaced[id(cached)])
        holder.set(function if value is cached else type(value)(function))


def preserve_closures(functions: Iterable[FunctionType], stack: ExitStack) -> None:
    """Put back, afterwards, what closures, defaults and attributes of functions hold if it then has stand-ins in it."""
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


def _restore_containers(before: list[tuple[Any, Any]]) -> None:
    restore_containers([(item, held) for item, held in before if any(map(is_meta_or_fake, tensors_in(item)))])


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


def _clear_substitutes(found: dict[int, tuple[Any, int]]) -> None:
    for cached, misses in found.values():
        held = cached.cache_info().misses != misses and tensors_in(list(_entries(cached)))
        if held and any(map(is_meta_or_fake, held)):
            cached.cache_clear()


def _may_hold_tensors(cached: Any) -> bool:
    if not cached.cache_info().currsize:
        return cached not in _without_tensors
    return not all(map(_is_data, _entries(cached)))


def _entries(cached: Any) -> Iterator[Any]:
    """The arguments and results that a cache holds; only the garbage collector has access to them."""
    for held in gc.get_referents(cached):
        if isinstance(held, dict):
            if held is not vars(cached):
                yield from held
                yield from (result for result in held.values() if type(result).__name__ != "_lru_list_elem")
        elif held is not cached.__wrapped__ and not isinstance(held, type):
            yield held


def _is_data(value: Any) -> bool:
    """Whether a value is neither a tensor nor anything that might hold one."""
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_data, value))
    if isinstance(value, dict):
        return all(map(_is_data, (*value, *value.values())))
    return type(value) in _DATA or isinstance(value, type)


#: `object` is the type of what separates positional from keyword arguments in the key of an entry.
_DATA = (type(None), bool, int, float, complex, str, bytes, object, dtype, device, ModuleType, FunctionType)

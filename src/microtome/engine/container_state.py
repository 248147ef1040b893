"""Copy what dicts, lists, sets and deques hold, and give it back to them."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

CONTAINERS = (dict, list, set, deque)
_MISSING = object()


def copy_container(held: Any) -> Any:
    """What a container holds, past methods that a subclass overrides: a dict may make what it gives when asked."""
    if isinstance(held, dict):
        return dict(OrderedDict.items(held) if isinstance(held, OrderedDict) else dict.items(held))
    return held.copy()


def restore_containers(kept: list[tuple[Any, Any]]) -> None:
    """Put back what was kept without emptying anything on the way, since other threads may read it."""
    for held, before in kept:
        if isinstance(held, dict):
            restore_dict(held, before or {})
        elif isinstance(held, list):
            held[:] = before
        elif isinstance(held, set):
            if held != set(before):  # or its order would change, and with it that of a loop over it
                held.intersection_update(before)
                held.update(before)
        elif len(held) != len(before) or any(one is not other for one, other in zip(held, before, strict=True)):
            held.clear()
            held.extend(before)


def restore_dict(held: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Give a dict the items of another, in their order, without emptying it on the way."""
    if not held and not before:
        return
    for key, value in before.items():
        if dict.get(held, key, _MISSING) is not value:
            held[key] = value
    if len(held) > len(before):
        for key in [key for key in held if key not in before]:
            del held[key]
    if list(held) != list(before):
        for key, value in before.items():
            held.pop(key, None)
            held[key] = value

"""Renderers of results: registered by `microtome.report`, which results do not import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Takes the name of a renderer, such as `"table.text"`, and returns the function.
_find: Callable[[str], Callable[..., Any]] | None = None


def register_renderers(find: Callable[[str], Callable[..., Any]]) -> None:
    """Set where `render` looks renderers up."""
    global _find
    _find = find


def render(name: str, *args: Any, **options: Any) -> Any:
    """Call a renderer by its name."""
    assert _find is not None, "microtome/__init__.py imports microtome.report, which registers its renderers"
    return _find(name)(*args, **options)

"""How a result is rendered: `report` has the functions, and a result knows the name of the form alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Renderer = Callable[..., Any]

_providers: list[Callable[[str], Renderer]] = []


def provide_renderers(find: Callable[[str], Renderer]) -> None:
    """Have renderers be found by this function, which takes the name of a form and may import what it needs."""
    _providers[:] = [find]


def render(form: str, result: Any, *args: Any, **options: Any) -> Any:
    """Render a result.

    Args:
        form: Of what, and as what: `"trace.svg"`, `"profile.csv"`. `microtome.report.renderers` has them all.
    """
    if not _providers:
        raise RuntimeError(f"nobody provides the renderer of {form!r}: import microtome first")
    return _providers[0](form)(result, *args, **options)

"""Render results as text, tables, pages, pictures and trace files."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

#: The modules of the kinds of results that have another name.
_MODULES = {"codecs": "codec_costs", "run": "requests"}


def find_renderer(name: str) -> Callable[..., Any]:
    """Import a renderer by its name below this package, `module.function`, when it is first called."""
    module, _, function = name.rpartition(".")
    renderer: Callable[..., Any] = getattr(import_module(f"{__name__}.{_MODULES.get(module, module)}"), function)
    return renderer

"""Results as text, tables, pages, pictures and files."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

#: The module of each renderer, imported when it is first called.
_RENDERERS = {
    "profile": "profile",
    "diff": "diff",
    "cuts": "cuts",
    "plan": "plan",
    "codecs": "codec_costs",
    "run": "requests",
    "sweep": "sweep",
    "formats": "formats",
    "notebook": "notebook",
    "page": "html.document",
    "sweep_page": "html.sweep",
    "graph": "graph.graph",
    "dot": "graph.dot",
    "svg": "graph.svg",
    "perfetto": "trace_events.perfetto",
    "perfetto_remote": "trace_events.perfetto_remote",
    "speedscope": "trace_events.speedscope",
    "activation": "pictures.activation",
    "attention": "pictures.attention",
}


def find_renderer(name: str) -> Callable[..., Any]:
    """Import a renderer by its name, `module.function`."""
    module, _, function = name.partition(".")
    found: Callable[..., Any] = getattr(import_module(f"microtome.report.{_RENDERERS[module]}"), function)
    return found

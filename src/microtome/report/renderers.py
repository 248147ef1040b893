"""The renderer of each form that a result can ask for, imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from microtome.rendering import Renderer

if TYPE_CHECKING:
    from microtome.results import Result
    from microtome.trace.data import Trace

#: What every kind of result has in the file of its name: `profile.csv` is `csv` in profile.py.
_OF_EACH_KIND = ("text", "markdown", "csv", "html")


def find_renderer(form: str) -> Renderer:
    """The function that renders a form."""
    if form in _RENDERERS:
        return _RENDERERS[form]
    file, name = _ELSEWHERE.get(form) or form.split(".")
    if form not in _ELSEWHERE and name not in _OF_EACH_KIND:
        raise LookupError(f"expected a form that report renders, got {form!r}")
    found: Renderer = getattr(import_module(f"{__package__}.{file}"), name)
    return found


def _printable(result: Result) -> Any:
    from microtome.report.terminal import Printable

    return Printable(import_module(f"{__package__}.{result.kind}").renderable(result))


def _dot(trace: Trace, depth: int | None, cut: Any) -> str:
    from microtome.report.dot import dot
    from microtome.report.graph import graph

    return dot(graph(trace, depth, cut))


def _svg(trace: Trace, depth: int | None, cut: Any) -> str:
    from microtome.report.graph import graph
    from microtome.report.graph_svg import svg

    return svg(graph(trace, depth, cut))


_RENDERERS: dict[str, Renderer] = {"result.rich": _printable, "trace.dot": _dot, "trace.svg": _svg}
#: By the form, the file and the function.
_ELSEWHERE = {
    "activation.picture": ("activation", "plot"),
    "attention.picture": ("attention", "plot"),
    "plan.perfetto": ("perfetto_remote", "of_plan"),
    "profile.page": ("page", "html"),
    "profile.perfetto": ("perfetto", "perfetto"),
    "profile.speedscope": ("speedscope", "speedscope"),
    "profile.why_unknown": ("columns", "why_unknown"),
    "recorder.notebook": ("notebook", "recorder"),
    "recording.notebook": ("notebook", "recording"),
    "result.notebook": ("notebook", "html"),
    "run.perfetto": ("perfetto_remote", "of_run"),
    "sweep.perfetto": ("perfetto_remote", "of_sweep"),
    "trace.notebook": ("notebook", "trace"),
}

"""Traces and recordings in notebooks: their headline figures and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from microtome.report.notebook_html import page
from microtome.report.row_selection import fitting_depth
from microtome.report.table import Bar, Column, Line, Report, Table
from microtome.units import UNKNOWN, count, seconds, shape, size

if TYPE_CHECKING:
    from microtome.capture.record import ActivationRecorder
    from microtome.capture.store import Recording
    from microtome.results.trace import Trace, TracedCall

#: A notebook shows at most about this many rows.
_ROWS = 40


def trace(result: Trace) -> str:
    """The calls as deep as there is room for, with what they return and how many operators they run."""
    calls = [call for call in result.calls if call.phase == "forward"]
    depth = fitting_depth([call.depth for call in calls], _ROWS)
    shown = [call for call in calls if call.depth <= depth][:_ROWS]
    most = max((_returned(result, call) for call in shown), default=0) or 1
    lines = []
    for call in shown:
        nbytes = _returned(result, call)
        outputs = _some([shape(result.values[at].shape) for at in call.outputs])
        operators = str(sum(op.phase == "forward" for op in result.ops[call.begins : call.ends]))
        name = "  " * call.depth + (call.address or "(root)")
        lines.append(Line((name, call.type, operators, outputs, Bar(nbytes / most, size(nbytes)))))
    figures = [("calls", str(len(calls))), ("operators", str(len(result.ops))), ("values", str(len(result.values)))]
    figures.append(("made on", f"{result.how.tensor_mode} tensors"))
    columns = (*map(_left, ("call", "module")), Column("operators"), *map(_left, ("returns", "bytes")))
    notes = [*([result.how.why] if result.how.why else []), *_more(len(lines), len(calls), "calls")]
    return _page(f"Trace of {calls[0].type}", figures, columns, lines, notes)


def _returned(result: Trace, call: TracedCall) -> int:
    return sum(result.values[at].nbytes for at in call.outputs)


def recording(result: Recording) -> str:
    """The recording in a folder."""
    figures = [("names", str(len(result))), ("tensors", count(result.count)), ("bytes", size(result.nbytes))]
    figures += [("dropped", count(result.dropped))] if result.dropped else []
    of = result.manifest.get("model")
    return _recorded(result, f"Recording{f' of {of}' if of else ''} in {result.folder}", figures)


def recorder(result: ActivationRecorder) -> str:
    """The records of a `with` block."""
    runs, records, nbytes, spent = result.totals
    figures = [("runs", count(runs)), ("records", count(records)), ("bytes", size(nbytes)), ("time", seconds(spent))]
    return _recorded(result, "Recorder", figures)


def _recorded(result: Recording | ActivationRecorder, title: str, figures: list[tuple[str, str]]) -> str:
    """The names with how many tensors there are of each, their shapes and statistics."""
    most = max((result[name].nbytes for name in result), default=0) or 1
    lines = []
    for name in list(result)[:_ROWS]:
        series, stats = result[name], result.stats(name)
        shapes = _some(list(dict.fromkeys(map(shape, series.shapes))))
        dtypes = _some(list(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in series.dtypes)))
        statistics = [_figure(value) for value in (stats.mean, stats.std, stats.min, stats.max)]
        bar = Bar(series.nbytes / most, size(series.nbytes))
        lines.append(Line((name, str(len(series)), shapes, dtypes, bar, *statistics)))
    columns = (_left("name"), Column("tensors"), *map(_left, ("shape", "dtype", "bytes")))
    columns += tuple(map(Column, ("mean", "std", "least", "greatest")))
    return _page(title, figures, columns, lines, _more(len(lines), len(result), "names"))


def _left(header: str) -> Column:
    return Column(header, right=False)


def _page(
    title: str,
    figures: Sequence[tuple[str, str]],
    columns: tuple[Column, ...],
    lines: Sequence[Line],
    notes: Sequence[str],
) -> str:
    return page(Report(title, (Table(columns, tuple(lines)),), tuple(notes), figures=tuple(figures)))


def _figure(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}"


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _more(shown: int, whole: int, what: str) -> list[str]:
    return [f"shown: {shown} of {whole} {what}"] if shown < whole else []

"""What a notebook shows of a result: its headline figures and its table, as HTML without a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from microtome.report import cuts as of_cuts
from microtome.report import plan as of_plan
from microtome.report.columns import at_least, call_columns, leaves_out
from microtome.report.notebook_html import Bar, Cell, Side, TableParts, cards, legend, page, table
from microtome.report.notes import notes_of
from microtome.report.row_selection import RowSelection, rows_of
from microtome.results.metrics import METRICS
from microtome.units import UNKNOWN, count, joules, seconds, shape, share, size

if TYPE_CHECKING:
    from microtome.capture.record import Recorder
    from microtome.capture.store import Recording
    from microtome.results.cuts import Cuts
    from microtome.results.plan import Candidate, Plan
    from microtome.results.profile import Profile
    from microtome.results.trace import Trace, TracedCall

#: A notebook shows at most about this many rows.
_ROWS = 40


def html(result: Any) -> str | None:
    """A result by its kind; None where its text says it all."""
    known: dict[str, Callable[[Any], str]] = {"profile": profile, "cuts": cuts, "plan": plan}
    show = known.get(result.kind)
    return None if show is None else show(result)


def profile(result: Profile) -> str:
    """The whole in figures, and the tree as deep as there is room for."""
    total = result.total
    leaves = {name: leaves_out(result, METRICS[name], None) for name in ("macs", "flops")}
    counted = [
        at_least(count(getattr(total, name))) if of(total) else count(getattr(total, name))
        for name, of in leaves.items()
    ]
    figures = [("parameters", count(total.params)), *zip(("MACs", "FLOPs"), counted, strict=True)]
    figures.append(("peak memory", size(result.peak_bytes)))
    figures += [("time", seconds(total.time_s))] if total.time_s is not None else []
    figures += [("device time", seconds(total.device_s))] if total.device_s is not None else []
    figures += [("energy", joules(total.energy_j))] if total.energy_j is not None else []
    by = "device_s" if total.device_s is not None else "time_s" if total.time_s is not None else "flops"
    known = call_columns()
    measured = [name for name, field in _MEASURED.items() if getattr(total, field) is not None]
    names = ["type", "outputs", "params", "macs", *measured, "peak_bytes"]
    headers = ["call", *(known[name].header for name in names), f"share of {'FLOPs' if by == 'flops' else 'time'}"]
    sides: list[Side] = ["left", *("right" if known[name].right else "left" for name in names), "left"]
    rows: list[list[Cell]] = []
    shown = rows_of(result, RowSelection())
    for row, name in shown[:_ROWS]:
        part, whole = getattr(row, by), getattr(total, by)
        bar = Bar(share(part, whole), part / whole if part is not None and whole else 0.0)
        cells = {column: known[column].cell(row, result) for column in names}
        if leaves["macs"](row):
            cells["macs"] = at_least(cells["macs"])
        rows.append([name, *cells.values(), bar])
    return page(
        f"{result.model} on {result.inputs}",
        cards(figures),
        table(headers, rows, sides),
        notes=[*notes_of(result), *_more(len(rows), len(result), "calls")],
    )


_MEASURED = {"time": "time_s", "device_time": "device_s", "energy": "energy_j"}


def cuts(result: Cuts) -> str:
    """The cuts, with bars of what crosses."""
    depth = _depth([cut.depth for cut in result])
    view = of_cuts.CutSelection(depth)
    shown = of_cuts.rows_of(result, view)[:_ROWS]
    most = max([cut.nbytes for cut in shown], default=0) or 1
    rows: list[list[Cell]] = [
        [
            cut.at,
            cut.type,
            Bar(size(cut.nbytes), cut.nbytes / most),
            *map(count, (cut.head_macs, cut.tail_macs, cut.head_params, cut.tail_params)),
            _some([live.name for live in cut.live]),
        ]
        for cut in shown
    ]
    headers = ["cut", "module", "bytes", "head MACs", "tail MACs", "head params", "tail params", "crosses"]
    sides: list[Side] = ["left", "left", "left", "right", "right", "right", "right", "left"]
    figures = [("cuts", str(len(result))), ("input", size(result.input_bytes)), ("output", size(result.output_bytes))]
    figures += [("fewest bytes", f"{size(result.best().nbytes)} at {result.best().at}")] if len(result) else []
    strong = [at for at, cut in enumerate(shown) if cut.dominates]
    notes = list(of_cuts.notes_of(result, view, shown, "bold"))
    return page(of_cuts.title_of(result), cards(figures), table(headers, rows, sides, strong), notes=notes)


def plan(result: Plan) -> str:
    """The candidates, with bars of who takes how long."""
    shown = of_plan.rows_of(result, 12)
    longest = max(one.latency_s for one in shown) or 1.0
    columns = of_plan.columns_of(result)
    rows: list[list[Cell]] = [
        [one.name, *(column.cell(one) for column in columns.values()), _steps(result, one, longest)] for one in shown
    ]
    headers = ["cut", *(column.header for column in columns.values()), "where the time goes"]
    right: list[Side] = ["right"] * len(columns)
    winner = result.winner
    figures = [("best", winner.name), ("latency", seconds(winner.latency_s)), ("sent", size(sum(winner.sent_bytes)))]
    figures += [("energy", joules(winner.energy_j))] if winner.energy_j is not None else []
    return page(
        of_plan.title_of(result),
        cards(figures),
        legend([*result.devices, "between"]),
        table(headers, rows, ["left", *right, "left"], [shown.index(winner)]),
        notes=list(of_plan.notes_of(result, shown)),
    )


def _steps(result: Plan, one: Candidate, longest: float) -> TableParts:
    devices = list(result.devices)
    inks = [devices.index(step.where) if step.what == "run" else len(devices) for step in one.steps]
    parts = tuple((step.seconds / longest, ink) for step, ink in zip(one.steps, inks, strict=True))
    return TableParts(parts, ", ".join(f"{step.what} {step.where} {seconds(step.seconds)}" for step in one.steps))


def trace(result: Trace) -> str:
    """The calls as deep as there is room for, with what they return and how many operators they run."""
    calls = [call for call in result.calls if call.phase == "forward"]
    depth = _depth([call.depth for call in calls])
    shown = [call for call in calls if call.depth <= depth][:_ROWS]
    most = max((_returned(result, call) for call in shown), default=0) or 1
    rows: list[list[Cell]] = []
    for call in shown:
        nbytes = _returned(result, call)
        outputs = _some([shape(result.values[at].shape) for at in call.outputs])
        ran = str(sum(op.phase == "forward" for op in result.ops[call.begins : call.ends]))
        name = "  " * call.depth + (call.address or "(root)")
        rows.append([name, call.type, ran, outputs, Bar(size(nbytes), nbytes / most)])
    figures = [("calls", str(len(calls))), ("operators", str(len(result.ops))), ("values", str(len(result.values)))]
    figures.append(("made on", f"{result.how.tensor_mode} tensors"))
    return page(
        f"Trace of {calls[0].type}",
        cards(figures),
        table(["call", "module", "operators", "returns", "bytes"], rows, ["left", "left", "right", "left", "left"]),
        notes=[*([result.how.why] if result.how.why else []), *_more(len(rows), len(calls), "calls")],
    )


def _returned(result: Trace, call: TracedCall) -> int:
    return sum(result.values[at].nbytes for at in call.outputs)


def recording(result: Recording) -> str:
    """What lies in a folder."""
    told = [("names", str(len(result))), ("tensors", count(result.count)), ("bytes", size(result.nbytes))]
    told += [("dropped", count(result.dropped))] if result.dropped else []
    of = result.manifest.get("model")
    return _recorded(result, f"Recording{f' of {of}' if of else ''} in {result.folder}", told)


def recorder(result: Recorder) -> str:
    """What was recorded in a `with` block."""
    runs, records, nbytes, spent = result.totals
    told = [("runs", count(runs)), ("records", count(records)), ("bytes", size(nbytes)), ("time", seconds(spent))]
    return _recorded(result, "Recorder", told)


def _recorded(result: Recording | Recorder, title: str, told: list[tuple[str, str]]) -> str:
    """The names with how many tensors there are of each, their shapes and statistics."""
    most = max((result[name].nbytes for name in result), default=0) or 1
    rows: list[list[Cell]] = []
    for name in list(result)[:_ROWS]:
        series, stats = result[name], result.stats(name)
        shapes = _some(list(dict.fromkeys(map(shape, series.shapes))))
        dtypes = _some(list(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in series.dtypes)))
        figures = [_figure(value) for value in (stats.mean, stats.std, stats.min, stats.max)]
        bar = Bar(size(series.nbytes), series.nbytes / most)
        rows.append([name, str(len(series)), shapes, dtypes, bar, *figures])
    headers = ["name", "tensors", "shape", "dtype", "bytes", "mean", "std", "least", "greatest"]
    sides: list[Side] = ["left", "right", "left", "left", "left", "right", "right", "right", "right"]
    return page(
        title,
        cards(told),
        table(headers, rows, sides),
        notes=_more(len(rows), len(result), "names"),
    )


def _depth(depths: list[int]) -> int:
    """As deep as there is room for."""
    return next((d for d in range(max(depths, default=1), 1, -1) if sum(one <= d for one in depths) <= _ROWS), 1)


def _figure(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}"


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _more(shown: int, whole: int, what: str) -> list[str]:
    return [f"shown: {shown} of {whole} {what}"] if shown < whole else []

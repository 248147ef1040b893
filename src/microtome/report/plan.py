"""The table and the chart of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from math import inf
from typing import Any

from rich.text import Text

from microtome.errors import BadQuery
from microtome.report.palette import LINK, device_colours
from microtome.report.table import Column, Medium, Report, Segments, Table
from microtome.report.text import StackedBar, colour_characters, sample, stacked_bars
from microtome.results.metrics import ENERGY, find_choice
from microtome.results.plan import Candidate, Objective, Plan, TrainingStep
from microtome.split.boundary.codecs import is_lossless
from microtome.units import UNKNOWN, Unit, fraction, joules, plural, rate, ratio, seconds, size, write

#: The most candidates of a table beside those that are always shown, and the most cuts of a chart.
_ROWS, _BARS = 8, 20
#: A bar longer than this many times the median is cut off.
_LONGEST = 6
#: The terms of the work of devices.
_RUNS = ("run", "backward")
#: The characters of bars: for each device in the order of the chain, and for codecs and links.
_DEVICES, _BETWEEN, _BETWEEN_NAME = "█▓▒▚", "░", "codec, link"


@dataclass(frozen=True)
class CandidateSelection:
    """The candidates that a table shows.

    Attributes:
        sort: Order by this quantity, the least first, not by the objective.
        top: Show the best so many; None: as many as there is room for, the winner and the whole model on one device.
        columns: The names of the columns; () for those that fit the terminal.
    """

    sort: str | None = None
    top: int | None = None
    columns: tuple[str, ...] = ()


def report(plan: Plan, view: CandidateSelection | None = None, medium: Medium = "terminal") -> Report:
    """Describe the winner, the candidates and the chart; files have every candidate that can be chosen, or `top`."""
    view = _resolve_sort(view or CandidateSelection())
    rows = _select_rows(plan, view, {"markdown": len(plan), "html": 12, "terminal": _ROWS}[medium])
    columns = [Column("cut", lambda one: one.name, "left"), *_columns(plan)]
    if medium == "html":
        longest = max(one.latency_s for one in rows) or 1.0
        columns.append(Column("where the time goes", lambda one: _segments(plan, one, longest), "left"))
    charted = _over_cuts(plan) if view.top is None else _in_run_order(plan, rows)
    winner = plan.winner
    table = Table.of(
        columns,
        rows,
        lambda one: "*" if one is winner else " ",
        lambda one: "bold green" if one is winner else "dim" if one.refused else "",
    )
    table = table.with_columns(view.columns)
    if view.sort is not None:
        table = table.with_kept_column(_HEADERS.get(view.sort, view.sort))
    figures = [("best", winner.name)]
    if plan.objective == "throughput":
        figures.append(("throughput", f"{ratio(winner.throughput_per_s)} passes/s"))
    if winner.training is not None:
        figures += [("step", seconds(winner.training.step_s)), ("bubble", fraction(winner.training.bubble))]
    figures += [("latency", seconds(winner.latency_s)), ("sent", size(sum(winner.sent_bytes)))]
    figures += [("energy", joules(winner.energy_j))] if winner.energy_j is not None else []
    return Report(
        _title(plan),
        (table,),
        tuple(_notes(plan, rows, charted if medium == "terminal" else rows)),
        chart=lambda width: _chart(plan, charted, width),
        figures=tuple(figures),
        legend=(*_colours(plan).items(), (_between_name(plan), LINK)),
    )


def records(plan: Plan, view: CandidateSelection | None = None) -> list[dict[str, Any]]:
    """Return a record for each selected candidate, by default for every one, refused ones included."""
    candidates = plan if view is None else _select_rows(plan, _resolve_sort(view), len(plan))
    return [_record(plan, candidate) for candidate in candidates]


def _record(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": candidate.name,
        "at": " ".join(at or "" for at in candidate.at),
        "codecs": " ".join(candidate.codecs),
        "chosen": candidate is plan.winner,
        "latency_s": candidate.latency_s,
        "slowest_s": candidate.slowest_s,
        "late_s": candidate.late_s,
        "energy_j": candidate.energy_j,
        "sent_bytes": sum(candidate.sent_bytes),
        "back_bytes": candidate.back_bytes * len(candidate.sent_bytes),
    }
    if plan.tokens is not None:
        record |= {"first_token_s": candidate.first_token_s, "token_s": candidate.token_s}
    if candidate.training is not None:
        record |= {"step_s": candidate.training.step_s, "bubble": candidate.training.bubble}
    for name, nbytes in zip(plan.devices, candidate.memory_bytes, strict=True):
        record[f"{name}_run_s"] = candidate.seconds("run", where=name)
        record[f"{name}_memory_bytes"] = nbytes
        if candidate.training is not None:
            record[f"{name}_backward_s"] = candidate.seconds("backward", where=name)
    for what in ("encode", "send", "decode", "back"):
        record[f"{what}_s"] = candidate.seconds(what)
    return record | {"refused": candidate.refused}


# -- the table ---------------------------------------------------------------------------------------------------------


#: The quantities to sort by.
_SORTS: dict[str, Callable[[Candidate], float | None]] = {
    "latency": lambda one: one.latency_s,
    "throughput": lambda one: one.slowest_s,
    "energy": lambda one: one.energy_j,
    "sent": lambda one: sum(one.sent_bytes),
    "step": lambda one: one.score("training"),
}
#: The headers of those that have another one.
_HEADERS = {"throughput": "passes/s"}


def _resolve_sort(view: CandidateSelection) -> CandidateSelection:
    """Replace a header by the name of the quantity; raise if it is unknown."""
    if view.sort is None:
        return view
    titles = {name: (_HEADERS.get(name, name),) for name in _SORTS}
    return replace(view, sort=find_choice(view.sort, titles, purpose=" to sort by"))


def _select_rows(plan: Plan, view: CandidateSelection, most: int) -> list[Candidate]:
    """Return the best `top`, or the best, the winner and the whole model on one device, in the order of the view."""
    candidates = list(plan)
    if view.sort is not None:
        key_of = _SORTS[view.sort]
        keys = {id(one): key_of(one) for one in candidates}
        if all(key is None for key in keys.values()):
            advice = f"profile with {ENERGY.advice}" if view.sort == "energy" else "plan with the objective 'training'"
            raise BadQuery(f"no candidate has a value of {view.sort!r} to sort by: {advice}")
        candidates.sort(key=lambda one: inf if (key := keys[id(one)]) is None else key)
    allowed = [one for one in candidates if one.refused is None]
    if view.top is not None:
        return allowed[: view.top]
    best = {id(candidate) for candidate in allowed[:most]}
    return [one for one in candidates if id(one) in best or one.is_baseline or one is plan.winner]


def _columns(plan: Plan) -> list[Column]:
    """Return the columns; on a narrow terminal those that matter least to the objective are dropped first."""
    cells: dict[str, Callable[[Candidate], str]] = {
        "sent": lambda one: size(sum(one.sent_bytes)) if one.at else UNKNOWN
    }
    for name in plan.devices:
        cells[name] = lambda one, name=name: write(one.seconds("run", "backward", where=name), "seconds")  # type: ignore[misc]
    if plan.objective == "training":
        return _training_columns(plan, cells)
    cells["codec"] = lambda one: write(one.seconds("encode", "decode"), "seconds")
    cells["wire"] = lambda one: write(one.seconds("send", "back"), "seconds")
    cells["latency"] = lambda one: write(one.latency_s, "seconds")
    if plan.tokens is not None:
        cells["first token"] = lambda one: write(one.first_token_s, "seconds")
        cells["per token"] = lambda one: write(one.token_s, "seconds")
    cells["passes/s"] = lambda one: write(one.throughput_per_s, "ratio")
    if plan.energy_of:
        cells["energy"] = lambda one: write(one.energy_j, "joules")
    memories = [f"{name} memory" for name in plan.limits]
    for name in plan.limits:
        index = list(plan.devices).index(name)
        cells[f"{name} memory"] = lambda one, index=index: size(one.memory_bytes[index])  # type: ignore[misc]
    if any(one.refused for one in plan):
        cells["fits"] = lambda one: "no" if one.refused else "yes"
    first = {"latency": "latency", "throughput": "passes/s", "energy": "energy"}[plan.objective]
    names = [
        first,
        "latency",
        "per token",
        "first token",
        "sent",
        *plan.devices,
        "wire",
        "fits",
        "codec",
        "energy",
        *memories,
        "passes/s",
    ]
    order = list(dict.fromkeys(names))
    return [Column(name, cell, importance=order.index(name)) for name, cell in cells.items()]


def _training_columns(plan: Plan, cells: dict[str, Callable[[Candidate], str]]) -> list[Column]:
    """Return the columns of a plan of training: of a device, the time of a micro-batch and the memory."""
    cells["step"] = lambda one: write(one.score("training"), "seconds")
    cells["bubble"] = lambda one: UNKNOWN if one.training is None else fraction(one.training.bubble)
    for index, name in enumerate(plan.devices):
        cells[f"{name} memory"] = lambda one, index=index: size(one.memory_bytes[index])  # type: ignore[misc]
    if any(one.refused for one in plan):
        cells["fits"] = lambda one: "no" if one.refused else "yes"
    order = ["step", "bubble", *plan.devices, "fits", *(f"{name} memory" for name in plan.devices), "sent"]
    return [Column(name, cell, importance=order.index(name)) for name, cell in cells.items()]


def _segments(plan: Plan, one: Candidate, longest: float) -> Segments:
    colours = _colours(plan)
    parts = tuple((step.seconds / longest, colours[step.where] if step.what in _RUNS else LINK) for step in one.steps)
    return Segments(parts, ", ".join(f"{step.what} {step.where} {seconds(step.seconds)}" for step in one.steps))


def _colours(plan: Plan) -> dict[str, str]:
    return dict(zip(plan.devices, device_colours(len(plan.devices)), strict=True))


# -- the chart ---------------------------------------------------------------------------------------------------------


#: The quantity of the chart and its unit, by objective.
_CHARTED: dict[Objective, tuple[str, Unit]] = {
    "latency": ("latency", "seconds"),
    "throughput": ("passes per second, by the slowest device or link", "ratio"),
    "energy": ("energy", "joules"),
    "training": ("time of a step, the mean of the devices", "seconds"),
}


def _chart(plan: Plan, candidates: Sequence[Candidate], width: int) -> Text:
    """Draw the objective of each candidate as a bar: latencies are stacked by devices, codecs and links."""
    signs = dict(zip(plan.devices, cycle(_DEVICES), strict=False))
    bars = []
    for one in candidates:
        parts = _bar_parts(plan.objective, one, signs)
        total = one.latency_s if plan.objective == "latency" else sum(amount for _, amount, _ in parts)
        bars.append(StackedBar(one.name, "*" if one is plan.winner else " ", total, parts))
    totals = sorted(bar.total for bar in bars)
    names = " ".join(f"{sign} {name}" for name, sign in signs.items())
    key = "" if plan.objective == "energy" else f": {names} {_BETWEEN} {_between_name(plan)}"
    colours = {signs[name]: colour for name, colour in _colours(plan).items()} | {_BETWEEN: LINK}
    quantity, unit = _CHARTED[plan.objective]
    legend = colour_characters(f"{quantity}, in execution order{key}", colours)
    drawn = stacked_bars(bars, _LONGEST * totals[len(totals) // 2] or totals[-1], width, colours, unit)
    return Text("\n").join([legend, *drawn])


def _between_name(plan: Plan) -> str:
    return "idle" if plan.objective == "training" else _BETWEEN_NAME


def _bar_parts(objective: Objective, one: Candidate, signs: dict[str, str]) -> tuple[tuple[str, float, bool], ...]:
    """Return the parts of a bar: the terms of a latency, or one part for a throughput or an energy."""
    if objective == "latency":
        return tuple(
            (signs[step.where], step.seconds, True) if step.what == "run" else (_BETWEEN, step.seconds, False)
            for step in one.steps
        )
    if one.training is not None:
        stages = one.training.stages
        busy = 1 - one.training.bubble
        work_s = sum(stage.forward_s + stage.backward_s for stage in stages) or 1.0
        shares = [(signs[stage.device], (stage.forward_s + stage.backward_s) / work_s) for stage in stages]
        step_s = one.training.step_s
        return (
            *((sign, busy * share * step_s, True) for sign, share in shares),
            (_BETWEEN, one.training.bubble * step_s, False),
        )
    if objective == "energy":
        return ((_DEVICES[0], one.energy_j or 0.0, True),)
    busy_s = {name: one.seconds("run", "encode", "decode", where=name) for name in signs}
    slowest = max(signs, key=lambda name: busy_s[name])
    sign = signs[slowest] if busy_s[slowest] >= one.slowest_s else _BETWEEN
    return ((sign, one.throughput_per_s if one.slowest_s else 0.0, True),)


def _over_cuts(plan: Plan) -> list[Candidate]:
    """Return each cut that fits, with its best codec, and the whole model on one device; of many, an even sample."""
    best: dict[tuple[str | None, ...], Candidate] = {}
    for candidate in plan:
        if candidate.refused is None or candidate.is_baseline:
            best.setdefault(candidate.at, candidate)
    ordered = _in_run_order(plan, best.values())
    if plan.winner not in ordered:  # a strategy may choose another codec
        ordered = [plan.winner if one.at == plan.winner.at else one for one in ordered]
    return sample(ordered, _BARS, lambda one: one is plan.winner)


def _in_run_order(plan: Plan, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates by how much of the model runs on the first device."""
    first = next(iter(plan.devices))
    return sorted(candidates, key=lambda one: (one.seconds("run", where=first), not one.at))


# -- title and notes ---------------------------------------------------------------------------------------------------


def _title(plan: Plan) -> str:
    devices = list(plan.devices)
    links = ", ".join(
        f"{near} to {far} {rate(link.bytes_per_s)}, rtt {seconds(link.rtt_s)}"
        for near, far, link in zip(devices, devices[1:], plan.links, strict=False)
    )
    quantity = "step" if plan.objective == "training" else plan.objective
    chosen = f"chosen by {plan.strategy}" if plan.strategy else f"best {quantity}"
    on = f" on {plan.inputs}"
    if plan.tokens is not None:
        on = f", an answer of {plural(plan.tokens[1], 'token')} to a prompt of {plan.tokens[0]:,}"
    if plan.micro_batches is not None:
        on = f", training on {plural(plan.micro_batches, 'micro-batch')} of {plan.inputs}, {plan.schedule}"
    return f"{plan.title}{on}: {plan.winner.name} ({chosen}; {links})"


def _notes(plan: Plan, shown: Sequence[Candidate], charted: Sequence[Candidate]) -> Iterator[str]:
    winner = plan.winner
    if plan.tokens is not None:
        yield "a pass is a whole answer: latency, energy and bytes are of all its tokens"
    alone = "" if winner.training is None else "one micro-batch "
    yield f"{winner.name}: {alone}{seconds(winner.latency_s)} = {' + '.join(_terms(winner))}"
    if winner.training is not None:
        yield from _stage_notes(winner.training)
    lossy = [codec for codec in winner.codecs if not is_lossless(codec)]
    if lossy:
        yield f"{', '.join(dict.fromkeys(lossy))}: lossy, so the output changes; Stages.try_codec measures by how much"
    yield from _beside(plan)
    if winner.late_s:
        yield f"jitter of the links adds up to {seconds(winner.late_s)}"
    if len(plan.links) == 1 and plan.objective != "training":
        yield f"best cut by bandwidth: {_spans(plan)}"
    refused = [one for one in plan if one.refused is not None]
    if refused:
        are = "is" if len(refused) == 1 else "are"
        yield f"{len(refused)} of {len(plan)} candidates {are} refused; {refused[0].name}: {refused[0].refused}"
    if len(shown) < len(plan):
        others = "" if len(charted) == len(shown) else f" in the table, {len(charted)} in the chart"
        yield f"{len(shown)} of {len(plan)} candidates shown{others}"
    yield from (f"{name}: {machine}" for name, machine in plan.devices.items())
    if plan.codec_costs:
        yield f"codecs: {plan.codec_costs}"
    yield from plan.notes


def _stage_notes(training: TrainingStep) -> Iterator[str]:
    idle = training.bubble
    yield f"bubble: devices with a stage are idle for {fraction(idle)} of a step of {seconds(training.step_s)}"
    for stage in training.stages:
        held = f"{stage.in_flight} x {size(stage.activation_bytes)} of activations"
        lasting = [
            (stage.param_bytes, "weights"),
            (stage.gradient_bytes, "gradients"),
            (stage.optimizer_bytes, "optimizer"),
        ]
        parts = [f"{size(nbytes)} of {what}" for nbytes, what in lasting if nbytes]
        yield f"{stage.device}: {size(stage.memory_bytes)} = {' + '.join((*parts, held))}"


def _terms(candidate: Candidate) -> Iterator[str]:
    for step in candidate.steps:
        if step.seconds:
            back = "gradients" if candidate.training is not None else "result"
            words = {"run": step.where, "send": f"send to {step.where}", "back": f"{back} from {step.where}"}
            yield f"{words.get(step.what, f'{step.what} on {step.where}')} {seconds(step.seconds)}"


def _beside(plan: Plan) -> Iterator[str]:
    """Compare the whole model on one device with the winner, by the objective."""
    quantity = "step" if plan.objective == "training" else plan.objective
    ours = plan.winner.score(plan.objective)
    others = [(one, one.score(plan.objective)) for one in plan.baselines if one is not plan.winner]
    is_rate = plan.objective == "throughput"  # its score is the time between results
    parts = [
        f"{one.name} {ratio(ours / score if is_rate else score / ours)}×"  # noqa: RUF001
        + (" (does not fit)" if one.refused else "")
        for one, score in others
        if score and ours
    ]
    if parts:
        yield f"{quantity} relative to the winner: {', '.join(parts)}"


def _spans(plan: Plan, most: int = 8) -> str:
    spans = plan.over_bandwidths()
    if len(spans) == 1:
        return f"{spans[0].candidate.name} at any bandwidth"
    bandwidth = plan.links[0].bytes_per_s
    at = next(at for at, span in enumerate(spans) if bandwidth < span.until_bytes_per_s or span is spans[-1])
    first = 0 if at < most else min(at - most // 2, len(spans) - most)  # that of the link is always shown
    shown = spans[first : first + most]
    words = ["…"] if first else []
    for span in shown:
        if span.from_bytes_per_s:
            words.append(f"{span.candidate.name} from {rate(span.from_bytes_per_s)}")
        else:
            words.append(f"{span.candidate.name} up to {rate(span.until_bytes_per_s)}")
    return "; ".join(words) + ("; …" if shown[-1] is not spans[-1] else "")

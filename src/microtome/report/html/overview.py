"""The overview of the page: headline figures, their caveats, and the methods behind them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from typing import NamedTuple

from microtome.report.call_columns import at_least, leaves_out
from microtome.report.html.data import model_bytes
from microtome.report.html.prose import prose
from microtome.report.notes import FEW, busy_notes, interval, interval_name, is_disturbed, profile_notes
from microtome.results.measurements import EnergyUse
from microtome.results.metrics import METRICS, Metric, page_metrics, why_missing
from microtome.results.profile import Profile
from microtome.results.rows import group
from microtome.units import count, joules, plural, seconds, share, size, some


class Card(NamedTuple):
    """A metric, its value, and a note."""

    label: str
    value: str
    note: str


def cards(profile: Profile) -> str:
    items = "".join(
        f'<div class="card"><dt>{escape(card.label)}</dt><dd><b>{escape(card.value)}</b>'
        f"<span>{escape(card.note)}</span></dd></div>"
        for card in _cards(profile)
    )
    return f'<dl class="cards">{items}</dl>'


def _cards(profile: Profile) -> Iterator[Card]:
    """Yield a card for each headline figure that is known, the measured ones first."""
    total = profile.total
    if total.time_s is not None:
        yield _time(profile)
    if total.energy_j is not None and profile.energy is not None:
        yield _energy(profile, profile.energy)
    yield _memory(profile)
    if total.macs is not None:
        backward = "" if total.backward_flops is None else f"; backward {count(total.backward_flops)} FLOPs"
        yield Card("MACs", _counted(profile, "macs"), f"{_counted(profile, 'flops')} FLOPs{backward}")
    frozen = total.params - total.trainable_params
    notes = [size(total.param_bytes), *([f"{frozen:,} of them frozen"] if frozen else [])]
    yield Card("parameters", count(total.params), "; ".join(notes))


def _counted(profile: Profile, name: str) -> str:
    text = count(getattr(profile.total, name))
    return at_least(text) if leaves_out(profile, METRICS[name], None)(profile.total) else text


def _memory(profile: Profile) -> Card:
    total, held = profile.total, model_bytes(profile)
    notes = [f"{size(held)} weights and buffers, {size(max(profile.peak_bytes - held, 0))} tensors of the run"]
    where = ""
    if profile.peak_bytes > total.peak_bytes:
        notes.append(f"in the backward; forward {size(total.peak_bytes)}")
        where = " in the forward"
    elif profile.gradients and total.saved_bytes is None:
        notes.append("with tensors saved for a backward")
    measured = total.measured_peak_bytes
    notes.append("computed" if measured is None else f"measured {size(measured)}{where}")
    return Card("peak memory", size(profile.peak_bytes), "; ".join(notes))


def _time(profile: Profile) -> Card:
    total = profile.total
    if total.device_s is not None:
        device = total.spreads.get("device_s")
        spread = f"{interval_name(device)}: {interval(device)}"
        took = f"; backward {seconds(total.backward_device_s)}" if total.backward_device_s is not None else ""
        return Card("device time", seconds(total.device_s), f"{spread}; host {seconds(total.time_s)}{took}")
    took = f"; backward {seconds(total.backward_s)}" if total.backward_s is not None else ""
    host = total.spreads.get("time_s")
    return Card("time", seconds(total.time_s), f"{interval_name(host)}: {interval(host)}{took}")


def _energy(profile: Profile, use: EnergyUse) -> Card:
    total = profile.total
    spread = total.spreads.get("energy_j")
    method = "an estimate, not measured" if use.whole is None else f"{use.meter}, by {use.method}"
    net = "" if total.net_energy_j is None else f"; {share(total.net_energy_j, total.energy_j)} above idle"
    width = f"; {interval_name(spread)}: {interval(spread, joules)}" if spread else ""
    return Card("energy", joules(total.energy_j), method + net + width)


#: What a profile may have, by the metric that shows whether it has it.
_PARTS = {
    "time_s": "time",
    "measured_peak_bytes": "memory",
    "energy_j": "energy",
    "load_cpu": "load",
    "saved_bytes": "the backward",
}


def quiet_line(profile: Profile) -> str:
    """Render how the counts were made, and what was not measured, in a line."""
    coverage = profile.coverage
    ops = f"{'' if coverage.work is not None else f'{coverage.counted:,} of '}{plural(coverage.ops, 'operator')}"
    counted = f"{ops} counted on {profile.how.partition(' (')[0]}, {profile.convention} convention."
    missing = group(
        (metric.requires.done, name)
        for metric, name in ((METRICS[field], name) for field, name in _PARTS.items())
        if metric.requires is not None and why_missing(profile, metric) is not None
    )
    parts = "; ".join(f"not {done}: {', '.join(names)}" for done, names in missing.items())
    how = f' {parts.capitalize()} (<a href="#section:about">how to</a>).' if parts else ""
    return escape(counted) + how


def facts(profile: Profile) -> str:
    """Render the model's inputs, the machine and the date."""
    where = profile.environment
    machine = where.get("gpu") or where.get("cpu")
    threads = f", {where['threads']} threads" if "gpu" not in where and where.get("threads", "1") != "1" else ""
    pairs = {
        "input": profile.inputs.removeprefix("Inputs(").removesuffix(")"),
        "device": f"{machine}{threads}" if machine else "none: counted, nothing measured",
        "torch": where.get("torch", ""),
        "measured" if "date" in where else "page written": where.get("date")
        or f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    items = "".join(f"<li><small>{name}</small>{escape(value)}</li>" for name, value in pairs.items() if value)
    return f'<ul class="facts">{items}</ul>'


def caveats(profile: Profile) -> list[str]:
    """Return the caveats of the headline figures."""
    coverage = profile.coverage
    sentences = [f"{note[0].upper()}{note[1:]}." for note in busy_notes(profile)]  # first: they affect every time
    if coverage.unknown:
        names = some([op.name for op in coverage.unknown], 4)
        sentences.append(f"Operators without a formula add nothing to MACs and FLOPs: {names}. Counted: {coverage}.")
    if coverage.never_ran:
        modules = plural(len(coverage.never_ran), "module")
        sentences.append(f"{modules} never ran: their parameters are counted in the call around them.")
    if profile.timing is not None and profile.timing.compiled:
        compiled = seconds(profile.timing.bare.median)
        sentences.append(f"Times are those of the uncompiled model; compiled, a forward takes {compiled}.")
    if profile.timing is not None and is_disturbed(profile, profile.timing):
        sentences.append("Time stamps add more than 5 %: the times of short calls are too long.")
    if profile.timing is not None and profile.timing.bare.count < FEW:
        sentences.append(f"Times are medians of only {profile.timing.bare.count} passes: parts may exceed the whole.")
    if profile.energy is not None and profile.energy.whole is None:
        sentences.append("Energy is estimated from coefficients.")
    sentences += [f"No {name}: {why}." for name, why in profile.unavailable.items()]
    return sentences


def about(profile: Profile) -> str:
    """Render the environment, the methods, and the reasons why metrics are missing."""
    missing = {metric: why for metric in page_metrics() if (why := why_missing(profile, metric)) is not None}
    known = {metric: metric.description for metric in page_metrics() if metric not in missing}

    def described(metrics: dict[Metric, str]) -> str:
        return "".join(f"<li><b>{escape(metric.label)}</b>: {prose(text)}</li>" for metric, text in metrics.items())

    notes = "".join(f"<li>{prose(note)}</li>" for note in profile_notes(profile))
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in profile.environment.items())
    environment = f'<dl class="pairs">{rows}</dl>'
    nothing = "<p>Nothing was measured: counts do not depend on a machine.</p>"
    return (
        f"<h3>How each number was obtained</h3><ul>{notes}</ul>"
        f"<h3>Where it was measured</h3>{environment if rows else nothing}"
        f'<h3>What the columns are</h3><ul class="columns">{described(known)}</ul>'
        + (f'<h3>What is not known, and why</h3><ul class="columns">{described(missing)}</ul>' if missing else "")
    )

"""The overview of the page: headline figures, their caveats, and the methods behind them."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from microtome.report.call_columns import at_least, leaves_out
from microtome.report.notes import FEW, interval, profile_notes
from microtome.results.metrics import METRICS, Metric, page_metrics, why_missing
from microtome.results.profile import Profile
from microtome.units import UNKNOWN, count, joules, seconds, share, size, some


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
    total, coverage = profile.total, profile.coverage
    yield Card("parameters", count(total.params), f"{total.trainable_params:,} trainable; {size(total.param_bytes)}")
    backward = "" if total.backward_flops is None else f"; backward {count(total.backward_flops)} FLOPs"
    flops = f"{_counted(profile, 'flops')} FLOPs, {profile.convention} convention{backward}"
    yield Card("MACs", _counted(profile, "macs"), flops if total.macs is not None else _why(profile, "macs"))
    yield _memory(profile)
    yield _time(profile)
    yield _energy(profile)
    if coverage.work is None:
        counted = f"{coverage.counted:,} of {coverage.ops:,} operators; no formula for {len(coverage.unknown)}"
        yield Card("coverage", "unknown", f"share of the work; {counted}")
    else:
        yield Card("coverage", f"{coverage.work:.1%}", f"of {coverage.ops:,} operators")
    methods = {"time": profile.timing, "memory": profile.memory, "energy": profile.energy, "load": profile.sampling}
    measured = ", ".join(name for name, method in methods.items() if method is not None)
    note = f"counted; measured: {measured}" if measured else "counted, nothing measured"
    yield Card("method", profile.how.partition(" (")[0], note)


def _counted(profile: Profile, name: str) -> str:
    text = count(getattr(profile.total, name))
    return at_least(text) if leaves_out(profile, METRICS[name], None)(profile.total) else text


def _memory(profile: Profile) -> Card:
    total = profile.total
    measured = total.measured_peak_bytes
    notes = ["computed, weights and inputs included"] if measured is None else [f"measured {size(measured)}"]
    if profile.peak_bytes > total.peak_bytes:
        where = " in the forward" if measured is not None else ""
        notes = [f"in the backward; forward {size(total.peak_bytes)}", *(one + where for one in notes)]
    elif profile.gradients and total.saved_bytes is None:
        notes.append("with what a backward would need")
    return Card("peak memory", size(profile.peak_bytes), "; ".join(notes))


def _time(profile: Profile) -> Card:
    total = profile.total
    if total.time_s is None:
        return Card("time", UNKNOWN, _why(profile, "time_s"))
    if total.device_s is not None:
        spread = interval(total.spreads.get("device_s"))
        took = f"; backward {seconds(total.backward_device_s)}" if total.backward_device_s is not None else ""
        return Card("device time", seconds(total.device_s), f"95 %: {spread}; host {seconds(total.time_s)}{took}")
    took = f"; backward {seconds(total.backward_s)}" if total.backward_s is not None else ""
    return Card("time", seconds(total.time_s), f"95 %: {interval(total.spreads.get('time_s'))}{took}")


def _energy(profile: Profile) -> Card:
    total, use = profile.total, profile.energy
    if total.energy_j is None or use is None:
        return Card("energy", UNKNOWN, _why(profile, "energy_j"))
    spread = total.spreads.get("energy_j")
    method = "an estimate, not measured" if use.whole is None else f"{use.meter}, by {use.method}"
    net = "" if total.net_energy_j is None else f"; {share(total.net_energy_j, total.energy_j)} above idle"
    return Card(
        "energy", joules(total.energy_j), method + net + (f"; 95 %: {interval(spread, joules)}" if spread else "")
    )


def _why(profile: Profile, name: str) -> str:
    return why_missing(profile, METRICS[name]) or ""


def caveats(profile: Profile) -> list[str]:
    """Return the caveats of the headline figures."""
    coverage, sentences = profile.coverage, []
    if coverage.unknown:
        names = some([op.name for op in coverage.unknown], 4)
        sentences.append(f"Operators without a formula add nothing to MACs and FLOPs: {names}.")
    if coverage.never_ran:
        sentences.append(f"{len(coverage.never_ran)} modules never ran; what they hold counts in the call above them.")
    if profile.timing is not None and profile.timing.ratio > 1.05:
        sentences.append("Time stamps cost more than 5 %: short calls look longer than they are.")
    if profile.timing is not None and profile.timing.bare.count < FEW:
        sentences.append(
            f"Times are medians of {profile.timing.bare.count} passes, which are few: parts may exceed the whole."
        )
    if profile.energy is not None and profile.energy.whole is None:
        sentences.append("Energy is an estimate from given coefficients.")
    sentences += [f"No {name}: {why}." for name, why in profile.unavailable.items()]
    return sentences


def about(profile: Profile) -> str:
    """Render the environment, the methods, and the reasons why metrics are missing."""
    missing = {metric: why for metric in page_metrics() if (why := why_missing(profile, metric)) is not None}
    known = {metric: metric.description for metric in page_metrics() if metric not in missing}

    def described(metrics: dict[Metric, str]) -> str:
        return "".join(f"<li><b>{escape(metric.label)}</b>: {escape(text)}</li>" for metric, text in metrics.items())

    notes = "".join(f"<li>{escape(note)}</li>" for note in profile_notes(profile))
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in profile.environment.items())
    environment = f'<dl class="pairs">{rows}</dl>'
    nothing = "<p>Nothing was measured: counts do not depend on a machine.</p>"
    return (
        f"<h3>How each number was obtained</h3><ul>{notes}</ul>"
        f"<h3>What the columns are</h3><ul>{described(known)}</ul>"
        + (f"<h3>What is not known, and why</h3><ul>{described(missing)}</ul>" if missing else "")
        + f"<h3>Where it was measured</h3>{environment if rows else nothing}"
    )

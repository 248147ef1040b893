"""The headline figures of the page, a card for each metric."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from microtome.report.columns import at_least, leaves_out
from microtome.report.notes import interval
from microtome.results.metrics import METRICS, why_missing
from microtome.results.profile import Profile
from microtome.units import UNKNOWN, count, joules, seconds, share, size


class Card(NamedTuple):
    """A metric, its value, and a note."""

    label: str
    value: str
    note: str


def cards(profile: Profile) -> str:
    listed = "".join(
        f'<div class="card"><dt>{escape(card.label)}</dt><dd><b>{escape(card.value)}</b>'
        f"<span>{escape(card.note)}</span></dd></div>"
        for card in _cards(profile)
    )
    return f'<dl class="cards">{listed}</dl>'


def _cards(profile: Profile) -> Iterator[Card]:
    total, coverage = profile.total, profile.coverage
    yield Card("parameters", count(total.params), f"{total.trainable_params:,} trainable; {size(total.param_bytes)}")
    backward = "" if total.backward_flops is None else f"; backward {count(total.backward_flops)} FLOPs"
    counted = count(total.flops)
    if leaves_out(profile, METRICS["flops"], None)(total):
        counted = at_least(counted)
    flops = f"{counted} FLOPs, {profile.convention} convention{backward}"
    macs = count(total.macs)
    yield Card(
        "MACs",
        at_least(macs) if leaves_out(profile, METRICS["macs"], None)(total) else macs,
        flops if total.macs is not None else _why(profile, "macs"),
    )
    yield _memory(profile)
    yield _time(profile)
    yield _energy(profile)
    if coverage.work is None:
        part = f"{coverage.counted:,} of {coverage.ops:,} operators; no formula for {len(coverage.unknown)}"
        yield Card("coverage", "unknown", f"share of the work; {part}")
    else:
        yield Card("coverage", f"{coverage.work:.1%}", f"of {coverage.ops:,} operators")
    yield Card("method", profile.how.partition(" (")[0], _methods(profile))


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


def _methods(profile: Profile) -> str:
    asked = {"time": profile.timing, "memory": profile.memory, "energy": profile.energy, "load": profile.sampling}
    found = [name for name, how in asked.items() if how is not None]
    return f"counted; measured: {', '.join(found)}" if found else "counted, nothing measured"


def _why(profile: Profile, name: str) -> str:
    return why_missing(profile, METRICS[name]) or ""

"""The table of profiles of many models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from microtome.report.table import Cell, Column, Medium, Report, Table
from microtome.results.profile import Profile
from microtome.results.profiles import ProfiledModel, Profiles
from microtome.units import UNKNOWN, count, plural, size, write

#: The longest reason of a failure in a table.
_REASON = 300


def report(profiles: Profiles, medium: Medium = "terminal") -> Report:
    """Describe the totals of each model; a model that failed has its reason in the notes."""
    columns = [
        Column("model", lambda row: row.name, "left", is_name=True),
        Column("params", _amount(lambda profile: count(profile.total.params))),
        Column("MACs", _amount(lambda profile: count(profile.total.macs))),
        Column("weights", _amount(lambda profile: size(profile.total.param_bytes)), importance=2),
        Column("peak", _amount(lambda profile: size(profile.peak_bytes)), importance=1),
    ]
    if any(row.time_s is not None for row in profiles.models):
        columns.append(Column("time", lambda row: write(row.time_s, "seconds")))
    if any(row.energy_j is not None for row in profiles.models):
        columns.append(Column("energy", lambda row: write(row.energy_j, "joules")))
    table = Table.of(columns, profiles.models, style=lambda row: "dim" if row.failure else "")
    title = f"{plural(len(profiles), 'model')}, {len(profiles.failures)} failed"
    return Report(title, (table,) if len(profiles) else (), tuple(_notes(profiles)))


def _amount(value: Callable[[Profile], str]) -> Callable[[ProfiledModel], Cell]:
    return lambda row: UNKNOWN if row.profile is None else value(row.profile)


def _notes(profiles: Profiles) -> Iterator[str]:
    for name, failure in profiles.failures.items():
        yield f"{name} failed: {str(failure)[:_REASON]}"
    if uncounted := [name for name, one in profiles.items() if isinstance(one, Profile) and one.coverage.unknown]:
        yield f"{plural(len(uncounted), 'model')} ran operators without a formula: see `coverage` of {uncounted[0]}"


def records(profiles: Profiles) -> list[dict[str, Any]]:
    """Return a record for each model, those that failed included."""
    return [_record(model) for model in profiles.models]


def _record(model: ProfiledModel) -> dict[str, Any]:
    total = None if model.profile is None else model.profile.total
    return {
        "name": model.name,
        "type": None if model.profile is None else model.profile.model,
        "inputs": None if model.profile is None else model.profile.inputs,
        "params": None if total is None else total.params,
        "macs": None if total is None else total.macs,
        "flops": None if total is None else total.flops,
        "param_bytes": None if total is None else total.param_bytes,
        "peak_bytes": None if model.profile is None else model.profile.peak_bytes,
        "time_s": model.time_s,
        "energy_j": model.energy_j,
        "node": model.node,
        "failure": None if model.failure is None else str(model.failure),
    }

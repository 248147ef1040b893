"""Profiles with times that are no measurements, for tests of the page: the same on every machine."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

import microtome as mt
from microtome.results.measurements import Spread
from microtome.results.metrics import Amounts
from microtome.results.profile import Coverage, Profile
from microtome.results.rows import Row

#: Seconds of a multiply-accumulate, and of any call.
MAC_S, CALL_S = 1e-9, 1e-5

HOSTILE = (
    "</script><script>hacked=1</script>",
    "<img src=x onerror=hacked=1>",
    "\"'><b>bold</b>",
    "<!--<script>",
    "${window}`&amp;",
    "ends\ud800",
)


def timed(profile: Profile, speed: float = 1.0) -> Profile:
    """The profile as if a call took its own MACs' time and a little, at a speed."""
    rows: list[Row] = list(profile)
    at = {row.address: index for index, row in enumerate(rows)}
    own = [((row.own.macs or 0) * MAC_S + CALL_S) / speed for row in rows]
    whole = list(own)
    for index in reversed(range(1, len(rows))):
        whole[at[rows[index].parent or ""]] += whole[index]
    begins = [0.0] * len(rows)
    spent = list(own)  # what of a call is over when the next inside it begins
    for index in range(1, len(rows)):
        above = at[rows[index].parent or ""]
        begins[index] = begins[above] + spent[above]
        spent[above] += whole[index]
    made = [
        replace(
            row,
            time_s=whole[index],
            elapsed_s=begins[index] + whole[index],
            own=replace(row.own, time_s=own[index]),
            spreads={"time_s": _spread(whole[index])},
        )
        for index, row in enumerate(rows)
    ]
    return replace(profile, calls=tuple(made), environment={"cpu": "made up", "threads": "1", "torch": "none"})


def _spread(middle: float) -> Spread:
    return Spread(middle, 0.95 * middle, 1.05 * middle, 0.9 * middle, 1.1 * middle, 5, 0, "made up")


def costing(profile: Profile, name: str, values: dict[str, float | None]) -> Profile:
    """The profile with a quantity of some calls, by their addresses, made up; their spreads are about it."""
    rows = (
        replace(row, **{name: value}, spreads={name: _spread(value)} if value and row.spreads else {})
        for row in profile
        for value in [values.get(row.address, getattr(row, name))]
    )
    return replace(profile, calls=tuple(rows))


def hostile_model() -> nn.Module:
    """One whose modules have names, and a type, that would be markup."""
    model = nn.Sequential()
    for name in HOSTILE:
        model.add_module(name, type("<i>Linear</i>", (nn.Linear,), {})(4, 4))
    return model


def hostile_profile() -> Profile:
    return mt.profile(hostile_model().eval(), "2x4")


def large(calls: int = 10_000) -> Profile:
    """One of so many calls, in blocks of a hundred layers."""
    rows = [_row("", None, 0, "Net")]
    while len(rows) < calls:
        block = f"blocks.{len(rows) // 101}"
        rows.append(_row(block, "", 1, "Block"))
        rows += [_row(f"{block}.layer_{at:03}", block, 2, "Linear") for at in range(min(100, calls - len(rows)))]
    return Profile("Net", "made up", "microtome", "meta tensors", Coverage(len(rows), (), ()), tuple(rows))


def _row(address: str, parent: str | None, depth: int, kind: str) -> Row:
    cost = 100 ** (2 - depth)
    amounts = {"params": cost, "macs": 7 * cost, "flops": 14 * cost, "read_bytes": cost, "write_bytes": cost}
    return Row(
        address=address,
        path=address,
        type=kind,
        depth=depth,
        height=3 - depth,
        parent=parent,
        peak_bytes=1000,
        own=Amounts(macs=7),
        **amounts,
    )

"""The data of the split explorer: the terms of each candidate of a plan, which the script adds up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from microtome.errors import MicrotomeError
from microtome.plan import plan
from microtome.results.cuts import Cuts
from microtome.results.link import Link
from microtome.results.metrics import TIME, advise
from microtome.results.plan import Candidate, Plan
from microtome.results.profile import Profile

#: The most cuts that are planned at once, since a plan holds tables of cuts by cuts.
_AT_ONCE = 1000
#: The initial values of the sliders: bits per second, seconds, and speeds relative to what was measured.
START = {"bandwidth_bps": 20e6, "rtt_s": 0.015, "edge": 1.0, "cloud": 10.0}


def explorer(profile: Profile, cuts: Cuts | None, compare: Profile | None, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the terms of each candidate, or, as `missing`, the reason why there are none.

    The cloud is the machine of the other run, if that is of the same model and has times; else this one.
    """
    if profile.total.elapsed_s is None:
        return {"missing": _no_times()}
    if cuts is None:
        return {"missing": _no_cuts()}
    other = compare if compare is not None and compare.total.elapsed_s is not None else None
    try:
        plans = list(_plans(cuts, profile, other or profile))
    except MicrotomeError as error:
        if other is None:
            return {"missing": f"No plan can be made: {error}"}
        return explorer(profile, cuts, None, [f"the other run cannot be the cloud: {error}"])
    candidates = _ordered(plans, cuts)
    return {
        "start": START | ({} if other is None else {"cloud": 1.0}),
        "cloud": "this machine" if other is None else "the other run's",
        "names": [candidate.name for candidate in candidates],
        "baseline": [candidate.is_baseline for candidate in candidates],
        "crosses": [bool(candidate.at) for candidate in candidates],
        "edge_s": [candidate.seconds("run", where="edge") for candidate in candidates],
        "encode_s": [candidate.seconds("encode") for candidate in candidates],
        "decode_s": [candidate.seconds("decode") for candidate in candidates],
        "cloud_s": [candidate.seconds("run", where="cloud") for candidate in candidates],
        "sent": [sum(candidate.sent_bytes) for candidate in candidates],
        "back": [candidate.back_bytes for candidate in candidates],
        "notes": [*notes, *_notes(plans, cuts, candidates)],
    }


def _plans(cuts: Cuts, edge: Profile, cloud: Profile) -> Iterator[Plan]:
    """Yield plans of batches of cuts, which together have every candidate."""
    link = Link(START["bandwidth_bps"], START["rtt_s"])
    for begin in range(0, max(len(cuts), 1), _AT_ONCE):
        yield plan(replace(cuts, offered=cuts[begin : begin + _AT_ONCE]), edge=edge, cloud=cloud, link=link)


def _ordered(plans: Sequence[Plan], cuts: Cuts) -> list[Candidate]:
    """Return the candidates: first those without a cut in the plan's order, then the cuts in the order of the run.

    Of equals a plan takes the first, and so does the script.
    """
    order = {cut.at: at for at, cut in enumerate(cuts)}

    def place(candidate: Candidate) -> tuple[int, int]:
        at = candidate.at[0] if candidate.at else None
        if at is None:
            return (0, 0 if not candidate.at else 1 if candidate.codecs[0] == "raw" else 2)
        return (1, order[at])

    whole = [candidate for candidate in plans[0] if candidate.is_baseline]
    return sorted((*whole, *(one for plan in plans for one in plan if not one.is_baseline)), key=place)


def _notes(plans: Sequence[Plan], cuts: Cuts, candidates: Sequence[Candidate]) -> Iterator[str]:
    left_out = len(cuts) - sum(not candidate.is_baseline for candidate in candidates)
    if left_out:
        yield f"{left_out} of {len(cuts)} cuts are left out: a profile has no times so deep"
    yield from (note for note in plans[0].notes if "cuts are left out" not in note)
    yield f"codecs: {plans[0].codec_costs}"


def _no_times() -> str:
    return f"There are no times to weigh cuts by: profile with {TIME.advice}, on the machine that is to be the edge."


def _no_cuts() -> str:
    command = "microtome report profile.json -o report.html --cuts cuts.json"
    return f"No cuts were given: write {advise('profile.to_html(file, cuts=mt.cuts(model, inputs))', command)}."

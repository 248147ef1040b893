"""What the split explorer reads: the candidates of a plan, taken apart so that the script can price them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from microtome.errors import MicrotomeError
from microtome.plan import Candidate, Link, plan
from microtome.profile import Profile
from microtome.split.data import Cut, Cuts

#: With more cuts than this, those that send the least are kept. A plan holds tables of cuts by cuts.
_MOST = 1500
#: Where the sliders stand at first: a link in bytes and seconds, and speeds in times what was measured.
START = {"bandwidth_bps": 20e6, "rtt_s": 0.015, "edge": 1.0, "cloud": 10.0}


def explorer(profile: Profile, cuts: Cuts | None, compare: Profile | None, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The parts of what each candidate takes; or, as `missing`, why there is none.

    The cloud is the machine of the other run, if that is of the same model and has times; else this one.
    """
    if profile.total.until_s is None:
        return {"missing": _NO_TIMES}
    if cuts is None:
        return {"missing": _NO_CUTS}
    kept = _kept(cuts)
    other = compare if compare is not None and compare.total.until_s is not None else None
    try:
        found = plan(kept, edge=profile, cloud=other or profile, link=_link())
    except MicrotomeError as error:
        if other is None:
            return {"missing": f"No plan can be made: {error}"}
        return explorer(profile, cuts, None, [f"the other run cannot be the cloud: {error}"])
    order = {cut.at: at for at, cut in enumerate(kept)}
    listed = sorted(found, key=lambda candidate: _place(candidate, order))
    left_out = len(cuts) - len(kept)
    return {
        "start": START | ({} if other is None else {"cloud": 1.0}),
        "cloud": "this machine" if other is None else "the other run's",
        "names": [candidate.name for candidate in listed],
        "baseline": [candidate.is_baseline for candidate in listed],
        "crosses": [bool(candidate.at) for candidate in listed],
        "edge_s": [candidate.seconds("run", where="edge") for candidate in listed],
        "encode_s": [candidate.seconds("encode") for candidate in listed],
        "decode_s": [candidate.seconds("decode") for candidate in listed],
        "cloud_s": [candidate.seconds("run", where="cloud") for candidate in listed],
        "sent": [sum(candidate.sent_bytes) for candidate in listed],
        "back": [candidate.back_bytes for candidate in listed],
        "notes": [
            *notes,
            *found.notes,
            *([f"{left_out} of {len(cuts)} cuts are left out here: those kept send the least"] if left_out else []),
            f"codecs: {found.codec_costs}",
        ],
    }


def _link() -> Link:
    return Link(START["bandwidth_bps"], START["rtt_s"])


def _kept(cuts: Cuts) -> Cuts:
    if len(cuts) <= _MOST:
        return cuts
    least: Sequence[Cut] = sorted(cuts, key=lambda cut: (not cut.dominates, cut.nbytes, cut.index))[:_MOST]
    return replace(cuts, offered=tuple(sorted(least, key=lambda cut: cut.index)))


def _place(candidate: Candidate, order: dict[str, int]) -> tuple[int, int]:
    """First those without a cut, as a plan lists them; then cuts in the order of the run. Of equals the first wins."""
    at = candidate.at[0] if candidate.at else None
    if at is None:
        return (0, 0 if not candidate.at else 1 if candidate.codecs[0] == "raw" else 2)
    return (1, order[at] if at in order else order[at.removesuffix("#0")])


_NO_TIMES = (
    "There are no times to weigh cuts by: profile with measure='time' "
    "(microtome profile MODEL --time --html report.html), on the machine that is to be the edge."
)
_NO_CUTS = (
    "No cuts were given: write profile.to_html(file, cuts=mt.cuts(model, inputs)), or "
    "microtome report profile.json -o report.html --cuts cuts.json."
)

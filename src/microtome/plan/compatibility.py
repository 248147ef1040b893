"""Check that cuts, profiles and costs of codecs belong to the same model, run on inputs of the same shapes.

All quantities that both contain are compared: calls with their types and shapes, parameters, MACs, and FLOPs. Files of
an older version lack some of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from microtome.errors import BadQuery, NoMatch
from microtome.plan.codec_benchmark import crossing_values
from microtome.results.codec_costs import CodecCosts
from microtome.results.cuts import Cut, Cuts
from microtome.results.metrics import BACKWARD_TIME, TIME
from microtome.results.profile import Profile
from microtome.units import shape

#: The FLOP convention of cuts.
_CONVENTION = "microtome"
_ADVICE = "profile the model that was cut, built in the same way"


def check_profile(cuts: Cuts, name: str, profile: Profile) -> None:
    """Raise if a profile differs from the cuts, or has no times.

    Raises:
        NoMatch: If one of them has a call that the other has not.
        BadQuery: If they differ in anything else.
    """
    if profile.model != cuts.model:
        raise BadQuery(
            f"the cuts are of a {cuts.model}, and the profile of {name!r} is of a {profile.model}: {_ADVICE}"
        )
    all_cuts = sorted((*cuts.offered, *cuts.refused), key=lambda cut: cut.index)
    _check_calls(cuts, all_cuts, name, profile)
    for expected, got, advice in _compared_values(cuts, all_cuts, profile):
        if expected != got:
            raise BadQuery(f"expected {expected}, as in the cuts; got {got} in the profile of {name!r}: {advice}")
    _check_layers(all_cuts, name, profile)
    if profile.total.time_s is None:
        raise BadQuery(f"the profile of {name!r} has no times: profile the model there with {TIME.advice}")
    if profile.total.elapsed_s is None:
        raise BadQuery(
            f"the profile of {name!r} is of an older microtome, without times between layers: profile the model there "
            "again"
        )


def check_backward(name: str, profile: Profile) -> None:
    """Raise if a profile has no backward."""
    if profile.total.backward_s is None or profile.total.saved_bytes is None:
        reason = profile.unavailable.get("backward")
        raise BadQuery(
            f"the profile of {name!r} has no backward{f' ({reason})' if reason else ''}: profile the model there with "
            f"{BACKWARD_TIME.advice}"
        )


def _check_calls(cuts: Cuts, all_cuts: list[Cut], name: str, profile: Profile) -> None:
    addresses = {row.address for row in profile}
    missing = [cut.at for cut in all_cuts if cut.at not in addresses]
    if missing:
        raise NoMatch(f"the profile of {name!r} has no call {missing[0]!r}, where {cuts.model} can be cut: {_ADVICE}")
    calls = cuts.calls
    if calls is None and [cut.index for cut in all_cuts] == list(range(len(all_cuts))):  # an older file, of all cuts
        calls = len(all_cuts) + 1
    if calls is not None and calls != len(addresses):
        raise NoMatch(
            f"the profile of {name!r} has {len(addresses)} calls, and the {cuts.model} that was cut has {calls}: "
            f"{_ADVICE}"
        )


def _compared_values(cuts: Cuts, all_cuts: list[Cut], profile: Profile) -> Iterator[tuple[str, str, str]]:
    """Yield (cuts' value, profile's value, advice) for each compared quantity."""
    profiled = [f"{shape(tensor.shape)} {tensor.dtype}" for tensor in profile.total.inputs]
    traced = [f"{shape(value.shape)} {value.dtype}" for value in cuts.inputs]
    if set(profiled) != set(traced):  # one tensor may be passed twice
        expected, got = (f"inputs of {', '.join(shapes)}" for shapes in (traced, profiled))
        yield expected, got, "profile with the same inputs, of the same batch"
    rows = {row.address: row for row in profile}
    for cut in all_cuts:
        row = rows[cut.at]
        yield f"a {cut.type} at {cut.at!r}", f"a {row.type} at {cut.at!r}", _ADVICE
        outputs = [shape(value.shape) for value in cut.live if value.name == cut.at]
        if outputs and len(row.outputs) == 1:
            expected, got = (f"{size} from {cut.at!r}" for size in (outputs[0], shape(row.outputs[0].shape)))
            yield expected, got, _ADVICE
    params = cuts.params
    if params is None:  # in an older file: a lower bound, the parameters of the largest head
        params = max((profile.total.params, *(cut.head_params for cut in all_cuts)))
    counts: list[tuple[str, int | None, int | None]] = [
        ("parameters", params, profile.total.params),
        ("bytes of parameters", cuts.param_bytes, profile.total.param_bytes),
    ]
    if profile.convention == _CONVENTION and all_cuts:
        counts.append(("MACs", _total_macs(all_cuts[-1]), profile.total.macs))
        if all(how.startswith("meta") for how in (cuts.how, profile.how)) and not profile.coverage.unknown:
            counts.append(("FLOPs", cuts.flops, profile.total.flops))  # on real tensors, kernels differ by device
    for unit, expected_count, count in counts:
        if expected_count is not None and count is not None:
            yield f"{expected_count:,} {unit}", f"{count:,} {unit}", _ADVICE


def _total_macs(cut: Cut) -> int | None:
    return None if cut.head_macs is None or cut.tail_macs is None else cut.head_macs + cut.tail_macs


def _check_layers(all_cuts: list[Cut], name: str, profile: Profile) -> None:
    """Raise if a layer has more MACs than the cuts have between its end and that of the call before it."""
    if profile.convention != _CONVENTION:
        return
    rows = {row.address: row for row in profile}
    before = 0
    for cut in all_cuts:
        row, until = rows[cut.at], cut.head_macs
        if until is None or row.macs is None:
            return
        if row.height == 1 and row.macs > until - before:
            raise BadQuery(
                f"expected at most {until - before:,} MACs in {cut.at!r}, as in the cuts; got {row.macs:,} in the "
                f"profile of {name!r}: {_ADVICE}"
            )
        before = until


def check_codec_costs(cuts: Cuts, name: str, costs: CodecCosts) -> None:
    """Raise if costs of codecs belong to other cuts."""
    if costs.model != cuts.model:
        raise BadQuery(f"the cuts are of a {cuts.model}, and the costs of codecs on {name!r} are of a {costs.model}")
    raw = costs.costs.get("raw", {})
    for value in crossing_values(cuts):
        nbytes = prod(value.shape) * getattr(torch, value.dtype).itemsize
        if value.name in raw and raw[value.name].nbytes != nbytes:
            raise BadQuery(
                f"expected {nbytes:,} bytes of {value.name!r}, as in the cuts; got {raw[value.name].nbytes:,} in the "
                f"costs of codecs on {name!r}: measure them for the cuts of this model and these inputs"
            )

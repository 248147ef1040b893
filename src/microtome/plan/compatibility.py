"""Check that cuts, profiles and costs of codecs are of one model, run on inputs of one shape.

All that both hold is compared: calls with their types and shapes, parameters, MACs of the whole and of layers, and
FLOPs of the whole. Files of an older microtome are compared by what they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from microtome.errors import BadQuery, NoMatch
from microtome.plan.codec_benchmark import crossing
from microtome.results.codec_costs import CodecCosts
from microtome.results.cuts import Cut, Cuts
from microtome.results.profile import Profile
from microtome.units import shape

#: The convention in which cuts count.
_CONVENTION = "microtome"
_AGAIN = "profile the model that was cut, built in the same way"


def check_profile(cuts: Cuts, name: str, profile: Profile) -> None:
    """Raise where a profile is of something else than the cuts.

    Raises:
        NoMatch: If one of them has a call that the other has not.
        BadQuery: If they differ in anything else.
    """
    if profile.model != cuts.model:
        raise BadQuery(f"the cuts are of a {cuts.model}, and the profile of {name!r} is of a {profile.model}")
    every = sorted((*cuts.offered, *cuts.refused), key=lambda cut: cut.index)
    _check_calls(cuts, every, name, profile)
    for ours, theirs, advice in _pairs(cuts, every, profile):
        if ours != theirs:
            raise BadQuery(f"expected {ours}, as in the cuts; got {theirs} in the profile of {name!r}: {advice}")
    _check_layers(every, name, profile)


def _check_calls(cuts: Cuts, every: list[Cut], name: str, profile: Profile) -> None:
    known = {row.address for row in profile}
    missing = [cut.at for cut in every if cut.at not in known]
    if missing:
        raise NoMatch(
            f"the profile of {name!r} has no call {missing[0]!r}, where the {cuts.model} can be cut: {_AGAIN}"
        )
    calls = cuts.calls
    if calls is None and [cut.index for cut in every] == list(range(len(every))):  # an older file, of all cuts
        calls = len(every) + 1
    if calls is not None and calls != len(known):
        raise NoMatch(
            f"the profile of {name!r} has {len(known)} calls, and the {cuts.model} that was cut has {calls}: {_AGAIN}"
        )


def _pairs(cuts: Cuts, every: list[Cut], profile: Profile) -> Iterator[tuple[str, str, str]]:
    """Yield (cuts' value, profile's value, advice) for each compared quantity."""
    given = [f"{shape(tensor.shape)} {tensor.dtype}" for tensor in profile.total.inputs]
    wanted = [f"{shape(value.shape)} {value.dtype}" for value in cuts.inputs]
    if sorted(set(given)) != sorted(set(wanted)):  # one tensor may be given twice
        ours, theirs = (f"inputs of {', '.join(shapes)}" for shapes in (wanted, given))
        yield ours, theirs, "profile with the same inputs, of the same batch"
    rows = {row.address: row for row in profile}
    for cut in every:
        row = rows[cut.at]
        yield f"a {cut.type} at {cut.at!r}", f"a {row.type} at {cut.at!r}", _AGAIN
        made = [shape(value.shape) for value in cut.live if value.name == cut.at]
        if made and len(row.outputs) == 1:
            ours, theirs = (f"{size} from {cut.at!r}" for size in (made[0], shape(row.outputs[0].shape)))
            yield ours, theirs, _AGAIN
    params = cuts.params
    if params is None:  # in an older file: those that the first stage reads are no more than there are
        params = max((profile.total.params, *(cut.head_params for cut in every)))
    numbers: list[tuple[str, int | None, int | None]] = [
        ("parameters", params, profile.total.params),
        ("bytes of parameters", cuts.param_bytes, profile.total.param_bytes),
    ]
    if profile.convention == _CONVENTION and every:
        numbers.append(("MACs", _macs(every[-1]), profile.total.macs))
        if all(how.startswith("meta") for how in (cuts.how, profile.how)) and not profile.coverage.unknown:
            numbers.append(("FLOPs", cuts.flops, profile.total.flops))  # elsewhere kernels differ between devices
    for what, mine, other in numbers:
        if mine is not None and other is not None:
            yield f"{mine:,} {what}", f"{other:,} {what}", _AGAIN


def _macs(cut: Cut) -> int | None:
    return None if cut.head_macs is None or cut.tail_macs is None else cut.head_macs + cut.tail_macs


def _check_layers(every: list[Cut], name: str, profile: Profile) -> None:
    """Raise if a layer does more than the cuts say between its end and the end of the call before it."""
    if profile.convention != _CONVENTION:
        return
    rows = {row.address: row for row in profile}
    before = 0
    for cut in every:
        row, ends = rows[cut.at], cut.head_macs
        if ends is None or row.macs is None:
            return
        if row.height == 1 and row.macs > ends - before:
            raise BadQuery(
                f"the cuts are of a model whose {cut.at!r} does {ends - before:,} MACs at most, and in the profile of "
                f"{name!r} it does {row.macs:,}: {_AGAIN}"
            )
        before = ends


def check_costs(cuts: Cuts, name: str, costs: CodecCosts) -> None:
    """Raise where costs of codecs are of something else than the cuts."""
    if costs.model != cuts.model:
        raise BadQuery(f"the cuts are of a {cuts.model}, and the costs of codecs on {name!r} are of a {costs.model}")
    raw = costs.costs.get("raw", {})
    for value in crossing(cuts):
        nbytes = prod(value.shape) * getattr(torch, value.dtype).itemsize
        if value.name in raw and raw[value.name].nbytes != nbytes:
            raise BadQuery(
                f"at the cuts {value.name!r} has {nbytes:,} bytes, and the costs of codecs on {name!r} are of "
                f"{raw[value.name].nbytes:,}: measure them for the cuts of this model and these inputs"
            )

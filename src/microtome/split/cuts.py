"""Every place a model can be cut, and what crosses there."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from operator import itemgetter
from typing import Any

from torch import nn

from microtome.addresses import strip_first_index
from microtome.engine.selectors import check_model
from microtome.results.cuts import Cut, Cuts, Live
from microtome.results.trace import Op, Trace, TracedCall, Value
from microtome.split.analysis import Analysis, analyze
from microtome.split.arrays import array_name
from microtome.split.crossing import Crossing, ValueLocation
from microtome.split.liveness import Liveness


def cuts(model: nn.Module, inputs: Any) -> Cuts:
    """List every cut at which head and tail give together exactly what the model gives.

    The model is run once, on tensors without values where it allows that. A cut is at the exit of a call: of every
    module that runs, however deep.

    Args:
        inputs: A tensor, a tuple, a dict, an `Inputs`, or a text such as `"1x3x224x224"`.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> found = mt.cuts(model, x)
    >>> found
    <Cuts of ResNet: 42>
    >>> [live.name for live in found["layer1.0.conv1"].live]
    ['stem', 'layer1.0.conv1']
    """
    return list_cuts(check_model(model), analyze(model, inputs))


def list_cuts(model: nn.Module, analysis: Analysis) -> Cuts:
    """All cuts of a run."""
    liveness = Liveness(analysis)
    everywhere = _everywhere(analysis)
    counts = _Counts(analysis)
    arrays = _arrays(analysis)
    least: int | None = None
    found: list[Cut] = []
    for index, call in enumerate(analysis.exit_order[:-1]):  # the last is the model itself
        refused = everywhere or _refusal(analysis, call)
        crossing = liveness.crossing(call)
        refused = refused or crossing_refusal(analysis, crossing) or crossing.refused
        live = (*arrays, *_live(analysis, crossing))
        nbytes = sum(value.nbytes for value in live)
        dominates = refused is None and (least is None or nbytes < least)
        if dominates:
            least = nbytes
        found.append(
            Cut(index, call.address, call.type, call.depth, live, nbytes, *counts.at(crossing), dominates, refused)
        )
    trace = analysis.trace
    taken = [trace.values[at] for at in dict.fromkeys(trace.calls[0].inputs)]
    given = [trace.values[at] for at in dict.fromkeys(trace.calls[0].outputs)]
    weights = list(model.parameters())
    flops = [op.flops for op in trace.ops]
    return Cuts(
        type(model).__name__,
        (*arrays, *(_as_live(_input_name(value), None, value) for value in taken)),
        tuple(_as_live(f"output[{at}]", "", value) for at, value in enumerate(given)),
        tuple(cut for cut in found if cut.refused is None),
        tuple(cut for cut in found if cut.refused is not None),
        str(trace.how),
        len(trace.calls),
        sum(weight.numel() for weight in weights),
        sum(weight.nbytes for weight in weights),
        None if None in flops else sum(count for count in flops if count is not None),
    )


def _everywhere(analysis: Analysis) -> str | None:
    """Return the reason why no cut at all is exact."""
    if analysis.draws and len(analysis.scalars) != len(analysis.trace.ops):  # in a backward that the forward runs
        return "the model draws random numbers, and it is not known in which of its operators"
    if (unsupported := analysis.input_spec.unsupported) is not None:
        return f"the model is given a {unsupported}, which cannot be sent: give tensors, numbers and texts"
    return None


def _memory_refusal(analysis: Analysis, crossing: Crossing) -> str | None:
    """Return the reason why a tensor that the model keeps and mutates would differ between the sides."""
    trace, around = analysis.trace, {level.call.index for level in crossing.levels}

    def side(op: Op) -> str:
        return "tail" if op.index >= crossing.cut.ends else "both" if op.call in around else "head"

    for memory, writers in analysis.state_writes.items():
        values = [value for value in trace.values if value.memory == memory]
        readers = {at for value in values for at in value.consumers if not _only_writes(trace, at, memory)}
        sides = {side(trace.ops[at]) for at in (*writers, *readers)}
        if any(value.index in trace.calls[0].outputs for value in values):
            sides.add("tail")
        if len(sides) == 1 and "both" not in sides:
            continue
        op, held = trace.ops[writers[0]], values[0]
        where = "" if op.call is None else f" in {trace.calls[op.call].address!r}"
        what = f"the {held.origin} {held.name!r}" if held.name else "a tensor that the model keeps"
        hint = "put the model in eval mode, or " if analysis.is_training else ""
        return (
            f"{op.name}{where} changes {what} as it runs, and the other side of the cut reads or changes it too: {hint}"
            "cut where one side does both"
        )
    return None


def _only_writes(trace: Trace, op: int, memory: int) -> bool:
    """Whether nothing depends on what an operator reads of a memory but what it writes there."""
    found = trace.ops[op]
    made = {trace.values[at].memory for at in (*found.outputs, *found.mutates)}
    return bool(found.mutates) and made == {memory}


def _refusal(analysis: Analysis, call: TracedCall) -> str | None:
    around = call.parent
    while around is not None:
        outer = analysis.trace.calls[around]
        if around in analysis.fused_calls:
            where = f"{outer.address!r}, a {outer.type}" if outer.address else f"the model itself, a {outer.type}"
            return (
                f"it lies inside {where}, which torch runs as one fused operator when no gradient is wanted: the parts "
                "give other last bits"
            )
        around = outer.parent
    return None


def crossing_refusal(analysis: Analysis, crossing: Crossing) -> str | None:
    """Return the reason why an effect of the head cannot be replayed in the tail."""
    trace = analysis.trace
    again: set[str] | None = None
    for level in crossing.levels:
        for call in level.skipped:
            if analysis.call_structures[call.index].side_effect is not None:
                return f"{call.address!r} runs in the head, and {analysis.call_structures[call.index].side_effect}"
            if analysis.has_hook_mutations and (hooked := _hooked(analysis, crossing, call)) is not None:
                return hooked
            for inside in trace.below(call) if analysis.mutates_attributes else ():
                if not (sets := analysis.call_structures[inside.index].mutated_attributes):
                    continue
                if again is None:
                    again = {later.path for later in trace.calls if later.ends > crossing.cut.ends}
                if inside.path in again:
                    return (
                        f"{inside.address!r} runs in the head and sets {', '.join(sets)} of its module, which runs "
                        "again in the tail"
                    )
    return (
        analysis.state.refusal(crossing, trace.calls)
        or _memory_refusal(analysis, crossing)
        or _chance(analysis, crossing)
    )


def _chance(analysis: Analysis, crossing: Crossing) -> str | None:
    """Return the reason why the two sides may draw other random numbers, or make other calls than this run."""
    if not analysis.varying_calls and not analysis.python_draws:
        return None
    calls, position = analysis.trace.calls, analysis.exit_order.index(crossing.cut)
    hint = "put the model in eval mode, or cut" if analysis.is_training else "cut"
    drawing = {analysis.trace.ops[op].call for op in analysis.draws if op < crossing.cut.ends}
    drawing |= {draw.call for draw in analysis.python_draws if draw.ended <= position}
    for level in crossing.levels:
        where = repr(level.call.address) if level.call.address else "the model"
        varies = strip_first_index(level.call.address) in analysis.varying_calls
        if varies and any(call.index in drawing for call in analysis.trace.below(level.call)):
            return (
                f"by the random numbers that {where} draws, it makes other calls in other runs: {hint} before it draws"
            )
        for draw in analysis.python_draws:
            if calls[draw.call] is level.call and draw.ended <= position:
                return (
                    f"the forward of {where} draws from {draw.package} before the cut, and both sides would draw for "
                    f"themselves: {hint} before that"
                )
    return None


def _hooked(analysis: Analysis, crossing: Crossing, call: TracedCall) -> str | None:
    """Return the reason why the tail would miss a forward hook: it runs those of skipped calls, not of calls inside."""
    around = {level.call.path for level in crossing.levels}
    for inside in analysis.trace.below(call):
        for path, names in analysis.call_structures[inside.index].hook_mutations if inside is not call else ():
            if names and path in around:
                where = f"the {path!r} around it" if path else "the model"
                return (
                    f"a forward hook of {inside.address!r} changes {', '.join(names)} of {where}, and would not run in "
                    f"the tail, which leaves out {call.address!r}: put the hook on {call.address!r}"
                )
    return None


def _live(analysis: Analysis, crossing: Crossing) -> tuple[Live, ...]:
    """The values that cross, each once, in the order in which they are made."""
    calls, values = analysis.trace.calls, analysis.trace.values
    listed: dict[Any, Live] = {}
    for place, value in sorted(crossing.values.items(), key=lambda pair: _when(analysis, pair[0])):
        source = None if place.call is None else calls[place.call].address
        if place.draw is not None:
            source = calls[analysis.trace.ops[place.draw].call or 0].address
        live = _as_live(location_name(analysis, place), source, values[value])
        memory = values[value].memory
        if place in crossing.copied:
            listed[place] = live
        elif memory in crossing.joined:
            listed.setdefault(("memory", memory), live._replace(nbytes=analysis.trace.memories[memory].nbytes))
        else:
            listed.setdefault(value, live)
    return tuple(listed.values())


def _arrays(analysis: Analysis) -> tuple[Live, ...]:
    """The numpy arrays that the model is given: which code reads them is not analysis, so they cross every cut."""
    found = []
    for at, (shape, dtype) in enumerate(analysis.arrays):
        nbytes = math.prod(shape) * dtype.itemsize
        found.append(Live(array_name(at), None, shape, str(dtype).removeprefix("torch."), nbytes))
    return tuple(found)


def _when(analysis: Analysis, place: ValueLocation) -> tuple[int, int]:
    if place.draw is not None:
        return place.draw, -1
    return (-1, place.position) if place.call is None else (analysis.trace.calls[place.call].ends, place.call)


def location_name(analysis: Analysis, place: ValueLocation) -> str:
    """Name a value that crosses by the call that returned it, with its index where there are several."""
    if place.draw is not None:
        op = analysis.trace.ops[place.draw]
        name, number = analysis.draws[place.draw].name.partition(".")[0], list(analysis.draws).index(place.draw)
        return f"{analysis.trace.calls[op.call or 0].address}({name}#{number})"
    if place.call is None:
        return _input_name(analysis.trace.values[analysis.trace.calls[0].inputs[place.position]])
    call = analysis.trace.calls[place.call]
    if place.is_argument:
        return f"{call.address}(args[{place.position}])"
    return call.address if len(call.outputs) == 1 else f"{call.address}[{place.position}]"


def _input_name(value: Value) -> str:
    return value.name or "input"


def _as_live(name: str, source: str | None, value: Value) -> Live:
    return Live(name, source, value.shape, str(value.dtype).removeprefix("torch."), value.nbytes)


class _Counts:
    """Work and parameters on either side of a cut."""

    def __init__(self, analysis: Analysis) -> None:
        trace = analysis.trace
        self._macs: list[int | None] = [0]
        for op in trace.ops:
            before = self._macs[-1]
            self._macs.append(None if before is None or op.macs is None else before + op.macs)
        uses: dict[int, list[int]] = {}
        for value in trace.values:
            uses.setdefault(value.memory, []).extend(value.consumers)
        read = [value for value in trace.values if value.origin == "parameter" and uses[value.memory]]
        self._last = {value.index: max(uses[value.memory]) for value in read}
        self._begun = _Sums(sorted(((min(uses[value.memory]), value) for value in read), key=itemgetter(0)))
        self._ended = _Sums(sorted(((self._last[value.index], value) for value in read), key=itemgetter(0)))
        self._by_op: dict[int, list[Value]] = {}
        for value in read:
            for use in set(uses[value.memory]):
                self._by_op.setdefault(use, []).append(value)

    def at(self, crossing: Crossing) -> tuple[int | None, int | None, int, int, int, int]:
        ends = crossing.cut.ends
        head, total = self._macs[ends], self._macs[-1]
        tail = None if total is None or head is None else total - head
        head_count, head_bytes = self._begun.before(ends)
        ended_count, ended_bytes = self._ended.before(ends)
        tail_count, tail_bytes = self._ended.total[0] - ended_count, self._ended.total[1] - ended_bytes
        again = {
            value.index: value
            for level in crossing.levels
            for op in level.call.ops
            if op < ends
            for value in self._by_op.get(op, ())
            if self._last[value.index] < ends
        }
        for value in again.values():
            tail_count += value.nbytes // value.dtype.itemsize
            tail_bytes += value.nbytes
        return head, tail, head_count, tail_count, head_bytes, tail_bytes


class _Sums:
    """The number of parameters before a time, and their bytes."""

    def __init__(self, timed: list[tuple[int, Value]]) -> None:
        self._times = [time for time, _ in timed]
        self._counts = [0, *accumulate(value.nbytes // value.dtype.itemsize for _, value in timed)]
        self._bytes = [0, *accumulate(value.nbytes for _, value in timed)]

    def before(self, time: int) -> tuple[int, int]:
        at = bisect_left(self._times, time)
        return self._counts[at], self._bytes[at]

    @property
    def total(self) -> tuple[int, int]:
        return self._counts[-1], self._bytes[-1]

"""Every place a model can be cut, and what crosses there."""

from __future__ import annotations

from typing import Any

from torch import nn

from microtome.engine.select import check_model
from microtome.split.data import Cut, Cuts, Live
from microtome.split.liveness import Crossing, Liveness, Place
from microtome.split.study import Study, study
from microtome.trace.data import TracedCall, Value


def cuts(model: nn.Module, inputs: Any) -> Cuts:
    """Where the model can be cut so that head and tail give together exactly what the model gives.

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
    return list_cuts(type(check_model(model)).__name__, study(model, inputs))


def list_cuts(name: str, seen: Study) -> Cuts:
    """All cuts of a run."""
    liveness = Liveness(seen)
    everywhere = _everywhere(seen)
    counts = _Counts(seen)
    least: int | None = None
    found: list[Cut] = []
    for index, call in enumerate(seen.ending[:-1]):  # the last is the model itself
        refused = everywhere or _refusal(seen, call)
        crossing = liveness.crossing(call)
        refused = refused or crossing_refusal(seen, crossing) or crossing.refused
        live = _live(seen, crossing)
        nbytes = sum(value.nbytes for value in live)
        dominates = refused is None and (least is None or nbytes < least)
        if dominates:
            least = nbytes
        found.append(
            Cut(index, call.address, call.type, call.depth, live, nbytes, *counts.at(crossing), dominates, refused)
        )
    trace = seen.trace
    taken = [trace.values[at] for at in dict.fromkeys(trace.calls[0].inputs)]
    given = [trace.values[at] for at in dict.fromkeys(trace.calls[0].outputs)]
    return Cuts(
        name,
        tuple(_as_live(_input_name(value), None, value) for value in taken),
        tuple(_as_live(f"output[{at}]", "", value) for at, value in enumerate(given)),
        tuple(cut for cut in found if cut.refused is None),
        tuple(cut for cut in found if cut.refused is not None),
        str(trace.how),
    )


def _everywhere(seen: Study) -> str | None:
    """Why no cut at all is exact."""
    if seen.chance is not None:
        return f"{seen.chance}, and the two sides would not draw the same; if it is dropout, call model.eval()"
    if seen.inputs.strange is not None:
        return f"the model is given a {seen.inputs.strange}, which cannot be sent: give tensors, numbers and texts"
    values = seen.trace.values
    for op in seen.trace.ops:
        for at in op.mutates:
            first = values[at].alias_of
            held = values[at if first is None else first]
            if held.origin in ("parameter", "buffer", "constant"):
                where = "" if op.call is None else f" in {seen.trace.calls[op.call].address!r}"
                what = f"the {held.origin} {held.name!r}" if held.name else "a tensor that the model keeps"
                return f"{op.name}{where} changes {what} as it runs, on one side alone: put the model in eval mode"
    return None


def _refusal(seen: Study, call: TracedCall) -> str | None:
    around = call.parent
    while around is not None:
        outer = seen.trace.calls[around]
        if around in seen.fused:
            where = f"{outer.address!r}, a {outer.type}" if outer.address else f"the model itself, a {outer.type}"
            return (
                f"it lies inside {where}, which torch runs as one fused operator when no gradient is wanted: the parts "
                "give other last bits"
            )
        around = outer.parent
    return None


def crossing_refusal(seen: Study, crossing: Crossing) -> str | None:
    """Why what the head does cannot be told to the tail."""
    trace = seen.trace
    again: set[str] | None = None
    for level in crossing.levels:
        if seen.shapes[level.call.index].counts:
            where = repr(level.call.address) if level.call.address else "the model"
            names = ", ".join(seen.shapes[level.call.index].sets)
            return f"{where}, which both sides run, counts in {names} of its module"
        for call in level.skipped:
            if seen.shapes[call.index].effect is not None:
                return f"{call.address!r} runs in the head, and {seen.shapes[call.index].effect}"
            for inside in trace.below(call):
                if not (sets := seen.shapes[inside.index].sets):
                    continue
                if again is None:
                    again = {later.path for later in trace.calls if later.ends > crossing.cut.ends}
                if inside.path in again:
                    return (
                        f"{inside.address!r} runs in the head and sets {', '.join(sets)} of its module, which runs "
                        "again in the tail"
                    )
    return None


def _live(seen: Study, crossing: Crossing) -> tuple[Live, ...]:
    """The values that cross, each once, in the order in which they are made."""
    calls, values = seen.trace.calls, seen.trace.values
    listed: dict[Any, Live] = {}
    for place, value in sorted(crossing.values.items(), key=lambda pair: _when(seen, pair[0])):
        source = None if place.call is None else calls[place.call].address
        live = _as_live(place_name(seen, place), source, values[value])
        memory = values[value].memory
        if place in crossing.copied:
            listed[place] = live
        elif memory in crossing.joined:
            listed.setdefault(("memory", memory), live._replace(nbytes=seen.trace.memories[memory].nbytes))
        else:
            listed.setdefault(value, live)
    return tuple(listed.values())


def _when(seen: Study, place: Place) -> tuple[int, int]:
    return (-1, place.at) if place.call is None else (seen.trace.calls[place.call].ends, place.call)


def place_name(seen: Study, place: Place) -> str:
    """What a value that crosses is called: by the call that gave it, with its place where that gave several."""
    if place.call is None:
        return _input_name(seen.trace.values[seen.trace.calls[0].inputs[place.at]])
    call = seen.trace.calls[place.call]
    if place.is_argument:
        return f"{call.address}(args[{place.at}])"
    return call.address if len(call.outputs) == 1 else f"{call.address}[{place.at}]"


def _input_name(value: Value) -> str:
    return value.name or "input"


def _as_live(name: str, source: str | None, value: Value) -> Live:
    return Live(name, source, value.shape, str(value.dtype).removeprefix("torch."), value.nbytes)


class _Counts:
    """Work and parameters on either side of a cut."""

    def __init__(self, seen: Study) -> None:
        trace = seen.trace
        self._seen = seen
        self._macs: list[int | None] = [0]
        for op in trace.ops:
            before = self._macs[-1]
            self._macs.append(None if before is None or op.macs is None else before + op.macs)
        self._total = self._macs[-1]
        # When each parameter is read first and last; of tied ones, each is the same value.
        read = [value for value in trace.values if value.origin == "parameter"]
        by_memory: dict[int, list[int]] = {}
        for value in trace.values:
            by_memory.setdefault(value.memory, []).extend(value.consumers)
        self._params = [
            (min(uses), max(uses), sorted(uses), value.nbytes // value.dtype.itemsize, value.nbytes)
            for value in read
            if (uses := by_memory[value.memory])
        ]

    def at(self, crossing: Crossing) -> tuple[int | None, int | None, int, int, int, int]:
        ends = crossing.cut.ends
        head = self._macs[ends]
        tail = None if self._total is None or head is None else self._total - head
        again = {at for level in crossing.levels for at in level.call.ops if at < ends}
        head_count = head_bytes = tail_count = tail_bytes = 0
        for first, last, uses, count, nbytes in self._params:
            if first < ends:
                head_count += count
                head_bytes += nbytes
            if last >= ends or not again.isdisjoint(uses):
                tail_count += count
                tail_bytes += nbytes
        return head, tail, head_count, tail_count, head_bytes, tail_bytes

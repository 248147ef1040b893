"""Every cut of a model, and what crosses there."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from torch import nn

from microtome.engine.selectors import check_model
from microtome.results.cuts import Cut, Cuts, Live, SharedWeight
from microtome.results.trace import TracedCall, Value
from microtome.split.analysis.analysis import Analysis, analyze
from microtome.split.analysis.arrays import array_name
from microtome.split.analysis.structure_spec import TensorSpec
from microtome.split.cuts.crossing import Crossing, ValueLocation
from microtome.split.cuts.liveness import Liveness
from microtome.split.cuts.phases import price_phases
from microtome.split.cuts.refusals import find_gradient_refusal, find_refusal


def cuts(model: nn.Module, inputs: Any) -> Cuts:
    """List every cut at which head and tail together compute exactly what the model computes.

    The model is run once, on tensors without values where it allows that. A cut is at the exit of a call: of every
    module that runs, however deep. Inputs of a language model that returns a cache are a prompt: `Cuts.decode` has the
    cuts of the run for the next token, and cuts have the bytes of the cache that stay on either side.

    Args:
        inputs: A tensor, a tuple, a dict, an `Inputs`, or a shape such as `"1x3x224x224"`; see `Inputs`.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> found = mt.cuts(model, x)
    >>> found
    <Cuts of ResNet: 42>
    >>> [live.name for live in found["layer1.0.conv1"].live]
    ['stem', 'layer1.0.conv1']
    """
    analysis = analyze(check_model(model), inputs)
    found = list_cuts(model, Liveness(analysis))
    return price_phases(model, inputs, found, list_cuts) if analysis.state_classes else found


def list_cuts(model: nn.Module, liveness: Liveness) -> Cuts:
    """All cuts of an analyzed run."""
    return CutTable(model, liveness).cuts


class CutTable:
    """The cuts of an analyzed run, each computed when it is asked for."""

    def __init__(self, model: nn.Module, liveness: Liveness) -> None:
        self._model = type(model).__name__
        weights = list(model.parameters())
        self._params = sum(weight.numel() for weight in weights), sum(weight.nbytes for weight in weights)
        self._liveness = liveness
        self._analysis = analysis = liveness.analysis
        self._calls = analysis.exit_order[:-1]  # the last is the model itself
        # Code that reads numpy arrays is not traced, so they cross every cut.
        self._arrays = tuple(_array(array_name(index), spec) for index, spec in enumerate(analysis.arrays))

    def __getitem__(self, at: str) -> Cut:
        """The cut at an address; its `dominates` is not computed, which takes those before it."""
        index = self._indices.get(at)
        if index is not None and (cut := self._cut(index)).refused is None:
            return cut
        return self.cuts[at]  # which explains refusals and other names

    @cached_property
    def cuts(self) -> Cuts:
        """All cuts."""
        trace = self._analysis.trace
        smallest: int | None = None
        all_cuts: list[Cut] = []
        for index in range(len(self._calls)):
            cut = self._cut(index)
            if cut.refused is None and (smallest is None or cut.nbytes < smallest):
                smallest, cut = cut.nbytes, replace(cut, dominates=True)
            all_cuts.append(cut)
        inputs = [trace.values[value] for value in dict.fromkeys(trace.calls[0].inputs)]
        outputs = [trace.values[value] for value in dict.fromkeys(trace.calls[0].outputs)]
        flops = [op.flops for op in trace.ops]
        return Cuts(
            self._model,
            (*self._arrays, *(_live(_input_name(value), None, value) for value in inputs)),
            tuple(_live(f"output[{index}]", "", value) for index, value in enumerate(outputs)),
            tuple(cut for cut in all_cuts if cut.refused is None),
            tuple(cut for cut in all_cuts if cut.refused is not None),
            str(trace.how),
            len(trace.calls),
            *self._params,
            None if None in flops else sum(count for count in flops if count is not None),
            aliases=trace.aliases,
            shared_weights=self._costs.shared_weights([call.ends for call in self._calls]),
        )

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {call.address: index for index, call in enumerate(self._calls)}

    @cached_property
    def _costs(self) -> _Costs:
        return _Costs(self._analysis)

    def _cut(self, index: int) -> Cut:
        call = self._calls[index]
        crossing = self._liveness.crossing(call)
        refused = find_refusal(self._analysis, crossing) or crossing.refused
        live = (*self._arrays, *_live_values(self._analysis, crossing))
        nbytes = sum(value.nbytes for value in live)
        costs = self._costs.at(crossing)
        grad_refused = find_gradient_refusal(self._analysis, crossing) or self._refuse_writes(crossing)
        return Cut(
            index, call.address, call.type, call.depth, live, nbytes, *costs, refused=refused, grad_refused=grad_refused
        )

    def _refuse_writes(self, crossing: Crossing) -> str | None:
        """The reason why no gradient can cross where values that share memory are written to after the cut."""
        values = self._analysis.trace.values
        for location in crossing.written:
            value = values[crossing.values[location]]
            if value.memory in crossing.joined and value.dtype.is_floating_point and not location.is_input:
                return (
                    f"{location_name(self._analysis, location)!r} shares memory with another value that crosses the "
                    "cut, and is modified in place after it"
                )
        return None


def _live_values(analysis: Analysis, crossing: Crossing) -> tuple[Live, ...]:
    """The values that cross, each once, in the order in which they are computed."""
    calls, ops, values = analysis.trace.calls, analysis.trace.ops, analysis.trace.values

    def order(location: ValueLocation) -> tuple[int, int]:
        if location.draw is not None:
            return location.draw, -1
        return (-1, location.position) if location.call is None else (calls[location.call].ends, location.call)

    live_values: dict[Any, Live] = {}
    for location, value in sorted(crossing.values.items(), key=lambda item: order(item[0])):
        source = location.call if location.draw is None else ops[location.draw].call or 0
        address = None if source is None else calls[source].address
        memory = values[value].memory
        live = _live(location_name(analysis, location), address, values[value])
        if location in crossing.copied:
            live_values[location] = live
        elif memory in crossing.joined:
            live_values.setdefault(("memory", memory), live._replace(nbytes=analysis.trace.memories[memory].nbytes))
        else:
            live_values.setdefault(value, live)
    return tuple(live_values.values())


def _live(name: str, source: str | None, value: Value) -> Live:
    return Live(name, source, value.shape, str(value.dtype).removeprefix("torch."), value.nbytes)


def _array(name: str, spec: TensorSpec) -> Live:
    nbytes = math.prod(spec.shape) * spec.dtype.itemsize
    return Live(name, None, spec.shape, str(spec.dtype).removeprefix("torch."), nbytes)


def location_name(analysis: Analysis, location: ValueLocation) -> str:
    """Name a value that crosses by the call that returned it, with its index where there are several."""
    calls = analysis.trace.calls
    if location.draw is not None:
        call = calls[analysis.trace.ops[location.draw].call or 0]
        op, number = analysis.draws[location.draw].name, list(analysis.draws).index(location.draw)
        return f"{call.address}({op.partition('.')[0]}#{number})"
    if location.call is None:
        return _input_name(analysis.trace.values[calls[0].inputs[location.position]])
    call = calls[location.call]
    if location.is_argument:
        return f"{call.address}(args[{location.position}])"
    return call.address if len(call.outputs) == 1 else f"{call.address}[{location.position}]"


def _input_name(value: Value) -> str:
    return value.name or "input"


class _Costs:
    """MACs and parameters on either side of a cut, from sums over the operators before it."""

    def __init__(self, analysis: Analysis) -> None:
        trace = analysis.trace
        self._macs: list[int | None] = [0]
        for op in trace.ops:
            before = self._macs[-1]
            self._macs.append(None if before is None or op.macs is None else before + op.macs)
        uses: dict[int, list[int]] = {}
        for value in trace.values:
            uses.setdefault(value.memory, []).extend(value.consumers)
        used = [value for value in trace.values if value.origin == "parameter" and uses[value.memory]]
        self._uses = [(value, uses[value.memory]) for value in used]
        self._last_use = {value.index: max(uses[value.memory]) for value in used}
        self._used_by: dict[int, list[Value]] = {}
        self._weighted: dict[int, list[int]] = {}
        for value in used:
            for op_index in set(uses[value.memory]):
                self._used_by.setdefault(op_index, []).append(value)
        first_uses = [(min(uses[value.memory]), value) for value in used]
        last_uses = [(self._last_use[value.index], value) for value in used]
        self._begun = [_sums_before(first_uses, len(trace.ops), size_of) for size_of in (_numel, _nbytes)]
        self._ended = [_sums_before(last_uses, len(trace.ops), size_of) for size_of in (_numel, _nbytes)]

    def _weighted_ops(self, call: TracedCall) -> list[int]:
        """The operators in the code of a call itself that use parameters."""
        if call.index not in self._weighted:
            self._weighted[call.index] = [op for op in call.ops if op in self._used_by]
        return self._weighted[call.index]

    def shared_weights(self, ends: Sequence[int]) -> tuple[SharedWeight, ...]:
        """The parameters that are read on both sides of a cut.

        Args:
            ends: For each cut, the number of operators before it.
        """
        points = ((value, sorted({bisect_right(ends, op) for op in ops})) for value, ops in self._uses)
        return tuple(SharedWeight(value.nbytes, tuple(found)) for value, found in points if len(found) > 1)

    def at(self, crossing: Crossing) -> tuple[int | None, int | None, int, int, int, int]:
        """MACs, numbers of parameters and bytes of parameters, each of the head and of the tail."""
        end = crossing.cut.ends
        head_macs, total_macs = self._macs[end], self._macs[-1]
        tail_macs = None if total_macs is None or head_macs is None else total_macs - head_macs
        glue = (op for level in crossing.levels for op in self._weighted_ops(level.call) if op < end)
        used = {value.index: value for op in glue for value in self._used_by.get(op, ())}
        replayed = [value for value in used.values() if self._last_use[value.index] < end]
        head = [sums[end] for sums in self._begun]
        tail = [sums[-1] - sums[end] for sums in self._ended]
        tail_params, tail_bytes = tail[0] + sum(map(_numel, replayed)), tail[1] + sum(map(_nbytes, replayed))
        return head_macs, tail_macs, head[0], tail_params, head[1], tail_bytes


def _sums_before(uses: Iterable[tuple[int, Value]], num_ops: int, size_of: Callable[[Value], int]) -> list[int]:
    """The total size of the values used by operators before each operator, and before the end."""
    sizes = [0] * (num_ops + 1)
    for op, value in uses:
        sizes[op + 1] += size_of(value)
    return list(accumulate(sizes))


def _numel(value: Value) -> int:
    return value.nbytes // value.dtype.itemsize


def _nbytes(value: Value) -> int:
    return value.nbytes

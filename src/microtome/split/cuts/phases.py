"""The cuts of a language model for both phases: bytes that cross for the prompt and for each token, and its state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from microtome.engine import Call
from microtome.engine.pytree import reachable_tensors
from microtome.errors import BadInputs, describe_error
from microtome.inputs import Inputs
from microtome.results.cuts import Cut, Cuts, TokenCuts
from microtome.results.trace import Trace
from microtome.split.analysis.analysis import analyze
from microtome.split.cuts.liveness import Liveness
from microtome.trace.phases import OutputProbe, Prompt
from microtome.trace.trace import record

if TYPE_CHECKING:
    from collections.abc import Callable

    from microtome.trace.recorder import TraceRecorder

    ListCuts = Callable[[nn.Module, Liveness], Cuts]


def price_phases(model: nn.Module, inputs: Any, cuts: Cuts, list_cuts: ListCuts) -> Cuts:
    """Add the cuts of the run for the next token, and the bytes of state on either side, to the cuts of a prompt.

    A model whose state does not go from token to token has none; the reason why a next token cannot be priced is in the
    result.
    """
    try:
        prompt = Prompt.of(model, inputs)
    except BadInputs:
        return cuts
    try:
        before = _StateWrites.record(prompt, prompt.inputs)
        step = prompt.next_token(before.output)
        decode = list_cuts(model, Liveness(analyze(model, step)))
        after = _StateWrites.record(prompt, step)
    except Exception as error:  # noqa: BLE001  whatever a model raises, the cuts of the prompt are known
        return replace(cuts, prompt_tokens=prompt.length, no_decode=describe_error(error))
    grown = before.add_to(decode, before.bytes_by_call() | after.bytes_by_call())
    places = tuple(sorted((*grown.offered, *grown.refused), key=lambda cut: cut.index))
    token = TokenCuts(grown.inputs, grown.outputs, places, grown.how, grown.calls, grown.flops)
    return replace(before.add_to(cuts, before.bytes_by_call()), token=token, prompt_tokens=prompt.length)


class _StateWrites:
    """The operators of a run that wrote the tensors of its state.

    Attributes:
        output: The output of the run, with tensors without values.
    """

    def __init__(self, trace: Trace, values: Iterable[int], output: Any) -> None:
        self.output = output
        self._ends = {call.address: call.ends for call in trace.calls}
        self._writers: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        writers: dict[int, int] = {}
        for op in trace.ops:
            for value in (*op.outputs, *op.mutates):
                writers.setdefault(trace.values[value].memory, op.index)
        for value in values:
            op_index = writers.get(trace.values[value].memory)
            if op_index is None:
                continue  # written by an earlier run
            call = trace.ops[op_index].call
            address = "" if call is None else trace.calls[call].address
            self._writers[address] = max(op_index, self._writers.get(address, 0))
            self._bytes[address] = self._bytes.get(address, 0) + trace.values[value].nbytes

    @classmethod
    def record(cls, prompt: Prompt, inputs: Inputs) -> _StateWrites:
        """Trace one run."""
        probes: list[_StateProbe] = []

        def make_probes(recorder: TraceRecorder) -> list[_StateProbe]:
            probes.append(_StateProbe(prompt, recorder))
            return probes[-1:]

        trace, _ = record(prompt.model, inputs, make_probes=make_probes, values=True)
        return cls(trace, probes[-1].values, probes[-1].output)

    def bytes_by_call(self) -> dict[str, int]:
        """Return the bytes that each call wrote."""
        return dict(self._bytes)

    def add_to(self, cuts: Cuts, nbytes: dict[str, int]) -> Cuts:
        """Add the bytes on either side to cuts, for calls that wrote so many bytes of state."""

        def add(cut: Cut) -> Cut:
            end = self._ends.get(cut.at)
            if end is None:
                return cut
            head = sum(size for call, size in nbytes.items() if self._writers.get(call, end) < end)
            return replace(cut, head_state_bytes=head, tail_state_bytes=sum(nbytes.values()) - head)

        return replace(cuts, offered=tuple(map(add, cuts.offered)), refused=tuple(map(add, cuts.refused)))


class _StateProbe(OutputProbe):
    """Finds the values of the tensors in the state that a run returns."""

    def __init__(self, prompt: Prompt, recorder: TraceRecorder) -> None:
        super().__init__()
        self._prompt = prompt
        self._recorder = recorder
        self.values: list[int] = []

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        super().exit(call, args, kwargs, output)
        if not call.path and call.phase == "forward":
            tensors = reachable_tensors(self._prompt.states_in(output))
            found = (self._recorder.value_of(tensor) for tensor in tensors)
            self.values = list(dict.fromkeys(value for value in found if value is not None))

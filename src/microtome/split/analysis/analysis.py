"""Analyze one traced run of a model: what a split has to know of its calls, operators and state."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from xxhash import xxh3_64_hexdigest

from microtome.engine import Probe
from microtome.engine.pytree import as_state
from microtome.engine.selectors import check_model
from microtome.inputs import Inputs, device_of
from microtome.results.trace import Trace, TracedCall
from microtome.split.analysis.call_structure import CallRecorder, CallStructure, ranks
from microtome.split.analysis.dataflow import Dataflow, Scalars
from microtome.split.analysis.module_attributes import ModuleStates
from microtome.split.analysis.mutated_objects import MutatedObject, find_states, named_states
from microtome.split.analysis.randomness import CallOrderProbe, Draw, PythonDraw, PythonDrawProbe, find_varying_calls
from microtome.split.analysis.signature import describe
from microtome.split.analysis.structure_spec import StructureSpec, TensorSpec, flatten
from microtome.split.boundary.serialization import DTYPES
from microtome.split.cuts.state import State, StateProbe, analyze_state
from microtome.split.state.snapshot import digest_of
from microtome.trace.trace import record

if TYPE_CHECKING:
    from microtome.trace.recorder import TraceRecorder


@dataclass(kw_only=True)
class Analysis:
    """The trace of one run, with what a split has to know of its calls and operators.

    Attributes:
        mutated_objects: The objects that calls mutate.
        first_states: A digest of the state objects when the first call takes them.
        call_structures: One for each of `trace.calls`.
        input_spec: The structure of the model's arguments.
        input_ranks: The rank of each tensor among these; see `CallStructure`.
        arrays: The shapes and dtypes of the numpy arrays among these.
        fused_calls: The calls that torch runs as one fused operator when no gradient is needed.
        draws: The operators that draw random numbers, by index.
        scalars: The arguments of each operator other than tensors.
        fuses_dropout: Whether dropout may be one kernel on the model's device, and several operators in the trace.
        is_training: Whether any module is in training mode.
        generators: The generators that operators draw from, other than the default ones.
        opaque_output_values: The values inside opaque objects of the model's output, such as a KV cache.
        state: The state in module attributes that is carried from run to run.
        python_draws: The draws from the generators of Python and numpy.
        state_classes: The classes of state objects.
        created_states: The state that the model makes itself if it is not passed, by argument; new for a first step.
        varying_calls: The addresses of the calls whose children differ between runs, by the random numbers drawn.
    """

    mutated_objects: list[MutatedObject]
    first_states: str | None
    trace: Trace
    call_structures: list[CallStructure]
    input_spec: StructureSpec
    input_ranks: tuple[int, ...]
    arrays: tuple[TensorSpec, ...]
    fused_calls: frozenset[int]
    draws: dict[int, Draw]
    scalars: list[Scalars] = field(repr=False)
    fuses_dropout: bool
    is_training: bool
    generators: tuple[torch.Generator, ...]
    opaque_output_values: tuple[int, ...]
    state: State = field(repr=False)
    python_draws: list[PythonDraw] = field(repr=False)
    varying_calls: frozenset[str]
    state_classes: tuple[type, ...] = ()
    created_states: dict[str, Any] = field(default_factory=dict)
    _touched: dict[int, frozenset[int]] = field(default_factory=dict, repr=False)

    @cached_property
    def memory_of(self) -> list[int]:
        """The memory that each value lies in."""
        return [value.memory for value in self.trace.values]

    @cached_property
    def mutates_attributes(self) -> bool:
        """Whether any call sets attributes of its module."""
        return any(structure.mutated_attributes for structure in self.call_structures)

    @cached_property
    def has_side_effects(self) -> bool:
        """Whether any call has a side effect that cannot be replayed."""
        return any(structure.side_effect is not None for structure in self.call_structures)

    @cached_property
    def has_hook_mutations(self) -> bool:
        """Whether a forward hook sets attributes of a module that encloses its own."""
        return any(names for structure in self.call_structures for _, names in structure.hook_mutations)

    @cached_property
    def dataflow(self) -> Dataflow:
        """Digests of the computation of each call's arguments and outputs."""
        described = [structure.arguments for structure in self.call_structures]
        plain = [() if arguments is None else arguments.plain for arguments in described]
        return Dataflow(self.trace, plain, self.scalars, self.draws)

    @cached_property
    def exit_order(self) -> list[TracedCall]:
        """The calls in the order in which they return."""
        order: list[TracedCall] = []

        def visit(call: TracedCall) -> None:
            for child in call.children:
                visit(self.trace.calls[child])
            order.append(call)

        visit(self.trace.calls[0])
        return order

    @cached_property
    def canonical_order(self) -> list[TracedCall]:
        """The calls in an order that is the same in every process: children sorted by their signatures."""
        order: list[TracedCall] = []
        subtrees: dict[int, str] = {}  # a digest of the paths of all calls inside each call
        for call in self.exit_order:
            text = call.path + repr(sorted(subtrees[child] for child in call.children))
            subtrees[call.index] = xxh3_64_hexdigest(text.encode())

        def sort_key(call: TracedCall) -> tuple[str, ...]:
            arguments = self.call_structures[call.index].arguments
            described = repr(arguments and (arguments.structure, arguments.plain))
            flows = (self.dataflow.arguments(call.index) or (), self.dataflow.outputs(call.index))
            digests = (digest for flow in flows for digest in (*flow[1:], *flow[:1]))
            return call.path, described, subtrees[call.index], *digests

        def visit(call: TracedCall) -> None:
            order.append(call)
            for child in sorted((self.trace.calls[index] for index in call.children), key=sort_key):
                visit(child)

        visit(self.trace.calls[0])
        return order

    def describe_calls(self) -> Iterator[str]:
        """Describe each call for a fingerprint of the model, in canonical order."""
        drawing = {self.trace.ops[index].call for index in self.draws}  # such as those of dropout in training mode
        for call in self.canonical_order:
            parent = None if call.parent is None else self.trace.calls[call.parent].path
            output = describe((self.call_structures[call.index].output.template,), {}).structure
            yield f"{call.path}:{call.type}:{call.depth}:{parent}:{output}{':draws' * (call.index in drawing)}"

    @cached_property
    def allocated_by(self) -> dict[int, int]:
        """The operator that allocated each memory, for those that an operator allocated."""
        allocated: dict[int, int] = {}
        allocated_or_read: set[int] = set()
        for op in self.trace.ops:
            allocated_or_read |= self.memories(op.inputs)
            for memory in self.memories(op.outputs) - allocated_or_read:
                allocated[memory] = op.index
                allocated_or_read.add(memory)
        return allocated

    @cached_property
    def writers(self) -> dict[int, list[int]]:
        """The operators that write to each memory after its allocation."""
        writers: dict[int, list[int]] = {}
        for op in self.trace.ops:
            for memory in self.memories(op.mutates):
                if self.allocated_by.get(memory) != op.index:
                    writers.setdefault(memory, []).append(op.index)
        return writers

    @cached_property
    def state_writes(self) -> dict[int, list[int]]:
        """The operators that write to each memory of the model: parameters, buffers, tensors elsewhere.

        Tensors of state objects are not the model's; as constants they have a name, that of the argument.
        """
        values, writers = self.trace.values, dict[int, list[int]]()
        for op in self.trace.ops:
            for value in (values[index] for index in op.mutates):
                base = value if value.alias_of is None else values[value.alias_of]
                if base.origin in ("parameter", "buffer") or (base.origin == "constant" and base.name is None):
                    writers.setdefault(value.memory, []).append(op.index)
        return writers

    @property
    def written_parameters(self) -> set[str]:
        """The names of the parameters that a run writes to."""
        written = (value for value in self.trace.values if value.memory in self.state_writes)
        return {value.name for value in written if value.origin == "parameter" and value.name is not None}

    @property
    def is_stateful(self) -> bool:
        """Whether a run changes the model for the next one."""
        return bool(self.state.writes or self.state_writes)

    @cached_property
    def carried_state(self) -> str | None:
        """A description of the state that a run reads from earlier ones; None: there is none."""
        if location := self.state.carried():
            return f"{location[1]!r} of {location[0]!r}" if location[0] else f"{location[1]!r} of the model"
        for value in self.trace.values:
            if value.memory in self.state_writes:
                return f"the {value.origin} {value.name!r}" if value.name else "a tensor outside its buffers"
        return None

    def memories(self, values: Iterable[int]) -> set[int]:
        """The memories that these values lie in."""
        memory_of = self.memory_of
        return {memory_of[value] for value in values}

    def touched_memories(self, call: int) -> frozenset[int]:
        """The memories that a call takes, allocates, writes to or returns."""
        if call not in self._touched:
            traced = self.trace.calls[call]
            touched = self.memories((*traced.inputs, *traced.outputs))
            for op in self.trace.ops[traced.begins : traced.ends]:
                touched |= self.memories((*op.outputs, *op.mutates))
            self._touched[call] = frozenset(touched)
        return self._touched[call]

    def writes(self, memory: int, begin: int, end: int | None = None) -> bool:
        """Whether an operator in this range writes to the memory."""
        ops = self.writers.get(memory)
        if ops is None:
            return False
        found = bisect_left(ops, begin)
        return found < len(ops) and (end is None or ops[found] < end)


class _Attempt(NamedTuple):
    """The probes of one traced run: a model is traced on meta tensors, then on real ones if that fails."""

    calls: CallRecorder
    state: StateProbe
    python_draws: PythonDrawProbe
    call_order: CallOrderProbe


def analyze(model: nn.Module, inputs: Any, state: Sequence[str] = ()) -> Analysis:
    """Trace one run of the model, without values where possible; three runs if it sets attributes of its modules.

    If calls mutate an object that the model takes, or a cache of transformers that it makes and returns, that object is
    state: the model is traced again with it as an argument. A cache that the model changes before the first call is
    not, since a copy of it would not be a new one.

    Args:
        state: The names of arguments that are state, also if no call mutates them on the example.
    """
    example = Inputs.of(inputs, check_model(model))
    with as_state(()):  # found anew, whatever the caller knows of
        analysis = _analyze(model, example)
    classes, created = find_states(model, analysis.mutated_objects)
    named = named_states(model, example, [name for name in state if name not in created])
    classes = tuple(dict.fromkeys((*classes, *named)))
    if not classes:
        return analysis
    with as_state(classes):
        with_states = _analyze(model, example.with_arguments(example.args, {**example.kwargs, **created}))
        if created and with_states.first_states != digest_of(created.values(), values=False):
            return analysis
    with_states.state_classes, with_states.created_states = classes, created
    return with_states


def _analyze(model: nn.Module, example: Inputs, *, every_draw: bool = False) -> Analysis:
    attempts: list[tuple[_Attempt, TraceRecorder]] = []
    state = State()

    def make_probes(recorder: TraceRecorder) -> _Attempt:
        states = ModuleStates()
        probes = _Attempt(
            CallRecorder(recorder, states),
            StateProbe(states=states),
            PythonDrawProbe(model, every_call=every_draw),
            CallOrderProbe(),
        )
        attempts.append((probes, recorder))
        return probes

    def after_run(run_again: Callable[[Probe], None]) -> None:
        nonlocal state
        probes, recorder = attempts[-1]
        state = analyze_state(model, probes.state, run_again, recorder.value_of)

    trace, _ = record(model, example, make_probes=make_probes, after_run=after_run, values=True)
    probe, _, python_draws, call_order = attempts[-1][0]
    if python_draws.is_incomplete:
        return _analyze(model, example, every_draw=True)
    may_vary = bool(python_draws.draws or (probe.draws and call_order.reads_values))
    generators = tuple(probe.generators.values())
    arrays: list[Any] = []
    input_spec, tensors, _ = flatten((example.args, example.kwargs), arrays=arrays)
    return Analysis(
        mutated_objects=probe.mutations.found,
        first_states=probe.mutations.first_digest,
        trace=trace,
        call_structures=list(probe.call_structures.values()),
        input_spec=input_spec,
        input_ranks=ranks(tensors),
        arrays=tuple(TensorSpec(array.shape, DTYPES[array.dtype.name]) for array in arrays),
        fused_calls=frozenset(probe.fused_calls),
        draws=probe.draws,
        scalars=probe.scalars,
        fuses_dropout=trace.how.tensor_mode == "meta" and torch.device(device_of(model)).type not in ("cpu", "meta"),
        is_training=any(module.training for module in model.modules()),
        generators=generators,
        opaque_output_values=probe.opaque_output_values,
        state=state,
        python_draws=python_draws.draws,
        varying_calls=find_varying_calls(model, example, call_order, generators) if may_vary else frozenset(),
    )

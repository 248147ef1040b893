"""A run of the model, looked at for what a cut has to know."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from microtome.engine import Call, Probe
from microtome.engine.module_state import has_forward_hooks
from microtome.engine.probes import AnyOp, Where
from microtome.engine.pytree import tensors_in
from microtome.inputs import Inputs, device_of
from microtome.results.trace import Trace, TracedCall
from microtome.split.call_arguments import CallArguments, given, holders_in
from microtome.split.comparison import held_tensors
from microtome.split.dataflow import Dataflow, Scalars, scalars_of
from microtome.split.python_randomness import CallOrder, PythonDraw, PythonDraws, find_varying
from microtome.split.random_ops import Draw, is_random
from microtome.split.serialization import DTYPES
from microtome.split.signature import Arguments, describe
from microtome.split.state import TORCHS, State, StateProbe, changed_names, own, study_state
from microtome.split.structure_spec import StructureSpec, TensorSlot, TensorSpec, take_apart
from microtome.trace.trace import record

if TYPE_CHECKING:
    from microtome.trace.recorder import TraceRecorder


@dataclass(frozen=True, slots=True)
class CallStructure:
    """The structure of the arguments and the output of a call.

    Attributes:
        output: The structure of what it returned.
        same: Of each tensor that it returned, which tensor among its arguments it is; None: none of them.
        taken: Of each place of a tensor in its arguments, which of the different tensors is there.
        given: The same of what it returned.
        effect: What it did that tensors do not tell, in words; None: nothing that was seen.
        sets: The attributes of its module that it changed.
        hooked: What its module's forward hooks changed of modules around it: the path of each, and the attributes.
        changes: Which of the lists and dicts among its arguments hold something else when it ends.
        called: The arguments that it was called with.
    """

    output: StructureSpec
    same: tuple[int | None, ...]
    effect: str | None = None
    sets: tuple[str, ...] = ()
    changes: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    given: tuple[int, ...] = ()
    called: Arguments | None = None
    hooked: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass
class Analysis:
    """A trace, and what else is known of its calls, in the order of `trace.calls`.

    Attributes:
        inputs: The structure of the model's arguments.
        taken: Of each place of a tensor in these, which of the different tensors is there.
        fused: Which calls run as one operator with all that is in them, where no gradient is wanted.
        draws: The operators that draw random numbers, by their index.
        fuses_dropout: Whether dropout may be one kernel where the model computes, and several operators in the trace.
        is_training: Whether any of its modules is in training mode.
        generators: Those that operators draw from beside the default ones.
        arrays: The shapes and dtypes of the numpy arrays among the model's arguments.
        held: The values that objects among the model's outputs hold, such as a cache of keys.
        scalars: Of each operator, the arguments that are no tensors.
        state: What runs leave to the next one in attributes of modules.
        python_draws: Where code draws random numbers without an operator.
        varying: The addresses of the calls that make other calls in other runs, by the random numbers that they draw.
    """

    trace: Trace
    shapes: list[CallStructure]
    inputs: StructureSpec
    fused: frozenset[int]
    draws: dict[int, Draw]
    taken: tuple[int, ...] = ()
    fuses_dropout: bool = False
    is_training: bool = False
    generators: tuple[torch.Generator, ...] = ()
    held: tuple[int, ...] = ()
    scalars: list[Scalars] = field(default_factory=list, repr=False)
    state: State = field(default_factory=State, repr=False)
    python_draws: list[PythonDraw] = field(default_factory=list, repr=False)
    varying: frozenset[str] = frozenset()
    arrays: tuple[TensorSpec, ...] = ()
    _touched: dict[int, frozenset[int]] = field(default_factory=dict, repr=False)

    @cached_property
    def is_noisy(self) -> bool:
        """Whether any call changes attributes of its module."""
        return any(shape.sets for shape in self.shapes)

    @cached_property
    def dataflow(self) -> Dataflow:
        """Digests of the computation of each call's arguments and outputs."""
        given = [() if shape.called is None else shape.called.plain for shape in self.shapes]
        return Dataflow(self.trace, given, self.scalars, self.draws)

    @cached_property
    def canonical(self) -> list[TracedCall]:
        """The calls in an order that is the same in every process: those in one call sorted by their signatures."""
        order: list[TracedCall] = []
        inside: dict[int, str] = {}  # of each call, the paths of all calls in it
        for call in self.ending:
            inside[call.index] = call.path + repr(sorted(inside[child] for child in call.children))
            inside[call.index] = xxh3_64_hexdigest(inside[call.index].encode())

        def rank(call: TracedCall) -> tuple[str, ...]:
            called = self.shapes[call.index].called
            given = repr(called and (called.structure, called.plain))
            flows = (self.dataflow.of(call.index) or (), self.dataflow.outputs(call.index))
            return (
                call.path,
                given,
                inside[call.index],
                *(digest for flow in flows for digest in (*flow[1:], *flow[:1])),
            )

        def walk(call: TracedCall) -> None:
            order.append(call)
            for child in sorted((self.trace.calls[at] for at in call.children), key=rank):
                walk(child)

        walk(self.trace.calls[0])
        return order

    @cached_property
    def has_hooks(self) -> bool:
        """Whether a forward hook changes attributes of a module around its own."""
        return any(names for shape in self.shapes for _, names in shape.hooked)

    @cached_property
    def ending(self) -> list[TracedCall]:
        """The calls in the order they ended."""
        order: list[TracedCall] = []

        def walk(call: TracedCall) -> None:
            for child in call.children:
                walk(self.trace.calls[child])
            order.append(call)

        walk(self.trace.calls[0])
        return order

    @cached_property
    def made_by(self) -> dict[int, int]:
        """The operator that made each memory, for those that an operator made."""
        made: dict[int, int] = {}
        known: set[int] = set()
        values = self.trace.values
        for op in self.trace.ops:
            known.update(values[at].memory for at in op.inputs)
            for at in op.outputs:
                memory = values[at].memory
                if memory not in known:
                    made[memory] = op.index
                    known.add(memory)
        return made

    @cached_property
    def kept_writes(self) -> dict[int, list[int]]:
        """The operators that write into each memory that the model keeps: parameters, buffers, tensors elsewhere."""
        values, found = self.trace.values, dict[int, list[int]]()
        for op in self.trace.ops:
            for at in op.mutates:
                first = values[at].alias_of
                if values[at if first is None else first].origin in ("parameter", "buffer", "constant"):
                    found.setdefault(values[at].memory, []).append(op.index)
        return found

    @property
    def written_parameters(self) -> set[str]:
        """The names of the parameters that a run writes into."""
        held = (value for value in self.trace.values if value.memory in self.kept_writes)
        return {value.name for value in held if value.origin == "parameter" and value.name is not None}

    @property
    def keeps_state(self) -> bool:
        """Whether a run changes what the next one finds in the model."""
        return bool(self.state.writes or self.kept_writes)

    @cached_property
    def carried(self) -> str | None:
        """The state that runs read from earlier ones, in words; None: there is none."""
        if location := self.state.carried():
            return f"{location[1]!r} of {location[0]!r}" if location[0] else f"{location[1]!r} of the model"
        for value in self.trace.values:
            if value.memory in self.kept_writes:
                return f"the {value.origin} {value.name!r}" if value.name else "a tensor outside its buffers"
        return None

    @cached_property
    def writers(self) -> dict[int, list[int]]:
        """The operators that write into each memory after it was made."""
        found: dict[int, list[int]] = {}
        for op in self.trace.ops:
            for memory in {self.trace.values[at].memory for at in op.mutates}:
                if self.made_by.get(memory) != op.index:
                    found.setdefault(memory, []).append(op.index)
        return found

    def touched(self, call: int) -> frozenset[int]:
        """The memories that a call is given, makes, writes into or returns."""
        if call not in self._touched:
            traced, values = self.trace.calls[call], self.trace.values
            found = {values[at].memory for at in (*traced.inputs, *traced.outputs)}
            for op in self.trace.ops[traced.begins : traced.ends]:
                found.update(values[at].memory for at in (*op.outputs, *op.mutates))
            self._touched[call] = frozenset(found)
        return self._touched[call]

    def writes(self, memory: int, begins: int, ends: int) -> bool:
        """Whether an operator of these wrote into the memory."""
        return any(begins <= op < ends for op in self.writers.get(memory, ()))

    def writes_after(self, memory: int, begins: int) -> bool:
        """Whether an operator from this on wrote into the memory."""
        return self.writes(memory, begins, len(self.trace.ops))


class _Before(NamedTuple):
    """State at the beginning of a call, compared at its end: its arguments, and its module's attributes."""

    given: CallArguments
    own: dict[str, Any]
    arguments: Arguments
    outer: dict[Call, dict[str, Any]]


class _AnalysisProbe(Probe):
    """Writes down the structures of a run; it holds no tensor but those of calls that run."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder
        self.held: tuple[int, ...] = ()
        self.shapes: dict[Call, CallStructure] = {}
        self.fused: set[int] = set()
        self.draws: dict[int, Draw] = {}
        self.generators: dict[int, torch.Generator] = {}
        self._before: dict[Call, _Before] = {}
        self.scalars: list[Scalars] = []

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_fused(call.module, args, kwargs):
            self.fused.add(len(self.shapes))
        self.shapes[call] = _OPEN
        around = [] if call.module is None or not has_forward_hooks(call.module) else call.stack[:-1]
        outer = {other: own(other.module) for other in around}
        arguments = describe(args, kwargs, model=call.stack[0].module)
        self._before[call] = _Before(given(args, kwargs), own(call.module), arguments, outer)

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = self._before.pop(call)
        if isinstance(output, Tensor):
            template, tensors = _ONE, [output]
        else:
            template, tensors, _ = take_apart(output, (args, kwargs))
        effect, changes = None, tuple(before.given.refilled())
        changed = [before.given.holders[at] for at in changes]
        if changed and not _can_be_told(changed, call, output):
            other = [type(one).__name__ for one in changed if not isinstance(one, list | dict)]
            effect = f"it changes a {other[0] if other else 'list or a dict'} that it is given"
        for item in before.given.altered():
            effect = f"it changes a {type(item).__name__} that it is given"
        if effect is None and template.strange is not None:
            effect = f"it returns a {template.strange}, which is no tensor, number, text or structure of these"
        if effect is not None and "Cache" in effect:
            effect += ": call the model with use_cache=False"
        now = own(call.module)
        sets = changed_names(before.own, now)
        arguments = {id(tensor): at for at, tensor in enumerate(_different(before.given.tensors))}
        same = tuple(arguments.get(id(tensor)) for tensor in _different(tensors))
        if call.parent is None and template.strange is not None:
            found = map(self._recorder.value_of, held_tensors(output))
            self.held = tuple(dict.fromkeys(value for value in found if value is not None))
        taken, returned = ranks(before.given.tensors), ranks(tensors)
        hooked = tuple((outer.path, changed_names(had, own(outer.module))) for outer, had in before.outer.items())
        self.shapes[call] = CallStructure(
            template, same, effect, sets, changes, taken, returned, before.arguments, hooked
        )

    def fail(self, call: Call, error: BaseException) -> None:  # which the model may catch
        self._before.pop(call, None)
        self.shapes[call] = CallStructure(StructureSpec(None, 0, 0), (), f"it raises a {type(error).__name__}")

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.scalars.append(scalars_of(args, kwargs))
        if is_random(func, args, kwargs):
            self.draws[len(self.scalars) - 1] = Draw.of(where, func)
            if isinstance(generator := kwargs.get("generator"), torch.Generator):
                self.generators[id(generator)] = generator


def _different(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def ranks(tensors: list[Tensor]) -> tuple[int, ...]:
    """Number the distinct tensors by first appearance."""
    rank = {id(tensor): at for at, tensor in enumerate(_different(tensors))}
    return tuple(rank[id(tensor)] for tensor in tensors)


_NOTHING = object()
_ONE = StructureSpec(TensorSlot(0), 1, 0)
_OPEN = CallStructure(StructureSpec(None, 0, 0), ())


def _is_fused(module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if isinstance(module, nn.TransformerEncoder):  # whose layers then get tensors of another kind
        mask = args[2] if len(args) > 2 else kwargs.get("src_key_padding_mask")
        return not module.training and mask is not None
    return isinstance(module, nn.TransformerEncoderLayer) and not module.training


def _can_be_told(changed: list[Any], call: Call, output: Any) -> bool:
    """Whether the tail can change lists and dicts as a call did: plain ones, that nobody has but who called it."""
    kept = {id(one) for one in holders_in(output)}
    model = call.stack[0].module
    for module in () if model is None else model.modules():
        own = tuple(value for name, value in vars(module).items() if name not in TORCHS)
        kept |= {id(one) for one in holders_in(own)}
    return all(id(one) not in kept and _is_flat(one) for one in changed)


def _is_flat(holder: list[Any] | dict[Any, Any]) -> bool:
    if type(holder) is dict:
        items: Iterable[Any] = holder.values()
        named = all(isinstance(key, str) for key in holder)
    else:
        items, named = holder, type(holder) is list
    return named and all(isinstance(item, Tensor | bool | int | float | str | None) for item in items)


def study(model: nn.Module, inputs: Any) -> Analysis:
    """Run the model once, without values where it allows that; three times if it changes what its modules hold."""
    example = Inputs.of(inputs)
    watches: list[tuple[_AnalysisProbe, StateProbe, PythonDraws, CallOrder, TraceRecorder]] = []
    state = State()

    def make_probes(recorder: TraceRecorder) -> tuple[Probe, ...]:
        watches.append((_AnalysisProbe(recorder), StateProbe(), PythonDraws(model), CallOrder(), recorder))
        return watches[-1][:-1]

    def after_run(again: Callable[[Probe], None]) -> None:
        nonlocal state
        _, probe, _, _, recorder = watches[-1]
        state = study_state(model, probe, again, recorder.value_of)

    trace, _ = record(model, example, make_probes=make_probes, after_run=after_run, values=True)
    watch, _, drawn, tree, _ = watches[-1]
    is_chance = bool(drawn.found or (watch.draws and tree.reads))
    arrays: list[Any] = []
    template, tensors, _ = take_apart((example.args, example.kwargs), arrays=arrays)
    shapes = list(watch.shapes.values())
    return Analysis(
        trace,
        shapes,
        template,
        frozenset(watch.fused),
        watch.draws,
        ranks(tensors),
        trace.how.tensor_mode == "meta" and torch.device(device_of(model)).type not in ("cpu", "meta"),
        any(module.training for module in model.modules()),
        tuple(watch.generators.values()),
        watch.held,
        watch.scalars,
        state,
        drawn.found,
        _find_varying(model, example, tree, watch) if is_chance else frozenset(),
        tuple(TensorSpec(array.shape, DTYPES[array.dtype.name]) for array in arrays),
    )


def _find_varying(model: nn.Module, example: Inputs, tree: CallOrder, watch: _AnalysisProbe) -> frozenset[str]:
    def run() -> CallOrder:
        attempts: list[CallOrder] = []  # on meta tensors, then on real ones: the last is the run

        def observe(_: TraceRecorder) -> list[Probe]:
            attempts.append(CallOrder())
            return [attempts[-1]]

        record(model, example, make_probes=observe, values=True)
        return attempts[-1]

    tensors = (*model.parameters(), *model.buffers(), *tensors_in((example.args, example.kwargs)))
    return find_varying(tree, run, {tensor.device for tensor in tensors}, watch.generators.values())

"""Record the structures, side effects and random draws of the calls of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.engine import Call, Probe
from microtome.engine.module_state import has_forward_hooks
from microtome.engine.probes import AnyOp, Where
from microtome.engine.pytree import reachable_tensors
from microtome.engine.torch_internals import DisableTorchFunction
from microtome.split.analysis.call_arguments import CallArguments, containers_in, record_arguments
from microtome.split.analysis.dataflow import Scalars, describe_scalars
from microtome.split.analysis.module_attributes import TORCH_ATTRIBUTES, ModuleStates, changed_attributes
from microtome.split.analysis.mutated_objects import MutatedObjects
from microtome.split.analysis.randomness import Draw, is_random
from microtome.split.analysis.signature import Arguments, describe
from microtome.split.analysis.structure_spec import StructureSpec, flatten
from microtome.split.state.contents import changed_paths
from microtome.split.state.snapshot import Path, StateSnapshot

if TYPE_CHECKING:
    from microtome.trace.recorder import TraceRecorder


class CallStructure(NamedTuple):
    """The structure of the arguments and the output of a call, and its side effects.

    A rank numbers the distinct tensors of a structure by first appearance: `(x, y, x)` has the ranks 0, 1, 0.

    Attributes:
        output: The structure of its output.
        output_aliases: For each distinct tensor of the output, the rank of the argument that it is; None: a new one.
        side_effect: Why the call cannot be skipped and replayed; None: it can.
        mutated_attributes: The attributes of its module that it set.
        mutated_containers: The lists and dicts among its arguments that it changed, as indices.
        argument_ranks: The rank of each tensor among its arguments.
        output_ranks: The rank of each tensor of its output.
        arguments: Its arguments, as far as they can be compared between processes.
        hook_mutations: The attributes that its module's forward hooks set on enclosing modules, by path.
        state_paths: The parts that it changed of each state object among its arguments.
    """

    output: StructureSpec
    output_aliases: tuple[int | None, ...] = ()
    side_effect: str | None = None
    mutated_attributes: tuple[str, ...] = ()
    mutated_containers: tuple[int, ...] = ()
    argument_ranks: tuple[int, ...] = ()
    output_ranks: tuple[int, ...] = ()
    arguments: Arguments | None = None
    hook_mutations: tuple[tuple[str, tuple[str, ...]], ...] = ()
    state_paths: tuple[tuple[Path, ...], ...] = ()


_UNFINISHED = CallStructure(StructureSpec(None, 0, 0))


class _CallStart(NamedTuple):
    """The state recorded when a call begins, to be compared when it ends.

    Attributes:
        enclosing: The state of the modules that enclose one with forward hooks.
        parts: The parts of each state object among the arguments.
    """

    arguments: CallArguments
    description: Arguments
    state: dict[str, Any]
    enclosing: dict[Call, dict[str, Any]]
    parts: list[StateSnapshot]


class CallRecorder(Probe):
    """Records the structures and side effects of calls; holds no tensors but those of running calls."""

    def __init__(self, recorder: TraceRecorder, states: ModuleStates) -> None:
        self._recorder = recorder
        self._states = states
        self._running: dict[Call, _CallStart] = {}
        self.call_structures: dict[Call, CallStructure] = {}
        self.fused_calls: set[int] = set()
        self.draws: dict[int, Draw] = {}
        self.generators: dict[int, torch.Generator] = {}
        self.scalars: list[Scalars] = []
        self.opaque_output_values: tuple[int, ...] = ()
        self.mutations = MutatedObjects()

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with DisableTorchFunction():  # or each attribute of a tensor would go through our function mode
            self._enter(call, args, kwargs)

    def _enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_fused(call.module, args, kwargs):
            self.fused_calls.add(len(self.call_structures))
        self.call_structures[call] = _UNFINISHED  # in the order in which calls begin
        enclosing = call.stack[:-1] if call.module is not None and has_forward_hooks(call.module) else ()
        arguments = record_arguments(args, kwargs)
        self.mutations.enter(arguments, is_input=call.parent is None)
        self._running[call] = _CallStart(
            arguments,
            describe(args, kwargs, model=call.stack[0].module),
            self._states.of(call.module),
            {other: self._states.of(other.module) for other in enclosing} if enclosing else {},
            list(map(StateSnapshot.of, arguments.state_objects)) if arguments.state_objects else [],
        )

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        with DisableTorchFunction():
            self._exit(call, args, kwargs, output)

    def _exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        start = self._running.pop(call)
        containers = tuple(start.arguments.mutated_containers()) if start.arguments.containers else ()
        objects = list(start.arguments.mutated_objects()) if start.arguments.objects else []
        changed = [start.arguments.containers[index] for index in containers]
        self.mutations.exit([*changed, *objects])
        spec, tensors, _ = flatten(output, (args, kwargs))
        arguments = start.arguments.tensors
        rank_of = {id(tensor): rank for tensor, rank in zip(arguments, ranks(arguments), strict=True)}
        self.call_structures[call] = CallStructure(
            output=spec,
            output_aliases=tuple(map(rank_of.get, dict.fromkeys(map(id, tensors)))),
            side_effect=_find_side_effect(
                call, [start.arguments.containers[index] for index in containers], objects, output, spec
            ),
            mutated_attributes=changed_attributes(start.state, self._states.of(call.module)),
            mutated_containers=containers,
            argument_ranks=ranks(arguments),
            output_ranks=ranks(tensors),
            arguments=start.description,
            hook_mutations=tuple(
                (outer.path, changed_attributes(before, self._states.of(outer.module)))
                for outer, before in start.enclosing.items()
            )
            if start.enclosing
            else (),
            state_paths=tuple(
                changed_paths(before, StateSnapshot.of(state, before))
                for state, before in zip(start.arguments.state_objects, start.parts, strict=True)
            )
            if start.parts
            else (),
        )
        if call.parent is None:
            self.mutations.find_names(args, kwargs, output)
        if call.parent is None and spec.unsupported is not None:
            values = map(self._recorder.value_of, reachable_tensors(output))
            self.opaque_output_values = tuple(dict.fromkeys(value for value in values if value is not None))

    def fail(self, call: Call, error: BaseException) -> None:  # which the model may catch
        self._running.pop(call, None)
        failed = CallStructure(StructureSpec(None, 0, 0), side_effect=f"it raises a {type(error).__name__}")
        self.call_structures[call] = failed

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if is_random(func, args, kwargs):
            self.draws[len(self.scalars)] = Draw.of(where, func, args, kwargs)
            if isinstance(generator := kwargs.get("generator"), torch.Generator):
                self.generators[id(generator)] = generator
        self.scalars.append(describe_scalars(args, kwargs))


def ranks(tensors: list[Tensor]) -> tuple[int, ...]:
    """Number the distinct tensors by first appearance."""
    if len(tensors) == 1:  # by far the most frequent
        return (0,)
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(id(tensor), len(numbers)) for tensor in tensors)


def _is_fused(module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if isinstance(module, nn.TransformerEncoder):  # it passes nested tensors to its layers
        mask = args[2] if len(args) > 2 else kwargs.get("src_key_padding_mask")
        return not module.training and mask is not None
    return isinstance(module, nn.TransformerEncoderLayer) and not module.training


def _find_side_effect(
    call: Call, containers: list[Any], objects: list[Any], output: Any, spec: StructureSpec
) -> str | None:
    """Return the side effect of a call that a boundary cannot describe; None: there is none.

    Args:
        containers: The lists and dicts among its arguments that it changed.
        objects: The objects among these that it changed.
    """
    side_effect = None
    if containers and not _is_replayable(containers, call, output):
        other = [type(container).__name__ for container in containers if not isinstance(container, list | dict)]
        side_effect = f"it mutates a {other[0] if other else 'list or dict'} among its arguments"
    for item in objects:
        side_effect = f"it mutates a {type(item).__name__} among its arguments"
    if side_effect is None and spec.unsupported is not None:
        side_effect = f"it returns a {spec.unsupported}, which is no tensor, number, string or structure of these"
    if side_effect is not None and "Cache" in side_effect:
        side_effect += ": call the model with use_cache=False"
    return side_effect


def _is_replayable(containers: list[Any], call: Call, output: Any) -> bool:
    """Whether the tail can replay the mutation of containers: flat lists and dicts that only the caller refers to."""
    retained = {id(container) for container in containers_in(output)}
    model = call.stack[0].module
    for module in () if model is None else model.modules():
        attributes = tuple(value for name, value in vars(module).items() if name not in TORCH_ATTRIBUTES)
        retained |= {id(container) for container in containers_in(attributes)}
    return all(id(container) not in retained and _is_flat(container) for container in containers)


def _is_flat(container: Any) -> bool:
    if type(container) is dict and all(isinstance(key, str) for key in container):
        items = list(container.values())
    elif type(container) is list:
        items = container
    else:
        return False
    return all(isinstance(item, Tensor | bool | int | float | str | None) for item in items)

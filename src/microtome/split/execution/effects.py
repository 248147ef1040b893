"""Mutations and aliases of tensors: comparing those of a skipped call with the example run, and finding them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from microtome.engine.torch_internals import recorded_versions, storage_id
from microtome.split.analysis.call_arguments import CallArguments
from microtome.split.boundary.tensor_bytes import span_of
from microtome.split.execution.placeholder import Placeholder, unwrap
from microtome.split.execution.schedule import SkippedCall, differs_from_example


def check_effects(call: SkippedCall, arguments: CallArguments, outputs: list[Tensor]) -> None:
    """Raise if a skipped call's mutation or aliasing differs from the example run."""
    has_effects = call.mutated_containers or arguments.containers or arguments.objects or not call.has_new_outputs
    if not has_effects and recorded_versions(arguments.tensors) == arguments.versions:  # as nearly always
        return
    difference = _find_mutation(call, arguments)
    tensors = arguments.tensors
    for index, argument in call.argument_views.items():
        if _shares_memory(outputs[index], tensors[argument : argument + 1]) is False:
            difference = "returns no view of an argument"
    for index in call.sent_outputs:
        if call.aliased_arguments[index] is not None and not _is_example_alias(call, index, outputs[index], tensors):
            difference = "returns a different tensor than an argument"
    for index in call.unaliased_outputs:
        if _shares_memory(outputs[index], tensors):
            difference = "returns an argument, or a view of one"
    if difference is not None:
        raise differs_from_example(f"{call.address!r} {difference}, before the cut")


def _find_mutation(call: SkippedCall, arguments: CallArguments) -> str | None:
    """Describe a mutation of an argument that the example does not have."""
    difference = None
    if call.mutated_containers and call.mutated_containers[-1] >= len(arguments.containers):
        difference = "has fewer lists and dicts among its arguments"
    for index in arguments.mutated_containers() if arguments.containers else ():
        if index not in call.mutated_containers:
            difference = f"mutates a {type(arguments.containers[index]).__name__} among its arguments"
    for item in arguments.mutated_objects() if arguments.objects else ():
        difference = f"mutates a {type(item).__name__} among its arguments"
    for index in arguments.mutated_tensors():
        if index not in call.mutated_arguments:
            difference = "writes to a tensor among its arguments"
    return difference


def _is_example_alias(call: SkippedCall, index: int, output: Tensor, arguments: list[Tensor]) -> bool:
    """Whether an output is the argument that it was on the example."""
    argument = call.aliased_arguments[index]
    return argument is not None and argument < len(arguments) and unwrap(arguments[argument]) is unwrap(output)


def find_alias(call: SkippedCall, index: int, output: Tensor, arguments: list[Tensor]) -> int | None:
    """The argument that an output is, among those that were that tensor on the example; None: none of them."""
    alias = call.aliased_arguments[index]
    if alias is None:
        return None
    for position, (argument, rank) in enumerate(zip(arguments, call.argument_ranks, strict=False)):
        if rank == call.argument_ranks[alias] and unwrap(argument) is unwrap(output):
            return position
    return None


def _shares_memory(tensor: Tensor, others: list[Tensor]) -> bool | None:
    """Whether a tensor shares its storage with another; None: unknown, since a placeholder has no storage."""
    tensors = [unwrap(one) for one in (tensor, *others)]
    if any(isinstance(one, Placeholder) for one in tensors):
        return None
    return storage_id(tensors[0]) in map(storage_id, tensors[1:])


def first_occurrences(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor, the index of its first occurrence."""
    indices: dict[int, int] = {}
    return [indices.setdefault(id(unwrap(tensor)), index) for index, tensor in enumerate(tensors)]


def is_same_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same memory, shape, strides and dtype."""
    return (
        storage_id(one) == storage_id(other)
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def overlapping_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that may overlap another in memory: a write to one may change the other."""
    if len(tensors) < 2:
        return []
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        begin = int(tensor.storage_offset()) * tensor.itemsize
        end = begin + span_of(tensor.shape, tensor.stride()) * tensor.itemsize
        spans.setdefault(storage_id(tensor), []).append((begin, end, name))
    overlapping: set[str] = set()
    for ranges in spans.values():
        last_end, last_name = -1, ""
        for begin, end, name in sorted(ranges):
            if begin < last_end:
                overlapping |= {last_name, name}
            if end > last_end:
                last_end, last_name = end, name
    return [name for name in tensors if name in overlapping]

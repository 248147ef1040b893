"""Signatures of calls, by which another process recognizes them.

The order of calls may differ between two processes: iteration over a set of strings depends on PYTHONHASHSEED. So a
boundary has a signature of each call: the module it ran, its arguments, and digests of how these and its outputs were
computed. The tail looks up its own calls there. What cannot be compared between processes is marked `INCOMPARABLE`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from functools import cache
from operator import is_
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from microtome.engine.pytree import MAPPING, SEQUENCE, SET, is_state, node_type
from microtome.errors import Unsupported

if TYPE_CHECKING:
    from microtome.split.execution.schedule import EnclosingCall, SkippedCall

#: Digests of how the arguments or the outputs of a call were computed; see `Dataflow`.
Flow = tuple[str, ...]

#: Marks what cannot be compared between processes: two marked strings may be of the same thing, or not.
INCOMPARABLE = "\0"

#: Equal in two processes if sets of strings have the same order in both.
HASH_SEED = f"{hash('PYTHONHASHSEED') & 0xFFFFFFFFFFFFFFFF:x}"

_MAX_LENGTH = 64  # longer strings are sent as their digest
_MAX_DEPTH = 12  # a structure may contain itself
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|meta)(:\d+)?")


class Arguments(NamedTuple):
    """The arguments of a call, as far as they can be compared between processes.

    Attributes:
        structure: The containers, with sorted keys, and the leaves other than plain values and tensors.
        plain: Booleans, numbers, strings and None.
        tensors: The dtype and the shape of each tensor.
    """

    structure: str
    plain: list[Any]
    tensors: list[list[Any]]


def describe(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, in_order: bool = False, model: nn.Module | None = None
) -> Arguments:
    """Describe the arguments of a call.

    Args:
        in_order: Whether the order of dicts matters, since tensors among the arguments are identified by position.
        model: The model in which modules among the arguments are identified by their path.
    """
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):  # by far the most frequent
        return Arguments("(T,)", [], [describe_tensor(args[0])])
    description = _Description(Arguments("", [], []), in_order, model)
    structure = f"({''.join(description.add(value) + ',' for value in args)})"
    if kwargs:
        structure += description.add(kwargs)
    return description.arguments._replace(structure=structure)


def describe_tensor(tensor: Tensor) -> list[Any]:
    """The name of the dtype and the shape of a tensor."""
    return describe_shape(tensor.shape, tensor.dtype)


def describe_shape(shape: Sequence[int], dtype: torch.dtype) -> list[Any]:
    return [_dtype_name(dtype), *shape]


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Description(NamedTuple):
    """A description of arguments while it is made."""

    arguments: Arguments
    in_order: bool
    model: nn.Module | None

    def add(self, value: Any, depth: int = 0) -> str:
        """Collect the tensors and plain values of a value, and return its structure."""
        if isinstance(value, Tensor):
            self.arguments.tensors.append(describe_tensor(value))
            return "T"
        if isinstance(value, bool | int | float | str | None) and not isinstance(value, Enum):
            self.arguments.plain.append(plain := _to_json(value))
            return f"S{INCOMPARABLE}" if plain == "device" else "S"
        if depth > _MAX_DEPTH:
            return INCOMPARABLE
        items = self._items(value)
        if items is None:
            return _describe_leaf(value, self.model)
        inside = ",".join(f"{name}={self.add(item, depth + 1)}" for name, item in items)
        return f"{type(value).__name__}({inside})"

    def _items(self, value: Any) -> list[tuple[str, Any]] | None:
        """The items of a structure by name; None for a leaf."""
        if isinstance(value, slice):
            return [("", value.start), ("", value.stop), ("", value.step)]
        node = node_type(value)
        if node is SEQUENCE or isinstance(value, torch.Size):
            return [("", item) for item in value]
        if node is SET:
            is_sortable = all(isinstance(item, bool | int | float | str | bytes | None) for item in value)
            return [("" if is_sortable else INCOMPARABLE, item) for item in sorted(value, key=repr)]
        if node is MAPPING:
            keys = list(value) if self.in_order else sorted(value, key=str)
            return [(_describe_key(key), value[key]) for key in keys]
        return None if node is None else list(node.items(value))


def _describe_key(key: Any) -> str:
    return str(key) if isinstance(key, bool | int | float | str | None | Enum) else type(key).__name__ + INCOMPARABLE


def _describe_leaf(value: Any, model: nn.Module | None) -> str:
    """Describe a leaf in a string that is the same in every process."""
    kind = type(value).__name__
    if isinstance(value, Enum):
        return f"{kind}.{value.name}"
    if isinstance(value, complex | bytes | range | torch.dtype | torch.layout | torch.memory_format):
        return xxh3_64_hexdigest(value) if isinstance(value, bytes) else str(value)
    if isinstance(value, torch.device):  # each side may have its own
        return kind
    if isinstance(value, nn.Module):
        paths = [path for path, module in model.named_modules() if module is value] if model is not None else []
        return f"{kind} {paths[0]}" if paths else kind + INCOMPARABLE
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        owner = getattr(value, "__self__", None)  # the name of a bound method does not identify its object
        is_named = "<" not in value.__qualname__ and isinstance(owner, type | ModuleType | None)
        return f"{value.__module__}.{value.__qualname__}{'' if is_named else INCOMPARABLE}"
    if is_state(value):  # its contents are compared by their digest
        return kind
    if type(value).__module__ == "numpy" and not value.dtype.hasobject:
        return f"{kind} {value.dtype} {value.shape} {xxh3_64_hexdigest(value.tobytes())}"
    return kind + INCOMPARABLE


def _to_json(value: Any) -> Any:
    """Convert a plain value to a type that JSON has, independent of the device."""
    if isinstance(value, str):
        text = str.__str__(value)
        if _DEVICE.fullmatch(text):
            return "device"
        return text if len(text) <= _MAX_LENGTH else f"{text[:16]}… {xxh3_64_hexdigest(text.encode())}"
    if value is None or isinstance(value, bool):
        return value
    return int(value) if isinstance(value, int) else float(value)


# -- signatures --------------------------------------------------------------------------------------------------------


class CallSignature(NamedTuple):
    """A call as another process recognizes it.

    Attributes:
        key: A digest of the module, and of the structures of its arguments and outputs.
        plain: The plain arguments.
        tensors: The dtype and the shape of each tensor among the arguments.
        flow: How the arguments were computed; None: its module runs once in the enclosing call.
        output_flow: How the outputs were computed; empty for a call that encloses the cut.
    """

    key: str
    plain: list[bool | int | float | str | None]
    tensors: list[list[Any]]
    flow: Flow | None = None
    output_flow: Flow = ()


def digest_of_call(key: str, arguments: Arguments) -> str:
    """A digest of a call, as the key identifies it, and of the structure of its arguments."""
    return xxh3_64_hexdigest(f"{key}|{arguments.structure}".encode())


def find_call(
    signatures: Sequence[CallSignature],
    candidates: Sequence[int],
    used: set[int],
    call: SkippedCall,
    arguments: Arguments,
    *,
    is_ordered: bool = False,
) -> int:
    """Return the index of the one signature of a call.

    Args:
        candidates: The signatures with the key of the call.
        used: The signatures of calls that have run.
        is_ordered: Whether sets of strings have the same order in the head.

    Raises:
        Unsupported: There is none, or several that may be of different calls.
    """
    if call.flow is None and len(candidates) == 1 and candidates[0] not in used:  # as nearly always
        signature = signatures[candidates[0]]
        has_outputs = signature.output_flow == call.output_flow or _has_outputs(signature.output_flow, call.output_flow)
        if has_outputs and _has_arguments(signature, arguments):
            return candidates[0]
    matches = [index for index in candidates if _has_arguments(signatures[index], arguments)]
    if not matches:
        free = [signatures[index] for index in candidates if index not in used]
        mismatch = _describe_mismatch(free, arguments)
        raise _mismatch_error(f"{call.address!r} is called with {mismatch}", is_ordered)
    if call.flow is not None:
        matches = _match_flow(signatures, matches, call.flow)
    if not [index for index in matches if index not in used]:
        raise _mismatch_error(
            f"{call.address!r} runs several times, and no call of it in the head is given values that are computed in "
            "the same way",
            is_ordered,
        )
    same = [index for index in matches if _has_outputs(signatures[index].output_flow, call.output_flow)]
    free_indices = [index for index in (matches if is_ordered and not same else same) if index not in used]
    if not free_indices:
        raise _mismatch_error(
            f"what {call.address!r} returns is computed in another way or order than in the head", is_ordered
        )
    signature = signatures[free_indices[0]]
    is_certain = call.flow is None or _is_certain(signature, call.flow, arguments)
    if not is_certain and not is_ordered and not _is_certain_by_output(signature, call):
        raise _mismatch_error(
            f"{call.address!r} runs several times, and nothing says which of its calls in the head this is", is_ordered
        )
    return free_indices[0]


def check_same_call(
    signature: CallSignature | None, call: EnclosingCall, key: str, arguments: Arguments, *, is_ordered: bool = False
) -> None:
    """Raise if a call that encloses the cut is not the one that enclosed it in the head."""
    if signature is None or signature.key != key:
        raise _mismatch_error(
            f"{call.address!r} is called with other arguments than in the head, or is another call", is_ordered
        )
    if not _has_arguments(signature, arguments):
        mismatch = _describe_mismatch([signature], arguments)
        raise _mismatch_error(f"{call.address!r} is called with {mismatch}", is_ordered)
    if call.flow is None:
        return
    matches = _match_flow([signature], [0], call.flow)
    if not matches or not (is_ordered or _is_certain(signature, call.flow, arguments)):
        raise _mismatch_error(
            f"{call.address!r} runs several times, and nothing says that it is this call that contains the cut in the "
            "head",
            is_ordered,
        )


def _has_arguments(signature: CallSignature, arguments: Arguments) -> bool:
    if signature.tensors != arguments.tensors:
        return False
    sent, plain = signature.plain, arguments.plain
    return (len(sent) == len(plain) and all(map(is_, sent, plain))) or repr(sent) == repr(plain)


def _match_flow(signatures: Sequence[CallSignature], indices: list[int], flow: Flow) -> list[int]:
    """The signatures whose arguments were computed in the same way, by the most detailed digest that any matches."""
    sent = {index: signatures[index].flow or () for index in indices}
    if any(len(digests) != len(flow) for digests in sent.values()):
        return []
    for detail, digest in enumerate(flow):
        matches = [index for index, digests in sent.items() if digest and digests[detail] == digest]
        if matches:
            return matches
    return []


def _is_certain(signature: CallSignature, flow: Flow, arguments: Arguments) -> bool:
    """Whether all arguments are known to be equal, or distinguish the call from all others of its module."""
    full, *partial = zip(flow, signature.flow or (), strict=True)
    is_comparable = INCOMPARABLE not in flow[0] and INCOMPARABLE not in arguments.structure
    return (is_comparable and full[0] == full[1]) or any(digest and digest == sent for digest, sent in partial)


def _has_outputs(sent: Flow, expected: Flow) -> bool:
    if len(sent) != len(expected):
        return False
    full, example, unsized = expected
    return bool(sent[0] == full or (sent[1] != example and unsized and sent[2] == unsized))


def _is_certain_by_output(signature: CallSignature, call: SkippedCall) -> bool:
    """Whether all that a call returns or does is known to be equal, whatever its arguments are."""
    is_equal = signature.output_flow[0] == call.output_flow[0] and INCOMPARABLE not in call.output_flow[0]
    return is_equal and not call.output.num_plain and not call.uses_arguments


def _describe_mismatch(signatures: Sequence[CallSignature], arguments: Arguments) -> str:
    if not signatures:
        return "arguments that match no call in the head"
    expected = signatures[0]
    if expected.tensors != arguments.tensors:
        return f"tensors of {arguments.tensors} on this side, expected {expected.tensors} as in the head"
    return f"{arguments.plain} on this side, expected {expected.plain} as in the head"


def _mismatch_error(problem: str, is_ordered: bool) -> Unsupported:
    if is_ordered:
        return Unsupported(f"{problem}: split both sides on examples of one shape")
    return Unsupported(
        f"{problem}: the two sides may run their calls in a different order, as iteration over a set does. Set "
        "PYTHONHASHSEED to the same value in both processes, and split both sides on examples of one shape"
    )

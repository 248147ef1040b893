"""Signatures of calls, by which another process recognizes them.

The order of calls may differ between two processes: iteration over a set of strings depends on PYTHONHASHSEED. So a
boundary says of each call which module it ran, with which arguments, and how these and its outputs were computed, and
the tail looks for its own calls there. What cannot be compared between processes is marked as unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from microtome.engine.pytree import attributes_of, fields_of, is_record
from microtome.errors import Unsupported

#: The digests of how tensors that a call takes or returns were computed; see `Dataflow`.
Flow = tuple[str, ...]

#: Marks what cannot be compared between processes: two that are marked may be equal, or not.
UNKNOWN = "\0"

#: The same in two processes if sets of strings have the same order in both: it depends on PYTHONHASHSEED.
HASH_SEED = f"{hash('PYTHONHASHSEED') & 0xFFFFFFFFFFFFFFFF:x}"

_LONGEST = 64  # strings beyond it are sent as their digest
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|meta)(:\d+)?")


class Arguments(NamedTuple):
    """The arguments of a call, as far as they can be compared between processes.

    Attributes:
        structure: The containers, with sorted keys, and what they hold beside plain values and tensors.
        plain: Booleans, numbers, strings and None.
        tensors: The dtype and the shape of each tensor.
    """

    structure: str
    plain: list[Any]
    tensors: list[list[Any]]


_ONE = "(T,)"


def describe(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, in_order: bool = False, model: nn.Module | None = None
) -> Arguments:
    """The arguments of a call.

    Args:
        in_order: Whether the order of dicts matters, since tensors among the arguments are known by their position.
        model: In which modules among the arguments are known by their path.
    """
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):  # by far the most frequent
        return Arguments(_ONE, [], [_tensor(args[0])])
    description = _Description(Arguments("", [], []), in_order, model)
    structure = f"({''.join(description.structure_of(value) + ',' for value in args)})"
    if kwargs:
        structure += description.structure_of(kwargs)
    return description.arguments._replace(structure=structure)


def _tensor(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


class _Description(NamedTuple):
    """The arguments seen so far."""

    arguments: Arguments
    in_order: bool
    model: nn.Module | None

    def structure_of(self, value: Any, depth: int = 0) -> str:
        if isinstance(value, Tensor):
            self.arguments.tensors.append(_tensor(value))
            return "T"
        if isinstance(value, bool | int | float | str | None) and not isinstance(value, Enum):
            self.arguments.plain.append(plain := _plain(value))
            return f"S{UNKNOWN}" if plain == "device" else "S"
        if depth > 12:  # it may hold itself
            return UNKNOWN
        items = self._items(value)
        if items is None:
            return _text_of(value, self.model)
        inside = ",".join(f"{name}={self.structure_of(item, depth + 1)}" for name, item in items)
        return f"{type(value).__name__}({inside})"

    def _items(self, value: Any) -> list[tuple[str, Any]] | None:
        """Return the items of a structure by name; None: it is no structure."""
        if isinstance(value, set | frozenset):
            known = all(isinstance(item, bool | int | float | str | bytes | None) for item in value)
            return [("" if known else UNKNOWN, item) for item in sorted(value, key=repr)]
        if isinstance(value, Mapping):
            keys = list(value) if self.in_order else sorted(value, key=str)
            return [(_key_of(key), value[key]) for key in keys]
        if isinstance(value, list | tuple):
            return [("", item) for item in value]
        if isinstance(value, slice):
            return [("", value.start), ("", value.stop), ("", value.step)]
        if is_dataclass(value) and not isinstance(value, type):
            return list(fields_of(value).items())
        return list(attributes_of(value).items()) if is_record(value) else None


def _key_of(key: Any) -> str:
    return str(key) if isinstance(key, bool | int | float | str | None | Enum) else type(key).__name__ + UNKNOWN


def _text_of(value: Any, model: nn.Module | None) -> str:
    """Describe a value that is no structure, the same in any process."""
    kind = type(value).__name__
    if isinstance(value, Enum):
        return f"{kind}.{value.name}"
    if isinstance(value, complex | bytes | range | torch.dtype | torch.layout | torch.memory_format):
        return xxh3_64_hexdigest(value) if isinstance(value, bytes) else str(value)
    if isinstance(value, torch.device):  # each side may have its own
        return kind
    if isinstance(value, nn.Module):
        paths = [path for path, module in model.named_modules() if module is value] if model is not None else []
        return f"{kind} {paths[0]}" if paths else kind + UNKNOWN
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        owner = getattr(value, "__self__", None)  # a method of an object is known by more than its name
        named = "<" not in value.__qualname__ and isinstance(owner, type | ModuleType | None)
        return f"{value.__module__}.{value.__qualname__}{'' if named else UNKNOWN}"
    if type(value).__module__ == "numpy" and not value.dtype.hasobject:
        return f"{kind} {value.dtype} {value.shape} {xxh3_64_hexdigest(value.tobytes())}"
    return kind + UNKNOWN


def _plain(value: Any) -> Any:
    """A plain value in a type that JSON has, without what depends on the device."""
    if isinstance(value, str):
        text = str.__str__(value)
        if _DEVICE.fullmatch(text):
            return "device"
        return text if len(text) <= _LONGEST else f"{text[:16]}… {xxh3_64_hexdigest(text.encode())}"
    if value is None or isinstance(value, bool):
        return value
    return int(value) if isinstance(value, int) else float(value)


def sign(key: str, given: Arguments, flow: Flow | None, returns: Flow = ()) -> dict[str, Any]:
    """The signature of a call, for a boundary.

    Args:
        key: Of the module and what it returns.
        flow: How its arguments were computed.
        returns: How its outputs were computed.
    """
    signature: dict[str, Any] = {"k": _hashed(key, given), "w": given.plain, "g": given.tensors}
    if flow is not None:
        signature["d"] = list(flow)
    return {**signature, "o": list(returns)} if returns else signature


def _hashed(key: str, given: Arguments) -> str:
    return xxh3_64_hexdigest(f"{key}|{given.structure}".encode())


def find_call(
    signatures: list[dict[str, Any]], used: set[int], call: Any, given: Arguments, *, is_ordered: bool = False
) -> int:
    """The index of the one signature that is this call's.

    Args:
        is_ordered: Whether sets of strings have the same order in the head.

    Raises:
        Unsupported: There is none, or several that may be of different calls.
    """
    candidates = [at for at, one in enumerate(signatures) if one.get("k") == _hashed(call.key, given)]
    matches = [at for at in candidates if _is_alike(signatures[at], given)]
    if not matches:
        mismatch = describe_mismatch([signatures[at] for at in candidates if at not in used], given)
        raise _refusal(f"{call.address!r} is called with {mismatch}", is_ordered)
    if call.flow is not None:
        matches = _filter(signatures, matches, call.flow)
    if not [at for at in matches if at not in used]:
        raise _refusal(
            f"{call.address!r} runs several times, and no call of it in the head is given values that are computed in "
            "the same way",
            is_ordered,
        )
    same = [at for at in matches if _is_same_output(signatures[at].get("o"), call.returns)]
    free = [at for at in (matches if is_ordered and not same else same) if at not in used]
    if not free:
        raise _refusal(
            f"what {call.address!r} returns is computed in another way or order than in the head", is_ordered
        )
    is_certain = call.flow is None or _is_certain(signatures[free[0]], call.flow, given)
    if not is_certain and not is_ordered and not _is_by_output(signatures[free[0]], call):
        raise _refusal(
            f"{call.address!r} runs several times, and nothing says which of its calls in the head this is", is_ordered
        )
    return free[0]


def check_same_call(signature: Any, call: Any, given: Arguments, *, is_ordered: bool = False) -> None:
    """Raise if a call around the cut is not the one that was around it in the head."""
    if not isinstance(signature, dict) or signature.get("k") != _hashed(call.key, given):
        raise _refusal(
            f"{call.address!r} is called with other arguments than in the head, or is another call", is_ordered
        )
    if not _is_alike(signature, given):
        raise _refusal(f"{call.address!r} is called with {describe_mismatch([signature], given)}", is_ordered)
    if call.flow is None:
        return
    matches = _filter([signature], [0], call.flow)
    if not matches or not (is_ordered or _is_certain(signature, call.flow, given)):
        raise _refusal(
            f"{call.address!r} runs several times, and nothing says that it is this call that contains the cut in the "
            "head",
            is_ordered,
        )


def _is_alike(signature: dict[str, Any], given: Arguments) -> bool:
    return signature.get("g") == given.tensors and repr(signature.get("w")) == repr(given.plain)


def _filter(signatures: list[dict[str, Any]], matches: list[int], flow: Flow) -> list[int]:
    """Those whose arguments were computed in the same way, by the first digest that any of them has."""
    sent = {at: signatures[at].get("d") for at in matches}
    if any(not isinstance(one, list) or len(one) != len(flow) for one in sent.values()):
        return []
    for which, digest in enumerate(flow):
        found = [at for at in matches if digest and signatures[at]["d"][which] == digest]
        if found:
            return found
    return []


def _is_certain(signature: dict[str, Any], flow: Flow, given: Arguments) -> bool:
    """Whether all arguments are known to be equal, or tell the call apart from all others of its module."""
    pairs = list(zip(flow, signature["d"], strict=True))
    is_known = flow[0] == signature["d"][0] and UNKNOWN not in flow[0] and UNKNOWN not in given.structure
    return is_known or any(digest and digest == sent for digest, sent in pairs[1:])


def _is_same_output(sent: Any, returns: Flow) -> bool:
    if not isinstance(sent, list) or len(sent) != len(returns):
        return False
    full, example, partial = returns
    return bool(sent[0] == full or (sent[1] != example and partial and sent[2] == partial))


def _is_by_output(signature: dict[str, Any], call: Any) -> bool:
    """Whether all that a call returns or does is known to be equal, whatever its arguments are."""
    is_known = signature["o"][0] == call.returns[0] and UNKNOWN not in call.returns[0]
    return is_known and not call.output.num_plain and not call.uses_arguments


def describe_mismatch(others: list[dict[str, Any]], given: Arguments) -> str:
    for other in others:
        if other.get("g") != given.tensors:
            return f"tensors of {given.tensors} on this side, expected {other.get('g')} as in the head"
        return f"{given.plain} on this side, expected {other.get('w')} as in the head"
    return "arguments that match no call in the head"


def _refusal(what: str, is_ordered: bool) -> Unsupported:
    if is_ordered:
        return Unsupported(f"{what}: split both sides on examples of one shape")
    return Unsupported(
        f"{what}: the two sides may run their calls in a different order, as iteration over a set does. Set "
        "PYTHONHASHSEED to the same value in both processes, and split both sides on examples of one shape"
    )

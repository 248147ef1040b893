"""Signatures of calls, by which another process recognizes them.

The order of calls may differ between two processes: iteration over a set of strings depends on PYTHONHASHSEED. So a
boundary says of each call which module it ran and with which arguments, and the tail looks for its own calls there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from microtome.errors import Unsupported

#: The digests of where the tensors among the arguments of a call come from; see `Dataflow`.
Flow = tuple[str, str]

_LONGEST = 64  # strings beyond it are sent as their digest
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|meta)(:\d+)?")


class Arguments(NamedTuple):
    """The arguments of a call, as far as they can be compared between processes.

    Attributes:
        structure: The containers, with sorted keys, and the types of what they hold.
        plain: Booleans, numbers, strings and None.
        tensors: The dtype and the shape of each tensor.
    """

    structure: str
    plain: list[Any]
    tensors: list[list[Any]]


_ONE = "(T,)"


def describe(args: tuple[Any, ...], kwargs: dict[str, Any], *, in_order: bool = False) -> Arguments:
    """The arguments of a call.

    Args:
        in_order: Whether the order of dicts matters, since tensors among the arguments are known by their position.
    """
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):  # by far the most frequent
        return Arguments(_ONE, [], [_tensor(args[0])])
    described = Arguments("", [], [])
    structure = f"({''.join(_letters(value, described, in_order, 0) + ',' for value in args)})"
    if kwargs:
        structure += _letters(kwargs, described, in_order, 0)
    return described._replace(structure=structure)


def _tensor(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


def _letters(value: Any, described: Arguments, in_order: bool, depth: int) -> str:
    if isinstance(value, Tensor):
        described.tensors.append(_tensor(value))
        return "T"
    if isinstance(value, bool | int | float | str | None) and not isinstance(value, Enum):
        described.plain.append(_plain(value))
        return "S"
    if depth > 12:  # it may hold itself
        return "…"
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str) if not any(isinstance(item, Tensor) for item in value) else list(value)
    if isinstance(value, Mapping):
        keys = list(value) if in_order else sorted(value, key=str)
        items = [(str(key), value[key]) for key in keys]
    elif isinstance(value, list | tuple):
        items = [("", item) for item in value]
    elif is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    else:
        return str(value) if isinstance(value, torch.dtype | Enum) else type(value).__name__
    inside = ",".join(f"{name}={_letters(item, described, in_order, depth + 1)}" for name, item in items)
    return f"{type(value).__name__}({inside})"


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


def sign(key: str, given: Arguments, flow: Flow | None) -> dict[str, Any]:
    """The signature of a call, for a boundary.

    Args:
        key: Of the module and what it returns.
    """
    signature: dict[str, Any] = {"k": _hashed(key, given), "w": given.plain, "g": given.tensors}
    return signature if flow is None else {**signature, "d": list(flow)}


def _hashed(key: str, given: Arguments) -> str:
    return xxh3_64_hexdigest(f"{key}|{given.structure}".encode())


def find_call(signatures: list[dict[str, Any]], taken: set[int], call: Any, given: Arguments) -> int:
    """The index of the one signature that is this call's.

    Raises:
        Unsupported: There is none, or several of which nothing says which one it is.
    """
    kin = [at for at, one in enumerate(signatures) if one.get("k") == _hashed(call.key, given)]
    same = [at for at in kin if _is_alike(signatures[at], given)]
    if not same:
        told = _told([signatures[at] for at in kin if at not in taken], given)
        raise _refusal(f"{call.address!r} is called with {told}")
    if call.flow is not None:
        same = [at for at in same if _is_same_flow(signatures[at].get("d"), call.flow)]
    free = [at for at in same if at not in taken]
    if not free:
        raise _refusal(
            f"{call.address!r} runs several times, and no call of it in the head is given values that are computed in "
            "the same way"
        )
    return free[0]


def check_same_call(signature: Any, call: Any, given: Arguments) -> None:
    """Raise if a call around the cut is not the one that was around it in the head."""
    if not isinstance(signature, dict) or signature.get("k") != _hashed(call.key, given):
        raise _refusal(f"{call.address!r} is called with other arguments than in the head, or is another call")
    if not _is_alike(signature, given):
        raise _refusal(f"{call.address!r} is called with {_told([signature], given)}")
    if call.flow is not None and not _is_same_flow(signature.get("d"), call.flow):
        raise _refusal(
            f"{call.address!r} runs several times, and nothing says that it is this call that contains the cut in the "
            "head"
        )


def _is_alike(signature: dict[str, Any], given: Arguments) -> bool:
    return signature.get("g") == given.tensors and repr(signature.get("w")) == repr(given.plain)


def _is_same_flow(sent: Any, flow: Flow) -> bool:
    if not isinstance(sent, list) or len(sent) != 2:
        return False
    return bool(sent[0] == flow[0] or (sent[1] and sent[1] == flow[1]))


def _told(others: list[dict[str, Any]], given: Arguments) -> str:
    for other in others:
        if other.get("g") != given.tensors:
            return f"tensors of {given.tensors} on this side, expected {other.get('g')} as in the head"
        return f"{given.plain} on this side, expected {other.get('w')} as in the head"
    return "arguments that no call of it has in the head"


def _refusal(what: str) -> Unsupported:
    return Unsupported(
        f"{what}: the two sides run their calls in a different order, as iteration over a set does. Set PYTHONHASHSEED "
        "to the same value in both processes, and split both on the same example"
    )

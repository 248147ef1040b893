"""What modules take and return, taken apart into tensors, plain values and the structure around them."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from microtome.engine.structure import attributes_of, is_record, map_tensors
from microtome.errors import BadInputs

#: What travels beside tensors.
Plain = bool | int | float | str | None
_PLAIN = (bool, int, float, str, type(None))
#: What is the same on both sides, whatever the run.
_FIXED = (torch.dtype, torch.layout, torch.memory_format, enum.Enum, type, FunctionType, BuiltinFunctionType, MethodType, nn.Module)  # fmt: skip  # noqa: E501


class Slot(int):
    """Stands for a tensor in a template: the n-th of those in the value."""

    def __repr__(self) -> str:
        return f"T{int(self)}"


class PlainSlot(Slot):
    """Stands for a number, a text or None."""

    def __repr__(self) -> str:
        return f"S{int(self)}"


class SizeSlot(Slot):
    """Stands for a `torch.Size`: so many numbers, from the n-th plain value on."""

    count: int

    def __new__(cls, at: int, count: int) -> Self:
        made = super().__new__(cls, at)
        made.count = count
        return made

    def __repr__(self) -> str:
        return f"Z{int(self)}:{self.count}"


class Same(Slot):
    """Stands for an object that is also among the arguments: the n-th of those that are neither tensor nor plain."""

    def __repr__(self) -> str:
        return f"A{int(self)}"


@dataclass(frozen=True, eq=False)
class Template:
    """The structure of a value.

    Attributes:
        value: The value, with slots in place of what changes from run to run.
        tensors: How many tensors it has.
        plain: How many plain values.
        strange: The type of what is neither tensor, plain value nor a structure of these; None if there is none.
    """

    value: Any
    tensors: int
    plain: int
    strange: str | None = None

    @cached_property
    def text(self) -> str:
        """The structure in letters: the same for two values that differ in tensors and plain values alone."""
        return "".join(_letters(self.value))

    def fill(self, tensors: list[Any], plain: list[Any], arguments: Any = ()) -> Any:
        """The value with these in the slots."""
        if type(self.value) is Slot:
            return tensors[self.value]
        strange = list(_strange_in(arguments))

        def put(leaf: Any) -> Any:
            if type(leaf) is Slot:
                return tensors[leaf]
            if type(leaf) is PlainSlot:
                return plain[leaf]
            if type(leaf) is SizeSlot:
                return torch.Size(plain[leaf : leaf + leaf.count])
            return strange[leaf] if type(leaf) is Same else leaf

        return map_tensors(_no_tensor, self.value, put)


_TENSOR = Template(Slot(0), tensors=1, plain=0)


class Templates(NamedTuple):
    """The structure of what a model takes, positional and by name, and of what it returns."""

    inputs: Template
    output: Template


def take_apart(value: Any, arguments: Any = ()) -> tuple[Template, list[Tensor], list[Plain]]:
    """The template of a value, its tensors, each as often as it is there, and its plain values, in order.

    Args:
        arguments: What the module was given: an object of these that it returns is known again.
    """
    if isinstance(value, Tensor):  # by far the most frequent
        return _TENSOR, [value], []
    tensors: list[Tensor] = []
    plain: list[Plain] = []
    strange: list[str] = []

    def other(leaf: Any) -> Any:
        if type(leaf) in _PLAIN:  # others would not arrive as what they are
            plain.append(leaf)
            return PlainSlot(len(plain) - 1)
        if isinstance(leaf, torch.Size):
            plain.extend(leaf)
            return SizeSlot(len(plain) - len(leaf), len(leaf))
        if isinstance(leaf, _FIXED):
            return leaf
        for index, argument in enumerate(_strange_in(arguments)):
            if argument is leaf:
                return Same(index)
        strange.append(type(leaf).__name__)
        return None

    def slot(tensor: Tensor) -> Slot:
        tensors.append(tensor)
        return Slot(len(tensors) - 1)

    made = map_tensors(slot, value, other)
    return Template(made, len(tensors), len(plain), strange[0] if strange else None), tensors, plain


def strange_in(value: Any) -> list[Any]:
    """The objects in a value that are neither tensors, nor plain, nor structures of these."""
    return list(_strange_in(value))


def _strange_in(value: Any) -> Iterator[Any]:
    if type(value) in _PLAIN or isinstance(value, Tensor):
        return
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _strange_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strange_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _strange_in(getattr(value, field.name, None))
    elif is_record(value):
        for item in attributes_of(value).values():
            yield from _strange_in(item)
    elif not isinstance(value, _FIXED):
        yield value


def _no_tensor(tensor: Tensor) -> Tensor:
    raise AssertionError(f"a template holds a tensor of {tuple(tensor.shape)}")


def _letters(value: Any) -> Iterator[str]:
    if isinstance(value, Slot):
        yield repr(value)
    elif isinstance(value, list | tuple | set | frozenset):
        yield f"{type(value).__name__}("
        for item in value:
            yield from _letters(item)
            yield ","
        yield ")"
    elif isinstance(value, Mapping):
        yield f"{type(value).__name__}("
        for key, item in value.items():
            yield f"{key}="
            yield from _letters(item)
            yield ","
        yield ")"
    elif is_dataclass(value) and not isinstance(value, type):
        yield f"{type(value).__name__}("
        for field in fields(value):
            yield f"{field.name}="
            yield from _letters(getattr(value, field.name, None))
            yield ","
        yield ")"
    elif is_record(value):
        yield f"{type(value).__module__}.{type(value).__qualname__}("
        for name, item in attributes_of(value).items():
            yield f"{name}="
            yield from _letters(item)
            yield ","
        yield ")"
    else:
        yield str(value) if isinstance(value, torch.dtype | enum.Enum) else type(value).__name__


def check_same(what: str, expected: Template, got: Template) -> None:
    """Raise where two values have not the same structure."""
    if expected.text != got.text:
        told = [_told(template.text) for template in (got, expected)]
        raise BadInputs(
            f"{what} is {told[0]} in this run and was {told[1]} in the example: split the model on an example of the "
            "same structure"
        )


def _told(text: str) -> str:
    for letters, word in ((r"T\d+", "tensor"), (r"S\d+", "value"), (r"Z\d+:\d+", "size"), (r",?\)", ")")):
        text = re.sub(letters, word, text)
    return text

"""Structures of arguments and outputs: flatten them into tensors and plain values, and rebuild them."""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from microtome.engine.pytree import (
    attributes_of,
    children_of,
    dict_of,
    fields_of,
    find_unsupported,
    is_record,
    map_tensors,
)
from microtome.errors import BadInputs
from microtome.split.arrays import is_array, overlap

#: What travels beside tensors.
Plain = bool | int | float | str | None
_PLAIN = (bool, int, float, str, type(None))


class TensorSlot(int):
    """Stands for a tensor in a template: the n-th of those in the value."""

    def __repr__(self) -> str:
        return f"T{int(self)}"


class PlainSlot(TensorSlot):
    """Stands for a number, a text or None."""

    def __repr__(self) -> str:
        return f"S{int(self)}"


class SizeSlot(TensorSlot):
    """Stands for a `torch.Size`: so many numbers, from the n-th plain value on."""

    count: int

    def __new__(cls, at: int, count: int) -> Self:
        made = super().__new__(cls, at)
        made.count = count
        return made

    def __repr__(self) -> str:
        return f"Z{int(self)}:{self.count}"


class ArraySlot(TensorSlot):
    """Stands for a numpy array."""

    def __repr__(self) -> str:
        return f"N{int(self)}"


class AliasSlot(TensorSlot):
    """Stands for an object that is also among the arguments: the n-th of those that are neither tensor nor plain."""

    def __repr__(self) -> str:
        return f"A{int(self)}"


@dataclass(frozen=True, eq=False)
class StructureSpec:
    """The structure of a value.

    Attributes:
        value: The value, with slots in place of what changes from run to run.
        tensors: How many tensors it has.
        plain: How many plain values.
        strange: The type of what is neither tensor, plain value nor a structure of these; None if there is none.
        arrays: How many numpy arrays, if they are told apart from what is strange.
    """

    value: Any
    tensors: int
    plain: int
    strange: str | None = None
    arrays: int = 0

    @cached_property
    def text(self) -> str:
        """The structure in letters: the same for two values that differ in tensors and plain values alone."""
        return "".join(_letters(self.value))

    def fill(self, tensors: list[Any], plain: list[Any], arguments: Any = (), arrays: Sequence[Any] = ()) -> Any:
        """The value with these in the slots."""
        if type(self.value) is TensorSlot:
            return tensors[self.value]
        strange = list(_strange_in(arguments))

        def put(leaf: Any) -> Any:
            if type(leaf) is TensorSlot:
                return tensors[leaf]
            if type(leaf) is PlainSlot:
                return plain[leaf]
            if type(leaf) is ArraySlot:
                return arrays[leaf]
            if type(leaf) is SizeSlot:
                return torch.Size(plain[leaf : leaf + leaf.count])
            return strange[leaf] if type(leaf) is AliasSlot else leaf

        return map_tensors(_no_tensor, self.value, put)


_TENSOR = StructureSpec(TensorSlot(0), tensors=1, plain=0)


class TensorSpec(NamedTuple):
    """The shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(tuple(tensor.shape), tensor.dtype)


class Example(NamedTuple):
    """The example that a model was split on.

    Attributes:
        inputs: The tensors among the model's arguments, each as often as it is there.
        plain: The plain values among them.
        outputs: The tensors in what the model returned.
        is_static: Whether neither operators nor code read values of tensors, so that shapes follow from shapes alone.
    """

    inputs: tuple[TensorSpec, ...]
    plain: list[Plain]
    outputs: tuple[TensorSpec, ...]
    is_static: bool


class ModelSpec(NamedTuple):
    """The structure of what a model takes, positional and by name, and of what it returns; and of what example."""

    inputs: StructureSpec
    output: StructureSpec
    example: Example


def take_apart(
    value: Any, arguments: Any = (), arrays: list[Any] | None = None
) -> tuple[StructureSpec, list[Tensor], list[Plain]]:
    """The template of a value, its tensors, each as often as it is there, and its plain values, in order.

    Args:
        arguments: What the module was given: an object of these that it returns is known again.
        arrays: Numpy arrays are added to it, each once; None: they are strange.
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
        if name_of(leaf) is not None:
            return leaf
        if arrays is not None and is_array(leaf):
            known = [at for at, array in enumerate(arrays) if array is leaf]
            if not known:
                arrays.append(leaf)
            return ArraySlot(known[0] if known else len(arrays) - 1)
        for index, argument in enumerate(_strange_in(arguments)):
            if argument is leaf:
                return AliasSlot(index)
        strange.append(_kind_of(leaf))
        return None

    def slot(tensor: Tensor) -> TensorSlot:
        tensors.append(tensor)
        return TensorSlot(len(tensors) - 1)

    made = map_tensors(slot, value, other)
    if (holder := _with_attributes([value, made])) is not None:  # which would be those of the example
        made = None
        names = {field.name for field in fields(holder)} if is_dataclass(holder) else ()
        extra = next(name for name in vars(holder) if name not in names)
        strange.append(f"{type(holder).__name__} with the attribute {extra!r}")
    if arrays and overlap(arrays, tensors):
        strange.append("ndarray that overlaps another input in memory")
    found = StructureSpec(made, len(tensors), len(plain), strange[0] if strange else None, len(arrays or ()))
    return found, tensors, plain


def _with_attributes(value: Any) -> Any:
    """The first container in a value with attributes that are no items, or dataclass with some that are no fields."""
    if isinstance(value, list | tuple | set | frozenset | dict) and not is_dataclass(value):
        items = value if isinstance(value, dict) else {}
        held = dict_of(value)
        if any(name not in items or items[name] is not item for name, item in held.items()):
            return value
    elif is_dataclass(value) and not isinstance(value, type):
        names = {field.name for field in fields(value)}
        if any(name not in names and type(item) not in _PLAIN for name, item in dict_of(value).items()):
            return value
    found = (_with_attributes(part) for part in children_of(value))
    return next((one for one in found if one is not None), None)


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
        for item in fields_of(value).values():
            yield from _strange_in(item)
    elif is_record(value):
        for item in attributes_of(value).values():
            yield from _strange_in(item)
    elif name_of(value) is None:
        yield value


def name_of(value: Any) -> str | None:
    """The name by which another process finds the same dtype, layout, enum member, class or function.

    None for everything else: for closures, lambdas and bound methods too, since two of one name may differ.

    >>> name_of(torch.sin), name_of(torch.float16), name_of(int), name_of([].append), name_of(lambda: 0)
    ('torch.sin', 'torch.float16', 'builtins.int', None, None)
    """
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, enum.Enum):
        of = name_of(type(value))
        return None if of is None else f"{of}.{value._name_ or value._value_}"
    if not isinstance(value, type | FunctionType | BuiltinFunctionType):
        return None
    module = sys.modules.get(value.__module__ or "")
    for name in (value.__qualname__, value.__name__):  # torch.sin is called _VariableFunctionsClass.sin
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is value:
            return f"{value.__module__}.{name}"
    return None


def _kind_of(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, type | FunctionType):
        return f"{kind} {value.__qualname__}"
    if kind == "ndarray" and not is_array(value):
        return "ndarray that is not a writable array of plain numbers"
    path, item = find_unsupported(value) or ("", value)
    return f"{kind} ({path} is a {type(item).__name__})" if path else kind


def _no_tensor(tensor: Tensor) -> Tensor:
    raise AssertionError(f"a template holds a tensor of {tuple(tensor.shape)}")


def _letters(value: Any) -> Iterator[str]:
    if isinstance(value, TensorSlot):
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
            yield f"{_key(key)}="
            yield from _letters(item)
            yield ","
        yield ")"
    elif is_dataclass(value) and not isinstance(value, type):
        yield f"{type(value).__name__}("
        for name, item in fields_of(value).items():
            yield f"{name}="
            yield from _letters(item)
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
        yield name_of(value) or type(value).__name__


def _key(key: Any) -> str:
    return key if type(key) is str else f"[{name_of(key) or repr(key)}]"


def check_same(what: str, expected: StructureSpec, got: StructureSpec) -> None:
    """Raise where two values have not the same structure."""
    if expected.text != got.text:
        told = [_told(template.text) for template in (got, expected)]
        raise BadInputs(
            f"{what} is {told[0]} in this run and was {told[1]} in the example: split the model on an example of the "
            "same structure"
        )


def _told(text: str) -> str:
    words = ((r"\bT\d+\b", "tensor"), (r"\bS\d+\b", "value"), (r"\bN\d+\b", "ndarray"), (r"\bZ\d+:\d+", "size"))
    for letters, word in (*words, (r",?\)", ")")):
        text = re.sub(letters, word, text)
    return text

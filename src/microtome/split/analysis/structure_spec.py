"""Flatten the arguments and outputs of calls into tensors and plain values, and rebuild them from these."""

from __future__ import annotations

import copy
import enum
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from types import BuiltinFunctionType, FunctionType, MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from microtome.engine.argument_names import named_arguments
from microtome.engine.attributes import dict_of
from microtome.engine.pytree import (
    RECORD,
    SEQUENCE,
    SET,
    find_unsupported,
    is_state,
    map_tensors,
    node_type,
    reachable_tensors,
)
from microtome.errors import BadInputs, Unsupported
from microtome.inputs import Inputs
from microtome.split.analysis.arrays import is_array, overlap

#: Leaves that are sent by value.
Plain = bool | int | float | str | None
PLAIN = frozenset((bool, int, float, str, type(None)))


class Slot(int):
    """Stands for a leaf in a `StructureSpec`: the n-th of its kind.

    Attributes:
        kind: `T` for a tensor, `S` for a plain value, `N` for a numpy array; `Z` for a `torch.Size` of `count` plain
            values from the n-th on; `A` for an opaque object that is also among the arguments: the n-th of
            `opaque_objects_in` these; `O` for a state object.
    """

    kind: str
    count: int | None

    def __new__(cls, kind: str, index: int, count: int | None = None) -> Self:
        slot = super().__new__(cls, index)
        slot.kind, slot.count = kind, count
        return slot

    def __getnewargs__(self) -> Any:  # else it could not be copied
        return self.kind, int(self), self.count

    def __repr__(self) -> str:
        return f"{self.kind}{int(self)}" if self.count is None else f"{self.kind}{int(self)}:{self.count}"


@dataclass(frozen=True, eq=False)
class StructureSpec:
    """The structure of a value, without its tensors and plain values; as a `TreeSpec` of `torch.utils._pytree`.

    Attributes:
        template: The value, with slots in place of tensors, plain values and arrays.
        unsupported: The type of the first leaf that cannot be sent, in words; None if there is none.
    """

    template: Any
    num_tensors: int
    num_plain: int
    unsupported: str | None = None
    num_arrays: int = 0

    @cached_property
    def text(self) -> str:
        """The structure as a string: equal for two values that differ in tensors and plain values alone."""
        return "".join(_spell(self.template))

    @cached_property
    def digest(self) -> str:
        """A digest of the structure."""
        return xxh3_64_hexdigest(self.text.encode())

    @cached_property
    def _call(self) -> tuple[tuple[Slot, ...], dict[str, Slot]] | None:
        """The slots of arguments `(args, kwargs)` that are all leaves; None: it is another structure."""
        template = self.template
        if type(template) is not tuple or list(map(type, template)) != [tuple, dict]:
            return None
        args, kwargs = template
        leaves = (*args, *kwargs.values())
        are_slots = all(type(leaf) is Slot and leaf.count is None and leaf.kind != "A" for leaf in leaves)
        return (args, kwargs) if are_slots else None

    def unflatten(
        self,
        tensors: list[Any],
        plain: list[Any],
        arguments: Any = (),
        arrays: Sequence[Any] = (),
        states: Sequence[Any] = (),
    ) -> Any:
        """Rebuild a value of this structure."""
        if self is _TENSOR:
            return tensors[0]
        if type(self.template) is tuple and self is _tensor_tuple(len(self.template)):
            return tuple(tensors)
        leaves = {"T": tensors, "S": plain, "N": arrays, "O": states}
        if self._call is not None:
            args, kwargs = self._call
            named = {name: leaves[slot.kind][slot] for name, slot in kwargs.items()}
            return tuple([leaves[slot.kind][slot] for slot in args]), named
        objects = cache(lambda: list(opaque_objects_in(arguments)))  # few structures refer to them

        def fill(leaf: Any) -> Any:
            if type(leaf) is not Slot:
                return leaf
            if leaf.count is not None:
                return torch.Size(plain[leaf : leaf + leaf.count])
            return objects()[leaf] if leaf.kind == "A" else leaves[leaf.kind][leaf]

        return map_tensors(_refuse_tensor, self.template, fill)


_TENSOR = StructureSpec(Slot("T", 0), num_tensors=1, num_plain=0)


@cache
def _tensor_tuple(count: int) -> StructureSpec:
    """The structure of a tuple of tensors."""
    return StructureSpec(tuple(Slot("T", index) for index in range(count)), num_tensors=count, num_plain=0)


def _are_positional_tensors(value: Any) -> bool:
    """Whether a value is arguments `(args, kwargs)` of which all are tensors without keywords."""
    if type(value) is not tuple or len(value) != 2 or type(value[0]) is not tuple:
        return False
    return type(value[1]) is dict and not value[1] and {Tensor}.issuperset(map(type, value[0]))


@cache
def _positional_tensors(count: int) -> StructureSpec:
    template: Any = tuple(Slot("T", index) for index in range(count)), {}
    return StructureSpec(template, num_tensors=count, num_plain=0)


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
        inputs: The tensors among the model's arguments, once for each occurrence.
        plain: The plain values among them.
        outputs: The tensors of the model's output.
        is_static: Whether no operator and no code depends on values of tensors, so that shapes follow from shapes.
    """

    inputs: tuple[TensorSpec, ...]
    plain: list[Plain]
    outputs: tuple[TensorSpec, ...]
    is_static: bool


class SplitSpec(NamedTuple):
    """The structure of a model's arguments `(args, kwargs)` and of its output, on an example.

    Attributes:
        states: The state objects among the arguments, as they are before the run.
        created_states: Those of them that the model makes itself if they are not passed, by argument.
        state_classes: Their classes.
    """

    inputs: StructureSpec
    output: StructureSpec
    example: Example
    states: tuple[Any, ...] = ()
    created_states: Mapping[str, Any] = MappingProxyType({})
    state_classes: tuple[type, ...] = ()

    def complete(self, inputs: Inputs, model: nn.Module) -> Inputs:
        """Add the state objects that the model would make itself."""
        if all(inputs.kwargs.get(name) is not None for name in self.created_states):  # as in every step but the first
            return inputs
        passed = named_arguments(model, inputs)
        missing = {name: state for name, state in self.created_states.items() if passed.get(name) is None}
        return inputs.with_arguments(inputs.args, {**inputs.kwargs, **copy.deepcopy(missing)}) if missing else inputs

    def new_states(self) -> list[Any]:
        """Copies of the state objects before the run."""
        if any(tensor.is_floating_point() and tensor.numel() for tensor in reachable_tensors(list(self.states))):
            raise Unsupported(
                "expected the stage's own state, since that of the example has values: run the steps in a session of "
                "the stages (stages.session())"
            )
        return copy.deepcopy(list(self.states))


def flatten(
    value: Any, arguments: Any = (), arrays: list[Any] | None = None
) -> tuple[StructureSpec, list[Tensor], list[Plain]]:
    """Return the structure of a value, its tensors, once for each occurrence, and its plain values, in order.

    Args:
        arguments: The arguments of the call that returned the value: opaque objects among these become slots.
        arrays: Numpy arrays are appended here, each once; None: they are unsupported, and so are state objects.
    """
    if isinstance(value, Tensor):  # by far the most frequent
        return _TENSOR, [value], []
    if type(value) is tuple and {Tensor}.issuperset(map(type, value)):
        return _tensor_tuple(len(value)), list(value), []
    if _are_positional_tensors(value):
        return _positional_tensors(len(value[0])), list(value[0]), []
    tensors: list[Tensor] = []
    plain: list[Plain] = []
    states: list[Any] = []
    unsupported: list[str] = []

    def add_tensor(tensor: Tensor) -> Slot:
        tensors.append(tensor)
        return Slot("T", len(tensors) - 1)

    def add_leaf(leaf: Any) -> Any:
        if type(leaf) in PLAIN:  # subclasses would lose their type
            plain.append(leaf)
            return Slot("S", len(plain) - 1)
        if isinstance(leaf, torch.Size):
            plain.extend(leaf)
            return Slot("Z", len(plain) - len(leaf), len(leaf))
        if qualified_name(leaf) is not None:
            return leaf
        if arrays is not None and is_array(leaf):
            if (index := _index_of(leaf, arrays)) is None:
                arrays.append(leaf)
            return Slot("N", len(arrays) - 1 if index is None else index)
        if (index := _index_of(leaf, opaque_objects_in(arguments))) is not None:
            return Slot("A", index)
        if arrays is not None and is_state(leaf):
            if (index := _index_of(leaf, states)) is None:
                states.append(leaf)
            return Slot("O", len(states) - 1 if index is None else index)
        unsupported.append(_describe_type(leaf))
        return None

    template = map_tensors(add_tensor, value, add_leaf)
    if (extra := _find_extra_attribute([value, template])) is not None:  # it would be that of the example
        template = None
        unsupported.append(extra)
    if arrays and overlap(arrays, tensors):
        unsupported.append("ndarray that overlaps another input in memory")
    first = unsupported[0] if unsupported else None
    return StructureSpec(template, len(tensors), len(plain), first, len(arrays or ())), tensors, plain


def _index_of(value: Any, items: Iterable[Any]) -> int | None:
    return next((index for index, item in enumerate(items) if item is value), None)


def _find_extra_attribute(value: Any) -> str | None:
    """Describe an attribute of a container that is no item of it, or of a dataclass that is no field; None: none."""
    node = node_type(value)
    if node is None:
        return None
    extra: list[str] = []
    if is_dataclass(value):
        names = {field.name for field in fields(value)}
        attributes = dict_of(value).items()
        extra = [name for name, item in attributes if name not in names and type(item) not in PLAIN]
    elif isinstance(value, list | tuple | set | frozenset | dict):
        items = value if isinstance(value, dict) else {}
        extra = [name for name, item in dict_of(value).items() if name not in items or items[name] is not item]
    if extra:
        return f"{type(value).__name__} with the attribute {extra[0]!r}"
    return next(filter(None, map(_find_extra_attribute, node.children(value))), None)


def opaque_objects_in(value: Any) -> Iterator[Any]:
    """The leaves of a value other than tensors, plain values, and dtypes, classes and functions that have a name."""
    if type(value) in PLAIN or isinstance(value, Tensor | torch.Size):
        return
    if (node := node_type(value)) is not None:
        for child in node.children(value):
            yield from opaque_objects_in(child)
    elif qualified_name(value) is None:
        yield value


def qualified_name(value: Any) -> str | None:
    """The name by which another process can import the same dtype, layout, enum member, class or function.

    None for everything else, such as closures, lambdas and bound methods.

    >>> qualified_name(torch.sin), qualified_name(torch.float16), qualified_name([].append), qualified_name(lambda: 0)
    ('torch.sin', 'torch.float16', None, None)
    """
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, enum.Enum):
        enum_name = qualified_name(type(value))
        return None if enum_name is None else f"{enum_name}.{value._name_ or value._value_}"
    if not isinstance(value, type | FunctionType | BuiltinFunctionType):
        return None
    module = sys.modules.get(value.__module__ or "")
    for name in (value.__qualname__, value.__name__):  # torch.sin is called _VariableFunctionsClass.sin
        target: Any = module
        for part in name.split("."):
            target = getattr(target, part, None)
        if target is value:
            return f"{value.__module__}.{name}"
    return None


def _describe_type(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, type | FunctionType):
        return f"{kind} {value.__qualname__}"
    if kind == "ndarray" and not is_array(value):
        return "ndarray that is not a writable array of plain numbers"
    path, item = find_unsupported(value) or ("", value)
    return f"{kind} ({path} is a {type(item).__name__})" if path else kind


def _refuse_tensor(tensor: Tensor) -> Tensor:
    raise AssertionError(f"a template holds a tensor of {tuple(tensor.shape)}")


def _spell(value: Any) -> Iterator[str]:
    """Spell out a template: types, keys, slots and names."""
    node = node_type(value)
    if isinstance(value, Slot):
        yield repr(value)
    elif node is None:
        yield qualified_name(value) or type(value).__name__
    else:
        cls = type(value)
        yield f"{cls.__module__}.{cls.__qualname__}(" if node is RECORD else f"{cls.__name__}("
        for key, item in node.items(value):
            if node not in (SEQUENCE, SET):
                yield f"{key if type(key) is str else f'[{qualified_name(key) or repr(key)}]'}="
            yield from _spell(item)
            yield ","
        yield ")"


def check_structure(name: str, expected: StructureSpec, got: StructureSpec, *, is_call: bool = False) -> None:
    """Raise if two structures differ.

    Args:
        name: The name of the value, for the message.
        is_call: Whether it is the arguments of a call: a tuple of those by position and a dict of those by name.
    """
    if expected is not got and expected.text != got.text:
        write = _write_arguments if is_call else _write
        raise BadInputs(
            f"{name}: expected {write(expected.template)}, as on the example, got {write(got.template)}. Split the "
            "model on an example of the same structure"
        )


_LEAVES = {"T": "tensor", "S": "value", "N": "ndarray", "A": "object", "O": "state", "Z": "torch.Size"}


def _write(value: Any) -> str:
    """Write a template as Python writes the value, with the kinds of its leaves.

    >>> _write(([Slot("T", 0)], {"mask": Slot("T", 1)}, (Slot("S", 0),)))
    "([tensor], {'mask': tensor}, (value,))"
    """
    node = node_type(value)
    if isinstance(value, Slot):
        return _LEAVES[value.kind]
    if node is None:
        return qualified_name(value) or type(value).__name__
    items = [(key, _write(item)) for key, item in node.items(value)]
    cls = type(value)
    texts = ", ".join(text for _, text in items)
    if cls is tuple:
        return f"({texts},)" if len(items) == 1 else f"({texts})"
    if cls is list:
        return f"[{texts}]"
    if cls is dict:
        return f"{{{', '.join(f'{qualified_name(key) or repr(key)}: {text}' for key, text in items)}}}"
    if node in (SEQUENCE, SET):
        return f"{cls.__name__}({texts})"
    return f"{cls.__name__}({', '.join(f'{key}={text}' for key, text in items)})"


def _write_arguments(template: Any) -> str:
    args, kwargs = template
    return f"({', '.join([*map(_write, args), *(f'{name}={_write(value)}' for name, value in kwargs.items())])})"

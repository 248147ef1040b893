"""Fake tensors whose sizes are symbols, and the conditions on these that a run of a model implies."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from microtome.engine.torch_internals import fake_tensor_types

#: What the functions of torch raise for sizes that no run has: a division by zero, the remainder of a negative size.
NO_SIZE = (ZeroDivisionError, AssertionError)
#: A symbol in an expression.
SYMBOL = re.compile(r"\b[a-z]+\d+\b")
_TORCH = os.path.dirname(torch.__file__) + os.sep
#: Functions of torch that find the layout of a fake tensor, or a kernel by it. What a graph computes is the same.
_LAYOUT_FUNCTIONS = {
    ("_prims_common", "check_contiguous_sizes_strides"),
    ("_prims_common", "is_channels_last_contiguous_2d"),
    ("_prims_common", "is_channels_last_contiguous_3d"),
    ("_prims_common", "__lt__"),  # of strides
    ("_refs", "_reshape_view_helper_core_alg"),
    ("_subclasses", "conv"),
}


class SymbolicShapes:
    """Makes fake tensors with symbols in place of some of their sizes.

    Args:
        dynamic: By the id of a tensor, the dimensions whose sizes are symbols.
        device: The device of what stands for tensors on meta; None: they stay there.

    Attributes:
        example: The sizes that the symbols stand for.
    """

    def __init__(self, dynamic: Mapping[int, Collection[int]], device: torch.device | None) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # imports sympy

        self.env = ShapeEnv()
        self._dynamic = dynamic
        self._device = device
        self._sizes: dict[int, list[Any]] = {}
        self.example: dict[Any, int] = {}
        mode_type = fake_tensor_types()[1]
        self.mode = mode_type(allow_non_fake_inputs=True, shape_env=self.env, static_shapes=True)

    def from_tensor(self, tensor: Tensor) -> Tensor:
        """The fake tensor that stands for a tensor."""
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

        if tensor.is_meta and self._device is not None:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        if not (dynamic := self._dynamic.get(id(tensor))):
            fake: Tensor = self.mode.from_tensor(tensor)
            return fake
        sizes = [DimDynamic.DYNAMIC if at in dynamic else DimDynamic.STATIC for at in range(tensor.dim())]
        context: Any = StatelessSymbolicContext(sizes)
        fake = self.mode.from_tensor(tensor, static_shapes=False, symbolic_context=context)
        self._sizes[id(tensor)] = [getattr(getattr(size, "node", None), "expr", size) for size in fake.shape]
        self.example.update(zip(self._sizes[id(tensor)], tensor.shape, strict=True))
        return fake

    @property
    def num_guards(self) -> int:
        """The number of conditions so far, with those on layouts."""
        return len(self.env.guards)

    def conditions(self, without: Iterable[range] = ()) -> list[Any]:
        """The conditions on the symbols under which the run makes the same operators, as expressions of sympy.

        Args:
            without: Of which numbers of guards there are none.
        """
        skipped = {index for one in without for index in one}
        guards = [guard for index, guard in enumerate(self.env.guards) if index not in skipped]
        found = (self.env.simplify(guard.expr) for guard in guards if not _is_about_layout(guard))
        return [expression for expression in found if expression.free_symbols]

    def fixed_dims(self, tensor: Tensor) -> dict[int, str]:
        """The dimensions of a tensor whose sizes were to be symbols, and that the run fixes; with the reason."""
        sizes = self._sizes.get(id(tensor), ())
        symbols = {dim: size for dim, size in enumerate(sizes) if getattr(size, "is_Symbol", False)}
        simplified = {dim: self.env.simplify(symbol) for dim, symbol in symbols.items()}
        return {
            dim: f"{self._place_of(symbols[dim])}, needs {size}" for dim, size in simplified.items() if size.is_number
        }

    def _place_of(self, symbol: Any) -> str:
        """Name the code that needs a symbol to be the size of the example."""
        guards = (guard for guard in self.env.guards if symbol in guard.expr.free_symbols)
        places: list[Any] = [guard.sloc.framework_loc for guard in guards if guard.expr.func.__name__ == "Equality"]
        if not places or places[0] is None:
            return "an operator"
        place = places[0]
        if place.filename.startswith(_TORCH):
            return f"torch, in {place.name}"
        return f"{os.path.basename(place.filename)}:{place.lineno}, in {place.name}"

    def size(self, size: Any) -> Any:
        """A size of a fake tensor: an int, or an expression of sympy."""
        if isinstance(size, int):
            return size
        expression = self.env.simplify(size.node.expr)
        return int(expression) if expression.is_number else expression


def _is_about_layout(guard: Any) -> bool:
    """Whether a condition is on the strides of a tensor alone: no size need have a certain value."""
    place = guard.sloc.framework_loc
    if place is None or guard.expr.func.__name__ == "Equality":
        return False
    folder = os.path.relpath(place.filename, _TORCH).partition(os.sep)[0]
    return (folder, place.name) in _LAYOUT_FUNCTIONS


def _value_of(size: Any, values: dict[Any, int]) -> int | None:
    """The value of a size; None: there is none, as of the remainder of a negative number."""
    try:
        return int(size if isinstance(size, int) else size.subs(values))
    except NO_SIZE:
        return None


def _holds(condition: Any, values: dict[Any, int]) -> bool:
    try:
        return bool(condition.subs(values))
    except NO_SIZE:
        return False


class ShapeCheck:
    """Checks shapes of tensors against those of fake tensors.

    Args:
        names: The names of the tensors, for errors.
        shapes: Their sizes: ints, and expressions of symbols.
        conditions: On the symbols that are the size of a dimension.
    """

    def __init__(self, names: Sequence[str], shapes: Sequence[Sequence[Any]], conditions: Iterable[Any]) -> None:
        self.names = tuple(names)
        self.shapes = tuple(map(tuple, shapes))
        self.conditions = tuple(conditions)
        self._symbols = {size for shape in self.shapes for size in shape if getattr(size, "is_Symbol", False)}
        every = (symbol for shape in self.shapes for size in shape for symbol in _symbols_of(size))
        self._named = {symbol: _positive(f"s{index}") for index, symbol in enumerate(dict.fromkeys(every))}
        self._accepted: set[tuple[tuple[int, ...], ...]] = set()

    def find_mismatch(self, tensors: Sequence[Tensor]) -> str | None:
        """Describe the first difference; None: the shapes fit."""
        shapes = tuple([tuple(tensor.shape) for tensor in tensors])
        if shapes in self._accepted:
            return None
        mismatch = self._compare(shapes)
        if mismatch is None and len(self._accepted) < 10_000:
            self._accepted.add(shapes)
        return mismatch

    def _compare(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        values: dict[Any, int] = {}
        for name, expected, got in zip(self.names, self.shapes, shapes, strict=True):
            if len(expected) != len(got):
                return f"expected {name!r} with {len(expected)} dimensions, got {len(got)}"
            for size, number in zip(expected, got, strict=True):
                if size in self._symbols and values.setdefault(size, number) != number:
                    return f"expected {self.describe()}, got {_format(name, got)}"
        for name, expected, got in zip(self.names, self.shapes, shapes, strict=True):
            for size, number in zip(expected, got, strict=True):
                if _value_of(size, values) != number:
                    return f"expected {self.describe()}, got {_format(name, got)}"
                if number == 0 and size != 0:
                    return f"expected sizes of 1 or more in {self.describe()}, got {_format(name, got)}"
        for condition in self.conditions:
            if not _holds(condition, values):
                other = _format_all(self.names, shapes)
                return f"expected sizes with {self.spell(condition)} in {self.describe()}, got {other}"
        return None

    @property
    def spelled(self) -> list[list[str]]:
        """The sizes as text, such as `s0`."""
        return [list(map(self.spell, shape)) for shape in self.shapes]

    def fixed_dims(self) -> dict[str, str]:
        """The dimensions that have one size for all inputs of the model."""
        return {
            f"{name}[{dim}]": f"{size} for all inputs of the model"
            for name, shape in zip(self.names, self.shapes, strict=True)
            for dim, size in enumerate(shape)
            if isinstance(size, int)
        }

    def describe(self) -> str:
        """The shapes as text, such as `x[s0, 3, s1, s1]`."""
        return _format_all(self.names, self.spelled)

    def dims_of(self, symbol: Any) -> list[str]:
        """The dimensions with a symbol as their size, such as `x[0]`."""
        return [
            f"{name}[{dim}]"
            for name, shape in zip(self.names, self.shapes, strict=True)
            for dim, size in enumerate(shape)
            if size == symbol
        ]

    def positions(self) -> dict[Any, tuple[int, int]]:
        """The index of a tensor, and the dimension, where each symbol is the size."""
        found: dict[Any, tuple[int, int]] = {}
        for index, shape in enumerate(self.shapes):
            for dim, size in enumerate(shape):
                if size in self._symbols:
                    found.setdefault(size, (index, dim))
        return found

    def value_of(self, symbol: Any, shapes: Sequence[Sequence[int]]) -> int | None:
        """The size of a symbol in some shapes."""
        values = (
            number
            for expected, shape in zip(self.shapes, shapes, strict=True)
            for size, number in zip(expected, shape, strict=True)
            if size == symbol
        )
        return next(values, None)

    def exclude_ones(self, sizes: Iterable[Any]) -> None:
        """Accept no sizes of 1 for all of these together."""
        from sympy import Ge, Max

        self.conditions += (Ge(Max(*sizes), 2),)
        self._accepted.clear()

    def spell_conditions(self) -> list[str]:
        """The conditions as text, such as `s0 >= 2`."""
        return list(map(self.spell, self.conditions))

    def resized(self, tensors: Sequence[Tensor], sizes: Mapping[Any, int]) -> list[tuple[int, ...]]:
        """Shapes like those of some tensors, with other sizes for some symbols."""
        values = {**self._values_of(tensors), **sizes}
        return [
            tuple([_evaluate(size, values, number) for size, number in zip(shape, tensor.shape, strict=True)])
            for shape, tensor in zip(self.shapes, tensors, strict=True)
        ]

    def without_ones(self, tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """Shapes like those of some tensors, with 2 in place of the symbols that are 1 there."""
        return self.resized(tensors, {symbol: 2 for symbol, size in self._values_of(tensors).items() if size == 1})

    def _values_of(self, tensors: Sequence[Tensor]) -> dict[Any, int]:
        """The sizes of the symbols in these tensors."""
        return {
            size: number
            for shape, tensor in zip(self.shapes, tensors, strict=True)
            for size, number in zip(shape, tensor.shape, strict=True)
            if size in self._symbols
        }

    def spell(self, expression: Any) -> str:
        """A size or a condition as text, such as `s0 >= 2`."""
        return str(expression if isinstance(expression, int) else expression.xreplace(self._named))


def _evaluate(size: Any, values: Mapping[Any, int], default: int) -> int:
    """The value of a size; the default if it has symbols without a value."""
    known = size if isinstance(size, int) else size.subs(values)
    return int(known) if isinstance(known, int) or known.is_number else default


def _positive(name: str) -> Any:
    from sympy import Symbol

    return Symbol(name, integer=True, positive=True)


def _symbols_of(size: Any) -> list[Any]:
    return [] if isinstance(size, int) else sorted(size.free_symbols, key=str)


def _format_all(names: Sequence[str], shapes: Sequence[Sequence[Any]]) -> str:
    return ", ".join(map(_format, names, shapes))


def _format(name: str, shape: Sequence[Any]) -> str:
    return f"{name}[{', '.join(map(str, shape))}]"

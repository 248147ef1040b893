"""The recorded tensors of one name, in order."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from microtome.errors import BadQuery, NoTensor
from microtome.results.base import render
from microtome.units import shape as shape_text
from microtome.units import size


class StoredTensor(NamedTuple):
    """A stored tensor: its properties, and a function that loads it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]
    run: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Series(Sequence[Tensor]):
    """The tensors of one name, each loaded on access.

    >>> series = Series("fc", [in_memory(torch.zeros(2, 3)), in_memory(torch.ones(1, 3))])
    >>> len(series), series.shapes, series.cat().shape
    (2, [(2, 3), (1, 3)], torch.Size([3, 3]))
    """

    def __init__(self, name: str, tensors: Sequence[StoredTensor], *, is_slice: bool = False) -> None:
        self.name = name
        self._tensors = tensors
        self._is_slice = is_slice

    def __len__(self) -> int:
        return len(self._tensors)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Series: ...
    def __getitem__(self, index: int | slice) -> Tensor | Series:
        if isinstance(index, slice):
            return Series(self.name, self._tensors[index], is_slice=self._is_slice or bool(self._tensors))
        if not -len(self) <= operator.index(index) < len(self):
            expected = f"expected an index from 0 to {len(self) - 1}" if self._tensors else self._why_empty()
            raise NoTensor(f"{self.name!r} has no tensor {index}: {expected}")
        return self._tensors[index].load()

    def __iter__(self) -> Iterator[Tensor]:
        return (tensor.load() for tensor in self._tensors)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tensor.shape for tensor in self._tensors]

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [tensor.dtype for tensor in self._tensors]

    @property
    def runs(self) -> list[int | None]:
        """The number of the run that made each tensor; None in a recording without numbers.

        Tensors of two names belong to one run if they have the same number.
        """
        return [tensor.run for tensor in self._tensors]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def cat(self, dim: int = 0) -> Tensor:
        """Concatenate the tensors along an existing dimension."""
        self._check_dtypes_and_dims("concatenate")
        dims = len(self._tensors[0].shape)
        if not -dims <= dim < dims:
            hint = "stack() adds a dimension" if dims == 0 else f"expected {-dims} to {dims - 1}"
            raise BadQuery(
                f"cannot concatenate {self._text()} along dimension {dim}: they have {dims} dimensions; {hint}"
            )
        at = dim % dims
        self._check_shapes({(*shape[:at], -1, *shape[at + 1 :]) for shape in self.shapes}, f"concatenate along {dim}")
        return torch.cat(list(self), dim)

    def stack(self) -> Tensor:
        """Stack the tensors along a new first dimension."""
        self._check_dtypes_and_dims("stack")
        self._check_shapes(set(self.shapes), "stack")
        return torch.stack(list(self))

    def plot(self, index: int = 0, **options: Any) -> Any:
        """Return an image of one tensor for display in a notebook; the options are those of `Features.plot`."""
        return render("pictures.activation.plot", self[index], self.name, **options)

    def _check_dtypes_and_dims(self, verb: str) -> None:
        if not self._tensors:
            raise BadQuery(f"cannot {verb} the tensors of {self.name!r}: {self._why_empty()}")
        dtypes = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        if len(dtypes) > 1:
            raise BadQuery(f"cannot {verb} {self._text()}: expected one dtype, got {' and '.join(dtypes)}")
        self._check_shapes({(len(shape),) for shape in self.shapes}, verb)

    def _check_shapes(self, kinds: set[tuple[int, ...]], verb: str) -> None:
        if len(kinds) > 1:
            counts = Counter(self.shapes).most_common()
            shapes = ", ".join(f"{shape_text(shape)} ({count} times)" for shape, count in counts[:5])
            more = f" and {len(counts) - 5} more shapes" if len(counts) > 5 else ""
            raise BadQuery(
                f"cannot {verb} {self._text()}: their shapes differ: {shapes}{more}; use them one by one, or in slices "
                "of equal shapes"
            )

    def _why_empty(self) -> str:
        if self._is_slice:
            return "the slice is empty"
        return f"none is stored, due to keep='stats' or the limit; stats({self.name!r}) has their statistics"

    def _text(self) -> str:
        return f"the {len(self)} tensors of {self.name!r}"

    def __repr__(self) -> str:
        return f"<Series {self.name!r}: {len(self)} tensors, {size(self.nbytes)}>"


def in_memory(tensor: Tensor, run: int | None = None) -> StoredTensor:
    return StoredTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor, run)

"""The tensors of one name, in the order they were made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, overload

import torch
from torch import Tensor

from microtome.errors import BadQuery
from microtome.results.rendering import render
from microtome.units import shape as shape_text
from microtome.units import size


class StoredTensor(Protocol):
    """A tensor that is somewhere: what is known of it without reading it, and the way to read it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def run(self) -> int | None: ...
    def load(self) -> Tensor: ...


class InMemory(NamedTuple):
    """A tensor that is here."""

    tensor: Tensor
    run: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def load(self) -> Tensor:
        return self.tensor


class Series(Sequence[Tensor]):
    """The tensors of one name, each read when it is asked for.

    >>> series = Series("fc", [InMemory(torch.zeros(2, 3)), InMemory(torch.ones(1, 3))])
    >>> len(series), series.shapes, series.cat().shape
    (2, [(2, 3), (1, 3)], torch.Size([3, 3]))
    """

    def __init__(self, name: str, held: Sequence[StoredTensor]) -> None:
        self.name = name
        self._held = held

    def __len__(self) -> int:
        return len(self._held)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Series: ...
    def __getitem__(self, index: int | slice) -> Tensor | Series:
        if isinstance(index, slice):
            return Series(self.name, self._held[index])
        return self._held[index].load()

    def __iter__(self) -> Iterator[Tensor]:
        return (held.load() for held in self._held)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [held.shape for held in self._held]

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [held.dtype for held in self._held]

    @property
    def runs(self) -> list[int | None]:
        """The number of the run that each is of; None where a recording was made without.

        Tensors of two names are of one run if they have the same number.
        """
        return [held.run for held in self._held]

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._held)

    def cat(self, dim: int = 0) -> Tensor:
        """One tensor, the tensors one after the other along a dimension that they have."""
        self._check_alike("concatenate")
        dims = len(self._held[0].shape)
        if not -dims <= dim < dims:
            hint = "stack() makes a new dimension" if dims == 0 else f"it is {-dims} to {dims - 1}"
            raise BadQuery(
                f"cannot concatenate {self._text()} along dimension {dim}: they have {dims} dimensions; {hint}"
            )
        at = dim % dims
        self._check_shapes({(*shape[:at], -1, *shape[at + 1 :]) for shape in self.shapes}, f"concatenate along {dim}")
        return torch.cat(list(self), dim)

    def stack(self) -> Tensor:
        """One tensor with a new first dimension, the tensors one after the other along it."""
        self._check_alike("stack")
        self._check_shapes(set(self.shapes), "stack")
        return torch.stack(list(self))

    def plot(self, index: int = 0, **options: Any) -> Any:
        """One of the tensors as a picture that notebooks show; the options are those of `Features.to_png`."""
        return render("activation.plot", self[index], self.name, **options)

    def _check_alike(self, verb: str) -> None:
        if not self._held:
            raise BadQuery(f"cannot {verb} {self._text()}: there are none")
        dtypes = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        if len(dtypes) > 1:
            raise BadQuery(f"cannot {verb} {self._text()}: they are of {' and '.join(dtypes)}")
        self._check_shapes({(len(shape),) for shape in self.shapes}, verb)

    def _check_shapes(self, kinds: set[tuple[int, ...]], verb: str) -> None:
        if len(kinds) > 1:
            counts = Counter(self.shapes).most_common()
            seen = ", ".join(f"{shape_text(shape)} ({count} times)" for shape, count in counts[:5])
            more = f" and {len(counts) - 5} more shapes" if len(counts) > 5 else ""
            raise BadQuery(
                f"cannot {verb} {self._text()}: their shapes differ: {seen}{more}; they are kept as they are, "
                f"so take them one by one or in slices that agree"
            )

    def _text(self) -> str:
        return f"the {len(self)} tensors of {self.name!r}"

    def __repr__(self) -> str:
        return f"<Series {self.name!r}: {len(self)} tensors, {size(self.nbytes)}>"

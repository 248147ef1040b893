"""Running statistics of all the elements of many tensors, without the tensors."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from microtome.errors import BadQuery

#: Elements looked at together. On the CPU fewer than torch shares among its threads (32768): waiting for these, while
#: a thread that writes and the model want the cores too, can take a hundred times as long as the sums.
_CPU_ELEMENTS = (1 << 15) - 256
_GPU_ELEMENTS = 1 << 24
_QUICK_ELEMENTS = 1 << 13

#: Dtypes whose least and greatest are found faster as they are.
_ORDERED = (torch.float64, torch.float32, torch.int64, torch.int32)

_scratch = threading.local()


@dataclass
class Histogram:
    """How many elements fell into each of `bins` equal parts of `low` to `high`, both ends included.

    Attributes:
        counts: Of each part, lowest first. An element at an inner edge is in the part above it.
        below: How many were lower than `low`.
        above: How many were higher than `high`.
    """

    bins: int
    low: float
    high: float
    counts: list[int] = field(default_factory=list)
    below: int = 0
    above: int = 0

    def __post_init__(self) -> None:
        if self.bins < 1 or not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise BadQuery(
                f"a histogram needs at least one bin and finite edges, the low one first; "
                f"got bins={self.bins}, low={self.low}, high={self.high}"
            )
        self.counts = self.counts or [0] * self.bins

    @property
    def edges(self) -> list[float]:
        """The `bins + 1` edges."""
        inner = [self.low + (self.high - self.low) * at / self.bins for at in range(1, self.bins)]
        return [self.low, *inner, self.high]

    def new(self) -> Histogram:
        """One with the same edges and nothing in it."""
        return Histogram(self.bins, self.low, self.high)

    def add(self, values: Tensor) -> None:
        edges = self.edges
        edges[-1] = math.nextafter(self.high, math.inf)  # `bucketize` leaves out the upper end of the last part
        places = torch.bucketize(values, torch.tensor(edges, dtype=values.dtype, device=values.device), right=True)
        below, *counts, above = torch.bincount(places, minlength=self.bins + 2).tolist()
        self._add_counts(counts, below, above)

    def merge(self, other: Histogram) -> None:
        if (other.bins, other.low, other.high) != (self.bins, self.low, self.high):
            raise BadQuery(f"histograms with other edges do not add up: {self._text()} and {other._text()}")
        self._add_counts(other.counts, other.below, other.above)

    def _add_counts(self, counts: list[int], below: int, above: int) -> None:
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.below += below
        self.above += above

    def _text(self) -> str:
        return f"{self.bins} bins from {self.low} to {self.high}"


@dataclass
class Stats:
    """Count, mean, variance, least and greatest of all elements given to `add`.

    Neither the order of the tensors nor how they are parted changes more than the last digits (Chan's way of merging).
    Sums are taken and merged in float64; those of 8192 and more elements of float32 are taken in float32, thousands of
    elements at a time, where that keeps six digits: in two thirds of the time, so that statistics keep up with a disk.
    NaN and infinities are counted apart and are in none of the other figures. Of complex numbers, the magnitudes count.

    >>> stats = Stats()
    >>> stats.add(torch.tensor([1.0, 2.0])); stats.add(torch.tensor([3, 6])); stats.add(torch.tensor(float("nan")))
    >>> stats.count, stats.mean, round(stats.variance, 9), stats.min, stats.max, stats.nonfinite
    (4, 3.0, 3.5, 1.0, 6.0, 1)

    Attributes:
        count: The finite elements.
        nonfinite: The others.
        mean: None where there is no finite element, as `variance`, `std`, `min` and `max`.
        histogram: None where none was asked for.
    """

    count: int = 0
    nonfinite: int = 0
    mean: float | None = None
    squares: float = 0.0
    min: float | None = None
    max: float | None = None
    histogram: Histogram | None = None

    @property
    def variance(self) -> float | None:
        """Of the population: the mean of the squared distances from the mean."""
        return self.squares / self.count if self.count else None

    @property
    def std(self) -> float | None:
        return None if self.variance is None else math.sqrt(self.variance)

    @torch.inference_mode()
    def add(self, tensor: Tensor) -> None:
        flat = (tensor.detach().abs() if tensor.is_complex() else tensor.detach()).reshape(-1)
        most = _CPU_ELEMENTS if flat.device.type == "cpu" else _GPU_ELEMENTS
        for chunk in (flat,) if flat.numel() <= most else flat.split(most):
            self._add_chunk(chunk)

    def _add_chunk(self, chunk: Tensor) -> None:
        if not chunk.numel():
            return
        if self.histogram is None and (quick := _quick_moments(chunk)) is not None:
            low, high, mean, squares = quick
            self._merge(chunk.numel(), mean, squares, low, high)
            return
        values = _wide(chunk)
        low, high, mean, squares = _moments(chunk, values)
        count = chunk.numel()
        if not (math.isfinite(low) and math.isfinite(high)):
            values = _wide(chunk)
            values = values[values.isfinite()]
            count = values.numel()
            self.nonfinite += chunk.numel() - count
            low, high, mean, squares = _moments(values, values.clone()) if count else (0.0, 0.0, 0.0, 0.0)
        elif self.histogram is not None:
            values = _wide(chunk)
        self._merge(count, mean, squares, low, high)
        if self.histogram is not None:
            self.histogram.add(values)

    def merge(self, other: Stats) -> None:
        """Take in what another has seen."""
        self.nonfinite += other.nonfinite
        if other.mean is not None and other.min is not None and other.max is not None:
            self._merge(other.count, other.mean, other.squares, other.min, other.max)
        if self.histogram is not None and other.histogram is not None:
            self.histogram.merge(other.histogram)

    def _merge(self, count: int, mean: float, squares: float, low: float, high: float) -> None:
        if not count:
            return
        if self.mean is None or self.min is None or self.max is None:
            self.count, self.mean, self.squares, self.min, self.max = count, mean, squares, low, high
            return
        total, apart = self.count + count, mean - self.mean
        self.squares += squares + apart * apart * (self.count / total * count)
        self.mean += apart * (count / total)
        self.min, self.max = min(self.min, low), max(self.max, high)
        self.count = total

    def new(self) -> Stats:
        """One with the same edges of the histogram and nothing in it."""
        return Stats(histogram=self.histogram and self.histogram.new())

    def as_dict(self) -> dict[str, Any]:
        """As what JSON can hold."""
        data = {name: getattr(self, name) for name in ("count", "nonfinite", "mean", "squares", "min", "max")}
        return data | ({} if self.histogram is None else {"histogram": dict(vars(self.histogram))})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        histogram = data.get("histogram")
        if histogram is not None and histogram["bins"] != len(histogram["counts"]):  # else it takes memory for all bins
            bins, counts = histogram["bins"], len(histogram["counts"])
            raise ValueError(f"expected a count for each of {bins!r:.80} bins, got {counts}")
        return cls(**(data | {"histogram": None if histogram is None else Histogram(**histogram)}))


def _wide(chunk: Tensor) -> Tensor:
    """The chunk in float64, on the CPU in memory that the next one overwrites: new pages cost more than the sums."""
    if chunk.device.type != "cpu":
        return chunk.to(torch.float32 if chunk.device.type == "mps" else torch.float64, copy=True)
    if not hasattr(_scratch, "values"):
        with torch.inference_mode(False):  # else it could not be written outside inference mode
            _scratch.values = torch.empty(_CPU_ELEMENTS, dtype=torch.float64, device="cpu")
    values: Tensor = _scratch.values
    return (values if chunk.numel() == _CPU_ELEMENTS else values[: chunk.numel()]).copy_(chunk)


def _moments(chunk: Tensor, values: Tensor) -> tuple[float, float, float, float]:
    """Least, greatest, mean, and the sum of the squared distances from it; may overwrite the values, not the chunk."""
    narrow = chunk if chunk.dtype in _ORDERED else values
    low, high = float(narrow.amin().item()), float(narrow.amax().item())
    total, squares = values.sum().item(), torch.linalg.vector_norm(values).item() ** 2
    mean = total / values.numel()
    about_mean = squares - total * mean
    if about_mean < 1e-3 * squares:  # the difference has lost digits: take the mean off first
        about_mean = torch.linalg.vector_norm(values.sub_(mean)).item() ** 2
    return low, high, mean, about_mean


def _quick_moments(chunk: Tensor) -> tuple[float, float, float, float] | None:
    """The same of many elements of float32, summed in it; None where that would lose digits or leave its range."""
    if chunk.dtype is not torch.float32 or chunk.numel() < _QUICK_ELEMENTS:
        return None
    low, high = chunk.amin().item(), chunk.amax().item()
    total, squares = chunk.sum().item(), torch.linalg.vector_norm(chunk).item() ** 2
    mean = total / chunk.numel()
    about_mean = squares - total * mean
    if 1e-24 < squares < 1e36 and about_mean > 0.1 * squares:
        return low, high, mean, about_mean
    return None

"""Running statistics and histograms of the elements of many tensors."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from microtome.capture.store.exact_sum import ExactSum, split_float
from microtome.devices.base import backend_of
from microtome.errors import BadQuery

#: Elements per chunk. On the CPU fewer than torch parallelizes (32768): waiting for its threads, while a writing thread
#: and the model use the cores too, can take a hundred times as long as the sums.
_CPU_ELEMENTS = (1 << 15) - 256
_GPU_ELEMENTS = 1 << 24
_QUICK_ELEMENTS = 1 << 13

#: Dtypes whose minimum and maximum are faster without conversion.
_ORDERED = (torch.float64, torch.float32, torch.int64, torch.int32)

#: The binary exponent by which elements are scaled down if their squares are too large for the dtype of the sums.
_SHIFTS = {torch.float64: 600, torch.float32: 80}

_scratch = threading.local()


@dataclass
class Histogram:
    """The number of elements in each of `bins` equal bins from `low` to `high`, both ends included.

    Attributes:
        counts: The count of each bin, lowest first. An element at an inner edge is in the bin above it.
        below: The number of elements below `low`.
        above: The number of elements above `high`.
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
                f"expected a histogram with at least one bin and finite edges, low below high, "
                f"got bins={self.bins}, low={self.low}, high={self.high}"
            )
        self.counts = self.counts or [0] * self.bins

    @property
    def edges(self) -> list[float]:
        """The `bins + 1` edges."""
        inner = [self.low + (self.high - self.low) * at / self.bins for at in range(1, self.bins)]
        return [self.low, *inner, self.high]

    def new(self) -> Histogram:
        """Return an empty histogram with the same edges."""
        return Histogram(self.bins, self.low, self.high)

    def add(self, values: Tensor) -> None:
        edges = self.edges
        edges[-1] = math.nextafter(self.high, math.inf)  # `bucketize` excludes the upper end of the last bin
        indices = torch.bucketize(values, torch.tensor(edges, dtype=values.dtype, device=values.device), right=True)
        below, *counts, above = torch.bincount(indices, minlength=self.bins + 2).tolist()
        self._add_counts(counts, below, above)

    def merge(self, other: Histogram) -> None:
        if (other.bins, other.low, other.high) != (self.bins, self.low, self.high):
            raise BadQuery(f"cannot merge histograms: expected {self}, got {other}")
        self._add_counts(other.counts, other.below, other.above)

    def _add_counts(self, counts: list[int], below: int, above: int) -> None:
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.below += below
        self.above += above

    def __str__(self) -> str:
        return f"{self.bins} bins from {self.low} to {self.high}"


@dataclass
class Stats:
    """Count, mean, variance, minimum and maximum of all elements passed to `add`.

    Each tensor is summed in float64, in chunks; the sums of chunks are added without rounding, as integers, and rounded
    once when `mean`, `squares` or `variance` is read. So all of these are the same to the last bit in whatever order
    tensors are added, and in whatever groups they are added first and merged later. They are those of the elements to
    rounding in a chunk: chunks of at least 8192 elements of float32 are summed in float32, thousands of elements at a
    time, if that preserves six digits, in two thirds of the time, so that statistics keep up with a disk. NaN and
    infinities are counted separately and excluded otherwise. Complex numbers count by magnitude.

    >>> stats = Stats()
    >>> stats.add(torch.tensor([1.0, 2.0])); stats.add(torch.tensor([3, 6])); stats.add(torch.tensor(float("nan")))
    >>> stats.count, stats.mean, round(stats.variance, 9), stats.min, stats.max, stats.nonfinite
    (4, 3.0, 3.5, 1.0, 6.0, 1)
    >>> stats
    Stats(count=4, mean=3, std=1.87083, min=1, max=6, nonfinite=1)

    Attributes:
        count: The number of finite elements.
        nonfinite: The number of others.
        min: None without a finite element, as are `max`, `mean`, `variance` and `std`.
        total: The sum of the elements.
        power: The sum of their squares.
    """

    count: int = 0
    nonfinite: int = 0
    min: float | None = None
    max: float | None = None
    total: ExactSum = field(default_factory=ExactSum)
    power: ExactSum = field(default_factory=ExactSum)
    histogram: Histogram | None = None

    def __repr__(self) -> str:
        numbers = {name: getattr(self, name) for name in ("mean", "std", "min", "max")}
        described = [f"{name}={'None' if value is None else f'{value:.6g}'}" for name, value in numbers.items()]
        values = [f"count={self.count}", *described, f"nonfinite={self.nonfinite}"]
        if self.histogram is not None:
            values.append(f"histogram={self.histogram}")
        return f"Stats({', '.join(values)})"

    @property
    def mean(self) -> float | None:
        return self.total.divide(self.count) if self.count else None

    @property
    def squares(self) -> float:
        """The sum of the squared deviations from the mean."""
        return self._squares_times_count().divide(self.count) if self.count else 0.0

    @property
    def variance(self) -> float | None:
        """The population variance."""
        return self._squares_times_count().divide(self.count**2) if self.count else None

    def _squares_times_count(self) -> ExactSum:
        result = ExactSum(self.power.mantissa * self.count, self.power.exponent)
        result.add(-(self.total.mantissa**2), 2 * self.total.exponent)
        return result

    @property
    def std(self) -> float | None:
        return None if self.variance is None else math.sqrt(self.variance)

    @torch.inference_mode()
    def add(self, tensor: Tensor) -> None:
        flat = (tensor.detach().abs() if tensor.is_complex() else tensor.detach()).reshape(-1)
        chunk_size = _CPU_ELEMENTS if flat.device.type == "cpu" else _GPU_ELEMENTS
        for chunk in (flat,) if flat.numel() <= chunk_size else flat.split(chunk_size):
            self._add_chunk(chunk)

    def _add_chunk(self, chunk: Tensor) -> None:
        if not chunk.numel():
            return
        if self.histogram is None and (quick := _quick_moments(chunk)) is not None:
            self._add_moments(chunk.numel(), *quick)
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
        if math.isfinite(mean) and math.isfinite(squares):
            self._add_moments(count, low, high, mean, squares)
        else:  # squares that are too large for float64
            values = _wide(chunk)
            values, shift = values[values.isfinite()], _SHIFTS[values.dtype]
            scaled = values * 2.0**-shift
            self._add_moments(count, low, high, *_moments(scaled, scaled.clone())[2:], shift)
        if self.histogram is not None:
            self.histogram.add(values)

    def _add_moments(self, count: int, low: float, high: float, mean: float, squares: float, shift: int = 0) -> None:
        """Add elements by their moments; mean and squares are those of the elements divided by `2 ** shift`."""
        if count:
            self._add_range(count, low, high)
            self._add_sums(count, mean, squares, shift)

    def _add_sums(self, count: int, mean: float, squares: float, shift: int = 0) -> None:
        # In this order, and after the count, `squares` is never negative, also if a signal interrupts it.
        mantissa, exponent = split_float(mean)
        self.power.add(mantissa * mantissa * count, 2 * (exponent + shift))
        deviations, at = split_float(squares)
        self.power.add(deviations, at + 2 * shift)
        self.total.add(mantissa * count, exponent + shift)

    def _add_range(self, count: int, low: float, high: float) -> None:
        # The sum with 0.0 is 0.0 also for -0.0, so that the order of zeros does not matter.
        self.min = low + 0.0 if self.min is None else min(self.min, low + 0.0)
        self.max = high + 0.0 if self.max is None else max(self.max, high + 0.0)
        self.count += count

    def merge(self, other: Stats) -> None:
        """Add the elements of other statistics."""
        self.nonfinite += other.nonfinite
        if other.min is not None and other.max is not None:
            self._add_range(other.count, other.min, other.max)
            self.power.add(other.power.mantissa, other.power.exponent)
            self.total.add(other.total.mantissa, other.total.exponent)
        if self.histogram is not None and other.histogram is not None:
            self.histogram.merge(other.histogram)

    def new(self) -> Stats:
        """Return empty statistics with the same edges of the histogram."""
        return Stats(histogram=self.histogram and self.histogram.new())

    def as_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can represent."""
        data = {name: getattr(self, name) for name in ("count", "nonfinite", "mean", "squares", "min", "max")}
        data |= {"total": repr(self.total), "power": repr(self.power)}
        return data | ({} if self.histogram is None else {"histogram": dict(vars(self.histogram))})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build statistics from `as_dict`; of an older microtome, from the mean and the squares."""
        mean, squares = data["mean"], data["squares"]
        rest = {name: value for name, value in data.items() if name not in ("mean", "squares", "histogram")}
        histogram = data.get("histogram")
        if histogram is not None and histogram["bins"] != len(histogram["counts"]):  # else it takes memory for all bins
            bins, counts = histogram["bins"], len(histogram["counts"])
            raise ValueError(f"expected a count for each of {bins!r:.80} bins, got {counts}")
        stats = cls(**rest, histogram=None if histogram is None else Histogram(**histogram))
        if "total" in data:
            stats.total, stats.power = ExactSum.parse(data["total"]), ExactSum.parse(data["power"])
        elif mean is not None:
            stats._add_sums(stats.count, mean, squares)
        return stats


def _wide(chunk: Tensor) -> Tensor:
    """Convert a chunk to float64, on the CPU in a buffer that the next overwrites: new pages cost more than sums."""
    if chunk.device.type != "cpu":
        return chunk.to(backend_of(chunk.device).widest_float, copy=True)
    if not hasattr(_scratch, "values"):
        with torch.inference_mode(False):  # else it could not be written outside inference mode
            _scratch.values = torch.empty(_CPU_ELEMENTS, dtype=torch.float64, device="cpu")
    values: Tensor = _scratch.values
    return (values if chunk.numel() == _CPU_ELEMENTS else values[: chunk.numel()]).copy_(chunk)


def _moments(chunk: Tensor, values: Tensor) -> tuple[float, float, float, float]:
    """Return minimum, maximum, mean and the sum of squared deviations; may overwrite the values, not the chunk."""
    narrow = chunk if chunk.dtype in _ORDERED else values
    low, high = float(narrow.amin().item()), float(narrow.amax().item())
    total, squares = values.sum().item(), _square(torch.linalg.vector_norm(values).item())
    mean = total / values.numel()
    about_mean = squares - total * mean
    if about_mean < 1e-3 * squares:  # the difference has lost digits: subtract the mean first
        about_mean = _square(torch.linalg.vector_norm(values.sub_(mean)).item())
    return low, high, mean, about_mean


def _square(number: float) -> float:
    return number * number  # `**` raises an error if it overflows


def _quick_moments(chunk: Tensor) -> tuple[float, float, float, float] | None:
    """Return the same for many float32 elements, summed in float32; None if that would lose digits or overflow."""
    if chunk.dtype is not torch.float32 or chunk.numel() < _QUICK_ELEMENTS:
        return None
    low, high = chunk.amin().item(), chunk.amax().item()
    total, squares = chunk.sum().item(), torch.linalg.vector_norm(chunk).item() ** 2
    mean = total / chunk.numel()
    about_mean = squares - total * mean
    if 1e-24 < squares < 1e36 and about_mean > 0.1 * squares:
        return low, high, mean, about_mean
    return None

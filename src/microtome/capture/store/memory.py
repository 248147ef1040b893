"""Keep recorded tensors in bounded memory."""

from __future__ import annotations

import mmap
from collections import OrderedDict, deque

import torch
from torch import Tensor

from microtome.capture.store.base import (
    OVERHEAD_BYTES,
    Keep,
    RunEntry,
    TensorStore,
    check_limit,
    must_copy,
    to_contiguous,
)
from microtome.capture.store.series import Series, in_memory
from microtome.capture.store.stats import Stats

#: Copies of tensors of at least this size are pooled, in pools of 1/32 of the limit.
_MIN_POOLED_BYTES = 16 * 1024
_POOLS = 32


class MemoryStore(TensorStore):
    """A ring buffer of tensors by name: the oldest are dropped when the limit is reached.

    Statistics cover all tensors, including dropped ones. They are computed when a tensor is dropped or when they are
    requested, so that keeping a tensor costs nothing: do not mutate tensors of a `series` before that.

    Args:
        limit_bytes: The maximum memory of all tensors, with 1 KiB each beside their values. A single tensor may take
            that 1 KiB above the limit.
        last: The maximum number of tensors of one name.
        keep: "all", or "stats" to keep no tensors.
        histogram: `(bins, low, high)`, for a histogram of each name.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        last: int | None = None,
        keep: Keep = "all",
        histogram: tuple[int, float, float] | None = None,
    ) -> None:
        super().__init__(keep, limit_bytes, histogram, last=last)
        self._last = last
        self._tensors: OrderedDict[int, tuple[str, Tensor, int | None]] = OrderedDict()
        self._numbers: dict[str, deque[int]] = {}
        self._next_number = 0
        self._counts: dict[str, int] = {}  # of the tensors of runs that ended
        self._stats: dict[str, Stats] = {}
        self._last_in_stats: dict[str, int] = {}
        self._pools: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._counts)

    def add(self, name: str, tensor: Tensor, *, borrowed: bool = False, run: int | None = None) -> None:
        """Add a tensor; a borrowed one is copied."""
        with self._lock:
            if self._keep == "all":
                tensor = self._own(tensor, borrowed=borrowed)
                self._free_memory(name, tensor.nbytes)
            if name not in self._numbers:
                self._numbers[name] = deque()
                self._stats[name] = self._empty_stats.new()
                self._last_in_stats[name] = -1
            entry = self._entry(name, run)
            if self._keep == "all":
                self._tensors[self._next_number] = name, tensor, run
                self._numbers[name].append(self._next_number)
                self._next_number += 1
                self.nbytes += tensor.nbytes
            else:
                (self._stats[name] if entry is None else entry.stats).add(tensor)
            if entry is None:
                self._count(name, 1)
            else:
                entry.given += 1

    def _count(self, name: str, given: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + given
        self.count += given

    def _count_run(self, entries: dict[str, RunEntry]) -> None:
        for name, entry in entries.items():
            self._count(name, entry.given)
            self.dropped += entry.dropped
            self._stats[name].merge(entry.stats)

    def _discard_run(self, run: int, entries: dict[str, RunEntry]) -> None:
        for number in [number for number, (*_, made_by) in self._tensors.items() if made_by == run]:
            name, tensor, _ = self._tensors.pop(number)
            self._numbers[name].remove(number)
            self.nbytes -= tensor.nbytes

    def _own(self, tensor: Tensor, *, borrowed: bool) -> Tensor:
        """Return a contiguous tensor in memory of the store, copied only if necessary."""
        if borrowed and self._can_pool(tensor):
            return self._copy_to_pool(tensor)
        contiguous = to_contiguous(tensor)
        return contiguous.clone() if must_copy(contiguous, tensor, borrowed=borrowed) else contiguous

    def _can_pool(self, tensor: Tensor) -> bool:
        if self._limit_bytes is None or not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return False
        fits = _MIN_POOLED_BYTES <= tensor.nbytes <= self._limit_bytes // _POOLS
        return fits and tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()

    def _copy_to_pool(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to memory shared with others of its shape and dtype.

        Separate copies would be scattered among the model's own tensors, which are freed, and the C library cannot
        reuse the holes: the process would take twice the memory of the copies, as with a list of clones.
        """
        assert self._limit_bytes is not None
        pool = self._pools.setdefault((tensor.shape, tensor.dtype), [])
        if not pool:
            count = self._limit_bytes // _POOLS // tensor.nbytes
            pages = mmap.mmap(-1, count * tensor.nbytes)
            pool += torch.frombuffer(pages, dtype=tensor.dtype).view(count, *tensor.shape).unbind(0)
        return pool.pop().copy_(tensor)

    def _free_memory(self, name: str, nbytes: int) -> None:
        """Drop tensors until another one fits."""
        check_limit(name, nbytes, self._limit_bytes)
        numbers = self._numbers.get(name, deque())
        while self._last is not None and len(numbers) >= self._last:
            self._drop(numbers[0])
        needed = nbytes + OVERHEAD_BYTES
        while self._limit_bytes is not None and self._tensors and self._used_bytes + needed > self._limit_bytes:
            self._drop(next(iter(self._tensors)))

    @property
    def _used_bytes(self) -> int:
        # A pool is freed with the last of its tensors, so one may hold dropped ones.
        pooled = self._limit_bytes // _POOLS if self._pools and self._limit_bytes is not None else 0
        return self.nbytes + OVERHEAD_BYTES * len(self._tensors) + pooled

    def _drop(self, number: int) -> None:
        name, tensor, run = self._tensors[number]
        self._add_to_stats(number)
        del self._tensors[number]
        oldest = self._numbers[name].popleft()
        assert oldest == number
        self.nbytes -= tensor.nbytes
        if (entry := self._entry(name, run)) is None:
            self.dropped += 1
        else:
            entry.dropped += 1

    def _add_to_stats(self, number: int) -> None:
        name, tensor, run = self._tensors[number]
        if number > self._last_in_stats[name]:
            entry = self._entry(name, run)
            (self._stats[name] if entry is None else entry.stats).add(tensor)
            self._last_in_stats[name] = number

    def series(self, name: str) -> Series:
        with self._lock:
            self._check_name(name)
            tensors = (self._tensors[number] for number in self._numbers[name])
            return Series(name, [in_memory(tensor, run) for _, tensor, run in tensors if run not in self._open])

    def stats(self, name: str) -> Stats:
        with self._lock:
            self._check_name(name)
            for number in self._numbers[name]:
                self._add_to_stats(number)
            result = self._stats[name].new()
            result.merge(self._stats[name])
            return result

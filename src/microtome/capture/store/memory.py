"""Tensors kept in memory, up to a bound."""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict, deque
from typing import Literal

import torch
from torch import Tensor

from microtome.capture.store.checks import BESIDE_BYTES, check_limits, owned
from microtome.capture.store.series import InMemory, Series
from microtome.capture.store.stats import Histogram, Stats
from microtome.errors import BadQuery, NoMatch
from microtome.units import size

#: Copies of tensors from so many bytes on are laid beside each other, a part of the limit at a time.
_SMALL = 16 * 1024
_PART = 32


class MemoryStore:
    """A ring of tensors by name: the oldest go when there is no room.

    Statistics are of all tensors that were given, those dropped too. They are taken when a tensor goes or when they
    are asked for, so that what is only kept costs nothing: do not change in place what `series` gave before that.

    Args:
        limit_bytes: The most memory that all tensors together take, at any time, with 1 KiB each beside their values.
            One alone may take that beside the limit.
        last: The most tensors of one name.
        keep: "all", or "stats" to keep no tensors.
        histogram: `(bins, low, high)`, where one is wanted of each name.

    Attributes:
        count: How many tensors were given.
        dropped: How many of them went again to make room.
        nbytes: Of the values of those still here.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        last: int | None = None,
        keep: Literal["all", "stats"] = "all",
        histogram: tuple[int, float, float] | None = None,
    ) -> None:
        check_limits(keep, limit_bytes=limit_bytes, last=last)
        self.limit_bytes = limit_bytes
        self.last = last
        self.keep = keep
        self.count = self.dropped = self.nbytes = 0
        self._no_stats = Stats(histogram=None if histogram is None else Histogram(*histogram))
        self._held: OrderedDict[int, tuple[str, Tensor, int | None]] = OrderedDict()
        self._numbers: dict[str, deque[int]] = {}
        self._stats: dict[str, Stats] = {}
        self._summed: dict[str, int] = {}
        self._rooms: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self._lock = threading.RLock()

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    def add(self, name: str, tensor: Tensor, *, borrowed: bool = False, run: int | None = None) -> None:
        """Take a tensor.

        Args:
            borrowed: It is somebody else's and is copied; else it belongs to the store from now on.
            run: The number of the run that it is of.
        """
        with self._lock:
            if self.keep == "all":
                tensor = (
                    self._copy(tensor) if borrowed and self._has_rooms(tensor) else owned(tensor, borrowed=borrowed)
                )
                self._make_room(name, tensor.nbytes)
            if name not in self._numbers:
                self._numbers[name] = deque()
                self._stats[name] = self._no_stats.new()
                self._summed[name] = -1
            if self.keep == "all":
                self._held[self.count] = name, tensor, run
                self._numbers[name].append(self.count)
                self.nbytes += tensor.nbytes
            else:
                self._stats[name].add(tensor)
            self.count += 1

    def _has_rooms(self, tensor: Tensor) -> bool:
        if self.limit_bytes is None or not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return False
        several = _SMALL <= tensor.nbytes <= self.limit_bytes // _PART
        return several and tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()

    def _copy(self, tensor: Tensor) -> Tensor:
        """A copy that lies beside others of its kind.

        One by one, they would lie between the model's own tensors, which come and go, and the C library finds no use
        for the holes in between: the process took twice what is kept, and a list of clones does.
        """
        assert self.limit_bytes is not None
        rooms = self._rooms.setdefault((tensor.shape, tensor.dtype), [])
        if not rooms:
            count = self.limit_bytes // _PART // tensor.nbytes
            pages = mmap.mmap(-1, count * tensor.nbytes)
            rooms += torch.frombuffer(pages, dtype=tensor.dtype).view(count, *tensor.shape).unbind(0)
        return rooms.pop().copy_(tensor)

    def _make_room(self, name: str, nbytes: int) -> None:
        if self.limit_bytes is not None and nbytes > self.limit_bytes:
            raise BadQuery(
                f"a tensor of {name!r} holds {size(nbytes)}, more than the limit of {size(self.limit_bytes)} for all; "
                f"raise the limit, or reduce what is recorded"
            )
        numbers = self._numbers.get(name, deque())
        while self.last is not None and len(numbers) >= self.last:
            self._drop(numbers[0])
        while self.limit_bytes is not None and self._held and self._taken + nbytes + BESIDE_BYTES > self.limit_bytes:
            self._drop(next(iter(self._held)))

    @property
    def _taken(self) -> int:
        beside = self.limit_bytes // _PART if self._rooms and self.limit_bytes is not None else 0  # dropped among kept
        return self.nbytes + BESIDE_BYTES * len(self._held) + beside

    def _drop(self, number: int) -> None:
        name, tensor, _ = self._held.pop(number)
        oldest = self._numbers[name].popleft()
        assert oldest == number
        self._sum(name, number, tensor)
        self.nbytes -= tensor.nbytes
        self.dropped += 1

    def _sum(self, name: str, number: int, tensor: Tensor) -> None:
        if number > self._summed[name]:
            self._stats[name].add(tensor)
            self._summed[name] = number

    def series(self, name: str) -> Series:
        """The tensors of a name that are here now, the oldest first."""
        with self._lock:
            self._check(name)
            return Series(name, [InMemory(*self._held[number][1:]) for number in self._numbers[name]])

    def stats(self, name: str) -> Stats:
        """Of all elements of all tensors of the name that were given so far."""
        with self._lock:
            self._check(name)
            for number in self._numbers[name]:
                self._sum(name, number, self._held[number][1])
            result = self._stats[name].new()
            result.merge(self._stats[name])
            return result

    def close(self) -> None:
        """Nothing to do: what is here stays."""

    def _check(self, name: str) -> None:
        if name not in self._numbers:
            raise NoMatch(f"nothing was recorded as {name!r}; there is {', '.join(map(repr, self.names)) or 'nothing'}")

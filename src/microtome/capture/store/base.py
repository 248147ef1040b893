"""The interface of stores, and copies of tensors whose memory is not theirs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from microtome.addresses import Addresses
from microtome.capture.store.series import Series
from microtome.capture.store.stats import Histogram, Stats
from microtome.engine.torch_internals import storage_id
from microtome.errors import BadQuery, NoMatch
from microtome.units import size

#: The memory of a tensor beside its values: the object, its storage, its entry in a store. About 820 bytes were
#: measured for any shape; without them, millions of scalars would take hundreds of times the limit.
OVERHEAD_BYTES = 1024

Keep = Literal["all", "stats"]


@dataclass
class RunEntry:
    """The tensors of one name that an open run of the model added.

    Attributes:
        stats: Statistics of them.
        given: The number of them.
        dropped: The number of them not kept because of the limit.
    """

    stats: Stats
    given: int = 0
    dropped: int = 0


class TensorStore:
    """Stores tensors by name, with statistics of all that were added.

    Args:
        keep: "all", or "stats" to keep no tensors.
        limit_bytes: The maximum bytes to keep.
        histogram: `(bins, low, high)`, for a histogram of each name.
        limits: Further limits to check, by name.

    Attributes:
        count: The number of tensors added.
        dropped: The number of tensors not kept because of the limit.
        nbytes: The bytes of the values of tensors that are kept.
        next_run: The number of the next run.
    """

    def __init__(
        self,
        keep: Keep,
        limit_bytes: int | None,
        histogram: tuple[int, float, float] | None,
        **limits: int | None,
    ) -> None:
        if keep not in ("all", "stats"):
            raise BadQuery(f"expected keep to be 'all' or 'stats', got {keep!r}")
        for name, limit in {"limit_bytes": limit_bytes, **limits}.items():
            if limit is not None and limit < 1:
                raise BadQuery(f"expected {name} to be at least 1, or None for no limit, got {limit}")
        self.count = self.dropped = self.nbytes = self.next_run = 0
        self._keep = keep
        self._limit_bytes = limit_bytes
        self._empty_stats = Stats(histogram=None if histogram is None else Histogram(*histogram))
        self._lock = threading.RLock()
        self._open: dict[int, dict[str, RunEntry]] = {}  # of each open run, by name

    def add(self, name: str, tensor: Tensor, *, borrowed: bool = False, run: int | None = None) -> None:
        """Add a tensor.

        Args:
            borrowed: Whether the caller may write to the tensor after this returns; otherwise it belongs to the store.
            run: The number of the run that made it. Of a run that was begun and not ended, it is not counted yet.
        """
        raise NotImplementedError

    def discard_empty(self) -> None:
        """Remove what a store without tensors leaves behind."""

    def begin_run(self, run: int | None = None) -> None:
        """Begin a run of the model; the tensors of one with a number become visible when it ends."""
        with self._lock:
            if run is not None:
                self._open[run] = {}

    def end_run(self, run: int | None = None, *, complete: bool = True) -> None:
        """End a run of the model.

        Args:
            complete: Count its tensors. Otherwise they are discarded: an exception ended it.
        """
        with self._lock:
            if run is not None and (entries := self._open.pop(run, None)):
                if complete:
                    self._count_run(entries)
                else:
                    self._discard_run(run, entries)

    def _count_run(self, entries: dict[str, RunEntry]) -> None:
        """Count the tensors of a run that ended."""
        raise NotImplementedError

    def _discard_run(self, run: int, entries: dict[str, RunEntry]) -> None:
        """Remove the tensors of a run that did not end."""
        raise NotImplementedError

    def _entry(self, name: str, run: int | None) -> RunEntry | None:
        """Return what an open run added of a name; None if the run is not open, so that tensors count at once."""
        entries = None if run is None else self._open.get(run)
        return None if entries is None else entries.setdefault(name, RunEntry(self._empty_stats.new()))

    @property
    def names(self) -> list[str]:
        raise NotImplementedError

    def series(self, name: str) -> Series:
        """Return the tensors of a name that are kept, the oldest first."""
        raise NotImplementedError

    def stats(self, name: str) -> Stats:
        """Return statistics of all tensors of a name so far."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop adding tensors; those in the store stay available."""

    def _check_name(self, name: str) -> None:
        if name not in self.names:
            names = ", ".join(map(repr, Addresses(self.names).names))
            raise NoMatch(f"nothing was recorded as {name!r}; there is {names or 'nothing'}")


def memory_bytes(tensor: Tensor) -> int:
    """Return the memory that a stored tensor takes."""
    return tensor.nbytes + OVERHEAD_BYTES


def to_contiguous(tensor: Tensor) -> Tensor:
    """Return a detached contiguous tensor, which shares memory if the tensor is contiguous already."""
    if tensor.layout is not torch.strided:
        raise BadQuery(f"expected a dense tensor, got layout {tensor.layout}: convert it with .to_dense()")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def check_limit(name: str, nbytes: int, limit_bytes: int | None) -> None:
    """Raise if a tensor never fits."""
    if limit_bytes is not None and nbytes > limit_bytes:
        raise BadQuery(
            f"a tensor of {name!r} has {size(nbytes)}, above the limit of {size(limit_bytes)} for all; raise the "
            "limit, or reduce the output"
        )


def must_copy(contiguous: Tensor, tensor: Tensor, *, borrowed: bool) -> bool:
    """Return whether `to_contiguous(tensor)` shares borrowed memory, or is a view that pins a larger storage."""
    if contiguous.untyped_storage().nbytes() > contiguous.nbytes:
        return True
    return borrowed and storage_id(contiguous) == storage_id(tensor)

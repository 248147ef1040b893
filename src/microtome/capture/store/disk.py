"""Tensors written to a folder as they come."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

from torch import Tensor

from microtome.capture.store.batch import Batch, ShardPart, ShardWriter, can_go_alone
from microtome.capture.store.checks import check_limits, cost, in_order, is_lent
from microtome.capture.store.folder import begin, claim, refusal
from microtome.capture.store.index import tensor_key
from microtome.capture.store.stats import Histogram, Stats
from microtome.capture.store.writer import Writer
from microtome.errors import BadFile, BadQuery, NoMatch, said
from microtome.files.tensors import CODES
from microtome.units import size

MIB = 2**20


class DiskStore:
    """Writes tensors to safetensors shards in a folder, from a thread of its own.

    What the index names is whole, and of whole runs: a process that is killed loses at most the run that it was in, the
    shard being written and what was queued.

    Args:
        folder: Made where it is not there.
        manifest: What the recording is of; JSON. `model` and `selectors` must be the same to append to it.
        append: Go on with the recording in the folder, if there is one. One that reached its limit takes nothing more
            but statistics.
        limit_bytes: The most bytes of tensors to write. Once the next does not fit, tensors only count in the
            statistics and in `dropped`.
        keep: "all", or "stats" to write no tensors.
        histogram: `(bins, low, high)`, where one is wanted of each name.
        shard_bytes: About how large a shard is.
        queue_bytes: The most that waits to be written; `add` waits when there is more. A larger tensor waits alone.
        sync: Have each shard reach the disk before the next, so that a power cut loses no more than a kill does.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        manifest: Mapping[str, Any],
        append: bool = False,
        limit_bytes: int | None = None,
        keep: Literal["all", "stats"] = "all",
        histogram: tuple[int, float, float] | None = None,
        shard_bytes: int = 64 * MIB,
        queue_bytes: int = 256 * MIB,
        sync: bool = False,
    ) -> None:
        check_limits(keep, limit_bytes=limit_bytes, shard_bytes=shard_bytes, queue_bytes=queue_bytes)
        self.folder = Path(folder)
        self._no_stats = Stats(histogram=None if histogram is None else Histogram(*histogram))
        self._keep, self._limit_bytes, self._queue_bytes = keep, limit_bytes, queue_bytes
        self._shard_bytes = min(shard_bytes, (queue_bytes + 1) // 2)  # else nothing is written while it fills
        self._lock = threading.RLock()
        self._file_lock = claim(self.folder)
        try:
            self._totals = begin(self.folder, manifest, self._no_stats, append=append, keep=keep, sync=sync)
            shelf = ShardWriter(self.folder, self._totals, sync=sync)
        except BaseException as error:
            self._file_lock.release()
            if isinstance(error, OSError):
                raise refusal(self.folder, error) from error
            raise
        self._kept = dict(self._totals.kept)
        self._count, self._dropped, self._nbytes = self._totals.count, self._totals.dropped, self._totals.nbytes
        self._names = dict.fromkeys(self._totals.stats)
        self._shelf = shelf
        self._writer: Writer[ShardPart | Batch] = Writer(shelf.write)
        self._batch = Batch(self._shard_bytes)
        self._full = self._closed = self._told = False
        self._runs_open = 0
        self._was_cut = False

    # -- writing -------------------------------------------------------------------------------------------------------

    def add(self, name: str, tensor: Tensor, *, borrowed: bool = False, run: int | None = None) -> None:
        """Take a tensor; waits while the queue is full.

        Args:
            borrowed: The tensor is somebody else's, who may write to it when this has returned; else it belongs to the
                store from now on. A large one is not copied: this waits until it is written, and takes the statistics
                meanwhile.
            run: The number of the run that it is of.
        """
        with self._lock:
            self._check_open()
            if self._keep == "all":
                self._check_dtype(name, tensor)
                ordered = in_order(tensor).cpu()
                lent = is_lent(ordered, tensor, borrowed=borrowed)
                self._full |= self._limit_bytes is not None and self._nbytes + ordered.nbytes > self._limit_bytes
            if self._keep == "all" and not self._full:
                self._write(name, ordered, run, lent=lent)
            else:
                self._count_in(name, tensor)
            if self._batch.is_complete and (not self._runs_open or self._batch.is_overdue):
                self._cut()

    @property
    def next_run(self) -> int:
        """The number of the first run of this recorder: those of runs that are there already are smaller."""
        return self._totals.next_run

    def begin_run(self) -> None:
        """Hold back from the index what is added until the run ends."""
        with self._lock:
            self._runs_open += 1

    def end_run(self) -> None:
        """Let the index name what was added since the run began."""
        with self._lock:
            self._runs_open -= 1
            if not self._runs_open and not self._closed and (self._was_cut or self._batch.is_complete):
                self._cut()

    def _write(self, name: str, tensor: Tensor, run: int | None, *, lent: bool) -> None:
        """Have a tensor written and count it; when this has returned, one that is lent is no longer needed."""
        if lent and not can_go_alone(tensor):
            tensor, lent = tensor.clone(), False
        number = self._kept.get(name, 0)
        if not self._batch.has_room(tensor_key(name, number), tensor):
            self._cut()
        self._make_room(tensor)
        if lent:
            self._writer.drain()  # what takes long comes first, so that an interrupt finds nothing half done
        self._batch.keep(name, number, tensor, self._no_stats, run)
        self._kept[name] = number + 1
        self._nbytes += tensor.nbytes
        if lent:
            part = self._batch.take_part()
            assert part is not None, "it can go alone"
            self._writer.put_here(part, partial(self._count_in, name, tensor))
            self._check_failed()
        else:
            self._count_in(name, tensor)
            if self._batch.has_part and (part := self._batch.take_part()) is not None:
                self._writer.put(part)

    def _count_in(self, name: str, tensor: Tensor) -> None:
        self._batch.count(name, tensor, self._no_stats, dropped=self._full)
        self._names[name] = None
        self._count += 1
        self._dropped += self._full

    def _check_dtype(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype not in CODES:
            raise BadQuery(
                f"a tensor of {name!r} is of {tensor.dtype}, which safetensors files cannot hold; "
                f"convert it, for instance with `reduce`"
            )

    def _make_room(self, tensor: Tensor) -> None:
        need = cost(tensor)
        if self.queued_bytes + need > self._queue_bytes:
            if self._batch.held_bytes + need > self._queue_bytes:
                self._cut()
            self._writer.wait_until(max(0, self._queue_bytes - need - self._batch.held_bytes))
            self._check_failed()

    def _cut(self) -> None:
        """Hand what was added since the last time to the thread."""
        if self._batch.pieces or self._was_cut:
            self._batch.full = self._full
            self._batch.ends_run = not self._runs_open
            self._was_cut = not self._batch.ends_run
            batch, self._batch = self._batch, Batch(self._shard_bytes)
            self._writer.put(batch)

    def flush(self) -> None:
        """Wait until everything that was added is written."""
        with self._lock:
            self._check_open()
            self._cut()
            self._writer.drain()
            self._check_failed()

    def close(self) -> None:
        """Write the rest and let go of the folder; a second time it does nothing."""
        with self._lock:
            forked = not self._writer.alive and self._writer.error is None
            if self._closed or forked:  # the folder is the other process's
                return
            self._runs_open = 0  # what a run gave before it was abandoned is kept
            self._cut()
            self._closed = True
            try:
                self._writer.stop()
            finally:  # also when it is interrupted
                self._shelf.close()
                self._file_lock.release()
            if not self._told:
                self._check_failed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BadQuery(f"the recording to {str(self.folder)!r} was closed; append=True goes on with it")
        self._check_failed()
        if not self._writer.alive:
            raise BadQuery(f"the recording to {str(self.folder)!r} was begun in another process: add to it there")

    def _check_failed(self) -> None:
        error = self._writer.error
        if error is not None:
            self._told = True
            cause = (error.strerror if isinstance(error, OSError) else None) or said(error)
            raise BadFile(
                f"cannot write to the recording {str(self.folder)!r}: {cause}; {self.written} records "
                f"({size(self._totals.nbytes)}) are safely written and can be read, later ones are lost"
            ) from error

    # -- how it stands -------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        with self._lock:
            return list(self._names)

    def stats(self, name: str) -> Stats:
        """Of all elements of all tensors of the name, also from before it was appended to; waits as `flush` does.

        Where writing has failed, of those that are safely written.
        """
        with self._lock:
            if name not in self.names:
                raise NoMatch(
                    f"nothing was recorded as {name!r}; there is {', '.join(map(repr, self.names)) or 'nothing'}"
                )
            if not self._closed:
                self._cut()
                self._writer.drain()
            result = self._no_stats.new()
            result.merge(self._totals.stats.get(name, result))
            return result

    @property
    def count(self) -> int:
        """How many tensors were given, kept or not."""
        return self._count

    @property
    def dropped(self) -> int:
        """How many of them were not kept because of the limit."""
        return self._dropped

    @property
    def nbytes(self) -> int:
        """Of the tensors kept, written or not yet."""
        return self._nbytes

    @property
    def written(self) -> int:
        """How many tensors the index names."""
        return self._totals.written

    @property
    def queued_bytes(self) -> int:
        """What waits to be written."""
        return self._batch.held_bytes + self._writer.pending_bytes

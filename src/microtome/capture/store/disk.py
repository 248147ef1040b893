"""Write tensors to a folder while they are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from microtome.capture.store.base import (
    Keep,
    RunEntry,
    TensorStore,
    check_limit,
    memory_bytes,
    must_copy,
    to_contiguous,
)
from microtome.capture.store.batch import Batch, ShardWriter, can_be_own_part
from microtome.capture.store.folder import LOCK, MANIFEST, claim, open_recording, record_error
from microtome.capture.store.index import INDEX, tensor_key
from microtome.capture.store.recording import Recording, open_folder
from microtome.capture.store.series import Series
from microtome.capture.store.stats import Stats
from microtome.capture.store.writer import WriterThread
from microtome.errors import BadFile, BadQuery, describe_error
from microtome.files.tensors import DTYPE_CODES
from microtome.units import size

MIB = 2**20


class DiskStore(TensorStore):
    """Writes tensors to safetensors shards in a folder, from a background thread.

    The index names complete shards of complete runs: a killed process loses at most the open run, the shard being
    written and the queue.

    Args:
        folder: Created if it does not exist.
        manifest: A JSON description of the recording. `model` and `selectors` must be equal to append to it.
        append: Continue the recording in the folder, if there is one. One that reached its limit accepts statistics
            only.
        limit_bytes: The maximum bytes of tensors to write. Once the next does not fit, tensors count only in the
            statistics and in `dropped`.
        keep: "all", or "stats" to write no tensors.
        histogram: `(bins, low, high)`, for a histogram of each name.
        shard_bytes: The approximate size of a shard.
        queue_bytes: The maximum bytes that wait to be written; `add` blocks above it. A larger tensor waits alone.
        sync: Flush each shard to the disk before the next, so that a power failure loses no more than a kill.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        manifest: Mapping[str, Any],
        append: bool = False,
        limit_bytes: int | None = None,
        keep: Keep = "all",
        histogram: tuple[int, float, float] | None = None,
        shard_bytes: int = 64 * MIB,
        queue_bytes: int = 256 * MIB,
        sync: bool = False,
    ) -> None:
        super().__init__(keep, limit_bytes, histogram, shard_bytes=shard_bytes, queue_bytes=queue_bytes)
        self.folder = Path(folder)
        self._queue_bytes = queue_bytes
        self._shard_bytes = min(shard_bytes, (queue_bytes + 1) // 2)  # else nothing would be written while it fills
        self._is_new = not self.folder.exists()
        self._file_lock = claim(self.folder)
        try:
            self._totals = open_recording(self.folder, manifest, self._empty_stats, append=append, keep=keep, sync=sync)
            self._shard_writer = ShardWriter(self.folder, self._totals, sync=sync)
        except BaseException as error:
            self._file_lock.release()
            if isinstance(error, OSError):
                raise record_error(self.folder, error) from error
            raise
        self._counts = dict(self._totals.counts)  # of written tensors, by name
        self.count, self.dropped, self.nbytes = self._totals.count, self._totals.dropped, self._totals.nbytes
        self.next_run = self._totals.next_run
        self._names = dict.fromkeys(self._totals.stats)
        self._writer = WriterThread(self._shard_writer.write)
        self._batch = Batch(self._shard_bytes)
        self._full = self._closed = self._is_error_raised = False
        self._open_runs = 0
        self._run_spans_batches = False
        self._recording: Recording | None = None

    # -- writing -------------------------------------------------------------------------------------------------------

    def add(self, name: str, tensor: Tensor, *, borrowed: bool = False, run: int | None = None) -> None:
        """Add a tensor; blocks while the queue is full.

        A large borrowed tensor is not copied: it is written before this returns.
        """
        with self._lock:
            self._check_open()
            if self._keep == "all":
                self._check_dtype(name, tensor)
                contiguous = to_contiguous(tensor).cpu()
                check_limit(name, contiguous.nbytes, self._limit_bytes)
                borrowed = must_copy(contiguous, tensor, borrowed=borrowed)
                self._full |= self._limit_bytes is not None and self.nbytes + contiguous.nbytes > self._limit_bytes
            if self._keep == "all" and not self._full:
                self._write(name, contiguous, run, borrowed=borrowed)
            else:
                self._count(name, tensor, run)
            if self._batch.is_complete and (not self._open_runs or self._batch.is_overdue):
                self._submit_batch()

    def begin_run(self, run: int | None = None) -> None:
        """Defer the index lines of added tensors until the run ends."""
        with self._lock:
            super().begin_run(run)
            self._open_runs += 1

    def end_run(self, run: int | None = None, *, complete: bool = True) -> None:
        """Write the index lines of tensors added since the run began."""
        with self._lock:
            super().end_run(run, complete=complete)
            self._open_runs -= 1
            if not self._open_runs and not self._closed and (self._run_spans_batches or self._batch.is_complete):
                self._submit_batch()

    def _count_run(self, entries: dict[str, RunEntry]) -> None:
        for name, entry in entries.items():
            self._batch.count_run(name, entry)
            self._add_to_totals(name, entry.given, entry.dropped)

    def _discard_run(self, run: int, entries: dict[str, RunEntry]) -> None:
        self._batch.discarded.append(run)  # some of its tensors may be in a shard

    def _write(self, name: str, tensor: Tensor, run: int | None, *, borrowed: bool) -> None:
        """Submit a tensor for writing and count it; a borrowed one is not used after this returns."""
        if borrowed and not can_be_own_part(tensor):
            tensor, borrowed = tensor.clone(), False
        number = self._counts.get(name, 0)
        if not self._batch.fits_header(tensor_key(name, number), tensor):
            self._submit_batch()
        self._wait_for_space(tensor)
        if borrowed:
            self._writer.drain()  # first, so that an interrupt while waiting leaves nothing half done
        self._batch.add(name, number, tensor, self._empty_stats, run)
        self._counts[name] = number + 1
        self.nbytes += tensor.nbytes
        if borrowed:
            part = self._batch.pop_part()
            assert part is not None, "it can be a part of its own"
            self._writer.put_here(part, partial(self._count, name, tensor, run))
            self._check_failed()
        else:
            self._count(name, tensor, run)
            if self._batch.has_part and (part := self._batch.pop_part()) is not None:
                self._writer.put(part)

    def _count(self, name: str, tensor: Tensor, run: int | None) -> None:
        entry = self._entry(name, run) or RunEntry(self._empty_stats.new())
        entry.stats.add(tensor)
        entry.given += 1
        entry.dropped += self._full
        self._batch.added_bytes += tensor.nbytes
        if run not in self._open:
            self._count_run({name: entry})

    def _add_to_totals(self, name: str, given: int, dropped: int) -> None:
        self._names[name] = None
        self.count += given
        self.dropped += dropped

    def _check_dtype(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype not in DTYPE_CODES:
            raise BadQuery(
                f"a tensor of {name!r} has dtype {tensor.dtype}, which safetensors files do not support; "
                f"convert it, for instance with `reduce`"
            )

    def _wait_for_space(self, tensor: Tensor) -> None:
        needed = memory_bytes(tensor)
        if self.queued_bytes + needed > self._queue_bytes:
            if self._batch.buffered_bytes + needed > self._queue_bytes:
                self._submit_batch()
            self._writer.wait_until(max(0, self._queue_bytes - needed - self._batch.buffered_bytes))
            self._check_failed()

    def _submit_batch(self) -> None:
        """Queue the batch for the thread, and begin another."""
        if self._batch.pieces or self._batch.discarded or self._run_spans_batches:
            self._batch.full = self._full
            self._batch.ends_run = not self._open_runs
            self._run_spans_batches = not self._batch.ends_run
            batch, self._batch = self._batch, Batch(self._shard_bytes)
            self._writer.put(batch)

    def flush(self) -> None:
        """Wait until all added tensors are written."""
        with self._lock:
            self._check_open()
            self._submit_batch()
            self._writer.drain()
            self._check_failed()

    def close(self) -> None:
        """Write the rest and unlock the folder; a no-op if closed already."""
        with self._lock:
            forked = not self._writer.alive and self._writer.error is None
            if self._closed or forked:  # the folder belongs to the parent process
                return
            for run in list(self._open):  # the block ended inside it
                super().end_run(run, complete=False)
            self._open_runs = 0
            self._submit_batch()
            self._closed = True
            self._recording = None  # a snapshot of the folder before the last batches
            try:
                self._writer.stop()
            finally:  # even if interrupted
                self._shard_writer.close()
                self._file_lock.release()
            if not self._is_error_raised:
                self._check_failed()

    def discard_empty(self) -> None:
        """After `close`, remove the folder if this store created it and nothing was added."""
        if self._is_new and not self.count and self._closed:
            with suppress(OSError):  # such as a file of others
                shards = [file.name for file in self.folder.glob("shard-*.safetensors")]  # of runs that did not end
                for name in (MANIFEST, INDEX, LOCK, *shards):
                    (self.folder / name).unlink(missing_ok=True)
                self.folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BadQuery(f"the recording to {str(self.folder)!r} was closed; append=True continues it")
        self._check_failed()
        if not self._writer.alive:
            raise BadQuery(f"the recording to {str(self.folder)!r} was begun in another process: add to it there")

    def _check_failed(self) -> None:
        error = self._writer.error
        if error is not None:
            self._is_error_raised = True
            cause = (error.strerror if isinstance(error, OSError) else None) or describe_error(error)
            raise BadFile(
                f"cannot write to the recording {str(self.folder)!r}: {cause}; {self.written} records "
                f"({size(self._totals.nbytes)}) are safely written and can be read, later ones are lost"
            ) from error

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        with self._lock:
            return list(self._names)

    def series(self, name: str) -> Series:
        """Return the tensors of a name in the folder; waits as `flush` does."""
        with self._lock:
            self._check_name(name)
            if self._recording is None or not self._closed:
                if not self._closed:
                    self.flush()
                self._recording = open_folder(self.folder)
            return self._recording.series(name)

    def stats(self, name: str) -> Stats:
        """Return statistics of all tensors of a name, including those in the folder before; waits as `flush` does.

        If writing has failed, those of the tensors that are safely written.
        """
        with self._lock:
            self._check_name(name)
            if not self._closed:
                self._submit_batch()
                self._writer.drain()
            result = self._empty_stats.new()
            result.merge(self._totals.stats.get(name, result))
            return result

    @property
    def written(self) -> int:
        """The number of tensors in the index."""
        return self._totals.written

    @property
    def queued_bytes(self) -> int:
        """The memory of tensors that wait to be written."""
        return self._batch.buffered_bytes + self._writer.pending_bytes

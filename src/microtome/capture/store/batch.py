"""Collect tensors in batches, and write each batch as a shard and a line of the index."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from microtome.capture.store.base import OVERHEAD_BYTES, RunEntry, memory_bytes
from microtome.capture.store.index import INDEX, IndexLine, IndexTotals, SeriesEntry, append_lines, tensor_key
from microtome.capture.store.shard import OpenShard, header_bytes
from microtome.capture.store.stats import Stats
from microtome.files.tensors import DTYPE_CODES
from microtome.files.writing import open_for_writing

#: The maximum number of tensors in a shard: safetensors readers accept headers of up to 100 MB.
_MAX_TENSORS = 8192

#: The minimum size of a tensor that is written as a part of its own.
_OWN_PART_BYTES = 2**20

#: The size of a part. Smaller parts reuse the memory of written tensors sooner, which is much faster than new memory;
#: with larger parts the writing thread takes the interpreter lock less often.
_PART_BYTES = 16 * 2**20

#: The minimum space reserved for a header; with the length before it, whole pages.
_HEADER_SPACE = 16 * 2**10 - 8


def can_be_own_part(tensor: Tensor) -> bool:
    return tensor.nbytes >= _OWN_PART_BYTES and _keeps_alignment(tensor)


def _keeps_alignment(tensor: Tensor) -> bool:
    """Return whether a tensor of any dtype is aligned when written after this one."""
    return tensor.nbytes % 8 == 0


@dataclass
class ShardPart:
    """Tensors of a batch that are written before it is complete.

    Attributes:
        header_space: The bytes reserved for the header.
    """

    tensors: dict[str, Tensor]
    buffered_bytes: int
    header_space: int


class Batch:
    """The tensors added since the last shard.

    Args:
        shard_bytes: The approximate size of a shard.

    Attributes:
        tensors: The tensors that wait to be written.
        buffered_bytes: Their memory.
        added_bytes: The bytes of all tensors added, including those that were only counted.
        full: Whether the limit had been reached.
        ends_run: Whether no run of the model was open when it was completed.
        discarded: The numbers of the runs that did not end, whose tensors readers skip.
    """

    def __init__(self, shard_bytes: int) -> None:
        self.pieces: dict[str, SeriesEntry] = {}
        self.tensors: dict[str, Tensor] = {}
        self.buffered_bytes = self.added_bytes = 0
        self.full = False
        self.ends_run = True
        self.discarded: list[int] = []
        self._shard_bytes = shard_bytes
        self._count = self._value_bytes = self._header_bytes = 0
        self._header_space: int | None = None

    @property
    def is_complete(self) -> bool:
        return self.added_bytes >= self._shard_bytes or self._count >= _MAX_TENSORS

    @property
    def is_overdue(self) -> bool:
        """Whether to complete it inside a run rather than at its end."""
        return self.added_bytes >= 2 * self._shard_bytes or self._count >= _MAX_TENSORS

    @property
    def has_part(self) -> bool:
        """Whether enough tensors wait to write a part."""
        return self.buffered_bytes - OVERHEAD_BYTES * len(self.tensors) >= _PART_BYTES

    def fits_header(self, key: str, tensor: Tensor) -> bool:
        """Return whether the header has space for another tensor."""
        return self._header_space is None or self._header_bytes + header_bytes(key, tensor) <= self._header_space

    def count_run(self, name: str, entry: RunEntry) -> None:
        """Count the tensors of a name that a run added, to this batch or to those before."""
        piece = self._piece(name, entry.stats)
        piece.stats.merge(entry.stats)
        piece.given += entry.given
        piece.dropped += entry.dropped

    def add(self, name: str, number: int, tensor: Tensor, empty_stats: Stats, run: int | None = None) -> None:
        """Add the tensor of a run, with its number among those of its name, to be written."""
        piece, key = self._piece(name, empty_stats), tensor_key(name, number)
        if not piece.shapes:
            piece.first = number
        piece.truncate(number - piece.first)  # a signal may have interrupted the last addition
        piece.shapes.append(list(tensor.shape))
        piece.dtypes.append(DTYPE_CODES[tensor.dtype])
        piece.runs.append(run)
        self.tensors[key] = tensor
        self.buffered_bytes += memory_bytes(tensor)
        self._header_bytes += header_bytes(key, tensor)
        self._value_bytes += tensor.nbytes
        self._count += 1

    def _piece(self, name: str, empty_stats: Stats) -> SeriesEntry:
        if name not in self.pieces:
            self.pieces[name] = SeriesEntry(empty_stats.new())
        return self.pieces[name]

    def pop_part(self) -> ShardPart | None:
        """Remove and return the waiting tensors that can be written before the others."""
        ready = {key: tensor for key, tensor in self.tensors.items() if _keeps_alignment(tensor)}
        if not ready:
            return None
        if self._header_space is None:
            self._header_space = self._estimate_header_space()
        part = ShardPart(ready, sum(map(memory_bytes, ready.values())), self._header_space)
        self.tensors = {key: tensor for key, tensor in self.tensors.items() if key not in ready}
        self.buffered_bytes -= part.buffered_bytes
        return part

    def _estimate_header_space(self) -> int:
        """Estimate the header's size if the rest of the shard is similar, up to a 64th of the shard."""
        growth = min(self._shard_bytes / max(1, self._value_bytes), _MAX_TENSORS / self._count)
        estimate = min(int(1.25 * growth * self._header_bytes), self._shard_bytes // 64)
        pages = -(-(8 + max(_HEADER_SPACE, self._header_bytes, estimate)) // 4096)
        return 4096 * pages - 8


class ShardWriter:
    """Writes batches to a folder, each as a shard and then a line of the index.

    The lines of a run are deferred until it has ended, so that a killed process leaves complete runs.

    Args:
        totals: The totals of the recording, which are updated as batches are written.
        sync: Flush each shard to the disk before the next.
    """

    def __init__(self, folder: Path, totals: IndexTotals, *, sync: bool) -> None:
        self._folder = folder
        self._totals = totals
        self._sync = sync
        self._shard: OpenShard | None = None
        self._deferred: list[IndexLine] = []
        self._index = open_for_writing(folder / INDEX, os.O_WRONLY | os.O_APPEND)

    def write(self, item: ShardPart | Batch, on_io: Callable[[], None] = lambda: None) -> None:
        """Write a part, or the rest of a batch; `on_io` is called right before the system call that writes it."""
        try:
            if isinstance(item, ShardPart):
                self._open_shard(item.header_space).write(item.tensors, on_io)
            else:
                self._complete(item, on_io)
        except Exception:
            self._discard()
            raise

    def _open_shard(self, header_space: int | None = None) -> OpenShard:
        """Return the shard being written; create one if there is none."""
        self._shard = self._shard or OpenShard(self._folder / self._file, header_space)
        return self._shard

    @property
    def _file(self) -> str:
        # An existing file of this name was not yet in the index when its writer was killed.
        deferred = sum(line.file is not None for line in self._deferred)
        return f"shard-{self._totals.shards + deferred:05d}.safetensors"

    def _complete(self, batch: Batch, on_io: Callable[[], None]) -> None:
        line = IndexLine(None, 0, batch.full, batch.pieces, batch.ends_run, discarded=batch.discarded)
        if self._shard is not None or batch.tensors:
            line.file = self._file
            shard = self._open_shard()
            shard.write(batch.tensors, on_io)
            line.file_bytes, sums = shard.finish(sync=self._sync)
            line.add_sums(sums)
            self._shard = None
        else:
            for piece in line.pieces.values():
                piece.truncate(0)
        self._deferred.append(line)
        if line.ends_run:
            self._write_deferred()

    def _write_deferred(self) -> None:
        append_lines(self._index, self._deferred, sync=self._sync)
        for line in self._deferred:
            self._totals.add(line)
        self._deferred = []

    def _discard(self) -> None:
        if self._shard is not None:
            self._shard.discard()
            self._shard = None

    def close(self) -> None:
        self._discard()
        os.close(self._index)

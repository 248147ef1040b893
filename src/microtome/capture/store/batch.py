"""What becomes one shard and its line of the index."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from microtome.capture.store.checks import BESIDE_BYTES, cost
from microtome.capture.store.index import INDEX, IndexLine, IndexTotals, SeriesEntry, append_lines, tensor_key
from microtome.capture.store.shard import OpenShard, header_bytes, write_shard
from microtome.capture.store.stats import Stats
from microtome.files.tensors import CODES
from microtome.files.writing import open_own

#: The most tensors in a shard: readers of safetensors take headers of up to 100 MB.
_TENSORS = 8192

#: From how many bytes on a tensor is worth a part of its own.
_ALONE_BYTES = 2**20

#: How many bytes are written together. Fewer, and the memory of what was written is used again sooner, which is a
#: good deal faster than new memory; more, and the writing thread asks less often for the interpreter.
_PART_BYTES = 16 * 2**20

#: The least room that is left for a header, which with the number before it makes whole pages.
_ROOM_BYTES = 16 * 2**10 - 8


def can_go_alone(tensor: Tensor) -> bool:
    return tensor.nbytes >= _ALONE_BYTES and _can_go_first(tensor)


def _can_go_first(tensor: Tensor) -> bool:
    """Whether what is written after the tensor can begin at a multiple of its width."""
    return tensor.nbytes % 8 == 0


@dataclass
class ShardPart:
    """Tensors of a batch that are written before it is complete.

    Attributes:
        room: What is left for the header.
    """

    tensors: dict[str, Tensor]
    held_bytes: int
    room: int


class Batch:
    """What was added since the last shard.

    Args:
        shard_bytes: About how much it will be.

    Attributes:
        tensors: Those of them that wait to be written.
        held_bytes: What these take in memory.
        seen_bytes: Of all tensors, also those that were only counted.
        full: Whether the limit had been reached.
        ends_run: Whether no run of the model was under way when it was completed.
    """

    def __init__(self, shard_bytes: int) -> None:
        self.pieces: dict[str, SeriesEntry] = {}
        self.tensors: dict[str, Tensor] = {}
        self.held_bytes = self.seen_bytes = 0
        self.full = False
        self.ends_run = True
        self._shard_bytes = shard_bytes
        self._count = self._kept_bytes = self._header_bytes = 0
        self._room: int | None = None

    @property
    def is_complete(self) -> bool:
        return self.seen_bytes >= self._shard_bytes or self._count >= _TENSORS

    @property
    def is_overdue(self) -> bool:
        """Whether it is better completed inside a run than at its end."""
        return self.seen_bytes >= 2 * self._shard_bytes or self._count >= _TENSORS

    @property
    def has_part(self) -> bool:
        """Whether so much waits that it is better written now."""
        return self.held_bytes - BESIDE_BYTES * len(self.tensors) >= _PART_BYTES

    def has_room(self, key: str, tensor: Tensor) -> bool:
        """Whether the header has, for one more."""
        return self._room is None or self._header_bytes + header_bytes(key, tensor) <= self._room

    def count(self, name: str, tensor: Tensor, no_stats: Stats, *, dropped: bool) -> None:
        piece = self._piece(name, no_stats)
        piece.stats.add(tensor)
        piece.given += 1
        piece.dropped += dropped
        self.seen_bytes += tensor.nbytes

    def keep(self, name: str, number: int, tensor: Tensor, no_stats: Stats, run: int | None = None) -> None:
        """Have the tensor of a run written, as the one of this number among those of its name."""
        piece, key = self._piece(name, no_stats), tensor_key(name, number)
        if not piece.shapes:
            piece.first = number
        piece.shapes.append(list(tensor.shape))
        piece.dtypes.append(CODES[tensor.dtype])
        piece.runs.append(run)
        self.tensors[key] = tensor
        self.held_bytes += cost(tensor)
        self._header_bytes += header_bytes(key, tensor)
        self._kept_bytes += tensor.nbytes
        self._count += 1

    def _piece(self, name: str, no_stats: Stats) -> SeriesEntry:
        if name not in self.pieces:
            self.pieces[name] = SeriesEntry(no_stats.new())
        return self.pieces[name]

    def take_part(self) -> ShardPart | None:
        """What waits and can be written before the rest."""
        taken = {key: tensor for key, tensor in self.tensors.items() if _can_go_first(tensor)}
        if not taken:
            return None
        if self._room is None:
            self._room = self._room_needed()
        part = ShardPart(taken, sum(map(cost, taken.values())), self._room)
        self.tensors = {key: tensor for key, tensor in self.tensors.items() if key not in taken}
        self.held_bytes -= part.held_bytes
        return part

    def _room_needed(self) -> int:
        """For the header, if the rest of the shard is like what is here; not much of the shard, if that is little."""
        grows = min(self._shard_bytes / max(1, self._kept_bytes), _TENSORS / self._count)
        guess = min(int(1.25 * grows * self._header_bytes), self._shard_bytes // 64)
        pages = -(-(8 + max(_ROOM_BYTES, self._header_bytes, guess)) // 4096)
        return 4096 * pages - 8


class ShardWriter:
    """Writes batches to a folder, each as a shard and then a line of the index.

    The lines of a run are held back until it has ended, so that a process that is killed leaves whole runs.

    Args:
        totals: What is there already; kept up with what is written.
        sync: Have each reach the disk before the next is begun.
    """

    def __init__(self, folder: Path, totals: IndexTotals, *, sync: bool) -> None:
        self._folder = folder
        self._totals = totals
        self._sync = sync
        self._shard: OpenShard | None = None
        self._held_back: list[IndexLine] = []
        self._index = open_own(folder / INDEX, os.O_WRONLY | os.O_APPEND)

    def write(self, item: ShardPart | Batch, begun: Callable[[], None] = lambda: None) -> None:
        """Write a part, or the rest of a batch; `begun` is called when all that a part needs is left to the system."""
        try:
            if isinstance(item, ShardPart):
                if self._shard is None:
                    self._shard = OpenShard(self._folder / self._file, item.room)
                self._shard.write(item.tensors, begun)
            else:
                self._complete(item, begun)
        except Exception:
            self._discard()
            raise

    @property
    def _file(self) -> str:
        # A file of this name that is there was not yet in the index when its writer was killed.
        held_back = sum(line.file is not None for line in self._held_back)
        return f"shard-{self._totals.shards + held_back:05d}.safetensors"

    def _complete(self, batch: Batch, begun: Callable[[], None]) -> None:
        line = IndexLine(None, 0, batch.full, batch.pieces, batch.ends_run)
        if self._shard is not None:
            self._shard.write(batch.tensors, begun)
            line.file = self._file
            line.file_bytes, sums = self._shard.finish(sync=self._sync)
            line.add_sums(sums)
            self._shard = None
        elif batch.tensors:
            line.file = self._file
            line.file_bytes, sums = write_shard(self._folder / line.file, batch.tensors, sync=self._sync)
            line.add_sums(sums)
        self._held_back.append(line)
        if line.ends_run:
            self._release()

    def _release(self) -> None:
        """Add the lines that were held back to the index."""
        append_lines(self._index, self._held_back, sync=self._sync)
        for line in self._held_back:
            self._totals.add(line)
        self._held_back = []

    def _discard(self) -> None:
        if self._shard is not None:
            self._shard.discard()
            self._shard = None

    def close(self) -> None:
        self._discard()
        os.close(self._index)

"""What becomes one shard and its line of the index."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from microtome.capture.store.index import INDEX, Line, Piece, Totals, append_line
from microtome.capture.store.shard import CODES, write_shard
from microtome.capture.store.stats import Stats

#: What a tensor takes in memory beside its values, about; so that empty ones do not queue up without end.
_BESIDE_BYTES = 1024

#: The most tensors in a shard: readers of safetensors take headers of up to 100 MB.
_TENSORS = 8192


def tensor_key(name: str, number: int) -> str:
    """What a tensor is called in its shard."""
    return f"{name}:{number}"


class Batch:
    """What was added since the last shard.

    Attributes:
        held_bytes: What its tensors take in memory.
        seen_bytes: What the tensors take that were only counted, and the others.
    """

    def __init__(self) -> None:
        self.pieces: dict[str, Piece] = {}
        self.tensors: dict[str, Tensor] = {}
        self.held_bytes = self.seen_bytes = 0
        self.full = False

    @staticmethod
    def cost(tensor: Tensor) -> int:
        return tensor.nbytes + _BESIDE_BYTES

    @property
    def is_long(self) -> bool:
        return len(self.tensors) >= _TENSORS

    def count(self, name: str, tensor: Tensor, no_stats: Stats, *, dropped: bool) -> None:
        if name not in self.pieces:
            self.pieces[name] = Piece(no_stats.new())
        piece = self.pieces[name]
        piece.stats.add(tensor)
        piece.given += 1
        piece.dropped += dropped
        self.seen_bytes += tensor.nbytes

    def keep(self, name: str, number: int, tensor: Tensor) -> None:
        """Have the tensor written, as the one of this number among those of its name."""
        piece = self.pieces[name]
        if not piece.shapes:
            piece.first = number
        piece.shapes.append(list(tensor.shape))
        piece.dtypes.append(CODES[tensor.dtype])
        self.tensors[tensor_key(name, number)] = tensor
        self.held_bytes += self.cost(tensor)


class Shelf:
    """Writes batches to a folder, each as a shard and then a line that names it.

    Args:
        totals: What is there already; kept up with what is written.
        sync: Have each reach the disk before the next is begun.
    """

    def __init__(self, folder: Path, totals: Totals, *, sync: bool) -> None:
        self._folder = folder
        self._totals = totals
        self._sync = sync
        self._index = os.open(folder / INDEX, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, batch: Batch) -> None:
        file, file_bytes = None, 0
        if batch.tensors:
            # A file of this name that is there was not yet in the index when its writer was killed.
            file = f"shard-{self._totals.shards:05d}.safetensors"
            file_bytes = write_shard(self._folder / file, batch.tensors, sync=self._sync)
        line = Line(file, file_bytes, batch.full, batch.pieces)
        append_line(self._index, line, sync=self._sync)
        self._totals.add(line)

    def close(self) -> None:
        os.close(self._index)

"""Shards of a recording: safetensors files with checksums, written whole or part by part, read one tensor at a time."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from microtome.errors import BadFile, BadQuery
from microtome.files.reading import opened
from microtome.files.tensors import TensorPlace, bytes_of, head, places, read_header, read_values, resolve
from microtome.files.writing import Partial, write_all, write_whole


class ShardSums(NamedTuple):
    """The checksums of a shard: of the bytes before the values, and of each tensor's values by its key."""

    header: str
    tensors: dict[str, str]


def write_shard(file: Path, tensors: Mapping[str, Tensor], *, sync: bool) -> tuple[int, ShardSums]:
    """Write contiguous tensors of the CPU; returns the size of the file and its checksums."""
    header, ordered, end = places(tensors, 0)
    start = head(header, 0)
    write_whole(file, lambda descriptor: write_all(descriptor, [start, *map(bytes_of, ordered)]), sync=sync)
    return len(start) + end, ShardSums(xxh3_64_hexdigest(start), _sums_of(tensors))


def _sums_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {key: _sum_of(tensor) for key, tensor in tensors.items()}


def _sum_of(tensor: Tensor) -> str:
    resolved = resolve(tensor)  # held while its memory is read
    return xxh3_64_hexdigest(bytes_of(resolved) if resolved.nbytes else b"")


class OpenShard:
    """A shard that is written part by part: the values as they come, the header, for which room is left, at the end.

    Args:
        room: The bytes that the header may take.
    """

    def __init__(self, file: Path, room: int) -> None:
        self._file = Partial(file)
        self._room = room
        self._header: dict[str, Any] = {}
        self._sums: dict[str, str] = {}
        self._end = 0

    def write(self, tensors: Mapping[str, Tensor], begun: Callable[[], None]) -> None:
        """Write contiguous tensors of the CPU; may be called again with those that it was interrupted at.

        Args:
            tensors: Only the last time may one of them be of a length that is no multiple of 8 bytes.
            begun: Called when all is left to the system, during which other threads can run.
        """
        if tensors.keys() <= self._header.keys():
            return
        header, ordered, end = places(tensors, self._end)
        os.lseek(self._file.descriptor, 8 + self._room + self._end, os.SEEK_SET)
        values, whole = [*map(bytes_of, ordered)], self._header | header
        begun()
        write_all(self._file.descriptor, values)
        self._sums |= _sums_of(tensors)
        self._header, self._end = whole, end

    def finish(self, *, sync: bool) -> tuple[int, ShardSums]:
        """Write the header and give the file its name; returns its size and its checksums."""
        start = head(self._header, self._room)
        assert len(start) == 8 + self._room, "the header is longer than the room that was left for it"
        os.lseek(self._file.descriptor, 0, os.SEEK_SET)
        write_all(self._file.descriptor, [start])
        self._file.finish(sync=sync)
        return len(start) + self._end, ShardSums(xxh3_64_hexdigest(start), self._sums)

    def discard(self) -> None:
        self._file.discard()


def header_bytes(key: str, tensor: Tensor) -> int:
    """At least what a tensor takes in a header."""
    return len(json.dumps(key)) + 20 * tensor.ndim + 128


class Shards:
    """The files of a recording that tensors are read from.

    Not with `safetensors.safe_open`, which reads the whole header whenever a file is opened: with many shards, and many
    names that are read one after the other, nothing else would be done.

    The checksums of a tensor, and of the header of its file, are verified when they are read.

    Args:
        folder: Where they are.
        sizes: How many bytes each has when it is whole.
        header_sums: The checksum of each one's header, where it is known.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int], header_sums: Mapping[str, str]) -> None:
        self._folder = folder
        self._sizes = sizes
        self._header_sums = header_sums
        self._places: dict[str, dict[str, TensorPlace]] = {}
        self._lock = threading.Lock()
        self._closed = False

    @torch.inference_mode(False)  # a tensor that is read in it can be used outside of it
    def load(self, file: str, key: str, shape: tuple[int, ...], dtype: torch.dtype, expected: str | None) -> Tensor:
        """Read a tensor.

        Args:
            expected: Its checksum, where it is known.
        """
        path = self._folder / file
        if self._closed:
            raise BadQuery(f"the recording {str(self._folder)!r} was closed; open it again to read from it")
        if not path.exists():
            raise BadFile(f"shard {str(path)!r} is missing; the tensors in the other shards can still be read")
        with opened(path) as stream:
            self._check_size(path, stream)
            place = self._place(file, stream, key)
            if (place.shape, place.dtype) != (shape, dtype):
                raise ValueError(f"{key!r}: the index says {dtype} {shape}, got {place.dtype} {place.shape}")
            values = read_values(stream, key, place)
            if expected is not None:
                _check_sum(f"tensor {key!r}", expected, _sum_of(values))
            return values

    def _place(self, file: str, stream: BinaryIO, key: str) -> TensorPlace:
        """Where in the file a tensor is."""
        with self._lock:
            if file not in self._places:
                start, found = read_header(stream, self._folder / file)
                if (expected := self._header_sums.get(file)) is not None:
                    _check_sum("its header", expected, xxh3_64_hexdigest(start))
                self._places[file] = found
            return self._places[file][key]

    def _check_size(self, path: Path, stream: BinaryIO) -> None:
        there, whole = os.fstat(stream.fileno()).st_size, self._sizes[path.name]
        if there != whole:
            raise BadFile(
                f"shard {str(path)!r} is not whole: it has {there} bytes and was written with {whole}; "
                f"the tensors in the other shards can still be read"
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._places.clear()


def _check_sum(what: str, expected: str, found: str) -> None:
    if found != expected:
        raise ValueError(f"{what}: expected the checksum {expected}, got {found}")


class OnDisk(NamedTuple):
    """A tensor in a shard, with its checksum and the number of its run where these are known."""

    shards: Shards
    file: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: str | None
    run: int | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def load(self) -> Tensor:
        return self.shards.load(self.file, self.key, self.shape, self.dtype, self.checksum)

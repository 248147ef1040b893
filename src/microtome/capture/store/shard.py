"""Shards of a recording: safetensors files with checksums, written in parts, read tensor by tensor.

safetensors' own `save_file` needs all tensors of a file at once, each in memory of its own. Here parts are written
while the model runs, without copies, and the header follows last. It is also faster: 61 ms instead of 84 ms for 7
tensors of 9 MiB, and 337 ms instead of 617 ms for 8000 of 512 bytes, including the checksums.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from microtome.errors import BadFile, BadQuery
from microtome.files.reading import open_regular
from microtome.files.tensors import (
    TensorRange,
    encode_header,
    layout_tensors,
    memory_of,
    read_header,
    read_values,
    resolve_lazy_bits,
)
from microtome.files.writing import AtomicFile, write_buffers


class ShardSums(NamedTuple):
    """The checksums of a shard: of its header, and of the values of each tensor by key."""

    header: str
    tensors: dict[str, str]


def _checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {key: _checksum(tensor) for key, tensor in tensors.items()}


def _checksum(tensor: Tensor) -> str:
    resolved = resolve_lazy_bits(tensor)  # referenced while its memory is read
    return xxh3_64_hexdigest(memory_of(resolved))


class OpenShard:
    """A shard that is written in parts: first the values, at the end the header, for which space is reserved.

    Args:
        header_space: The maximum bytes of the header; None: those of the first part, which is the only one.
    """

    def __init__(self, file: Path, header_space: int | None = None) -> None:
        self._file = AtomicFile(file)
        self._header_space = header_space
        self._header: dict[str, Any] = {}
        self._sums: dict[str, str] = {}
        self._end = 0

    def write(self, tensors: Mapping[str, Tensor], on_io: Callable[[], None]) -> None:
        """Write contiguous CPU tensors; may be called again with the same ones if it was interrupted.

        Args:
            tensors: The bytes of each must be a multiple of 8, except in the last part.
            on_io: Called right before the system call, during which other threads can run.
        """
        if tensors.keys() <= self._header.keys():
            return
        header, ordered, end = layout_tensors(tensors, self._end)
        if self._header_space is None:
            self._header_space = len(encode_header(header, 0)) - 8
        os.lseek(self._file.descriptor, 8 + self._header_space + self._end, os.SEEK_SET)
        values, complete_header = [*map(memory_of, ordered)], self._header | header
        on_io()
        write_buffers(self._file.descriptor, values)
        self._sums |= _checksums(tensors)
        self._header, self._end = complete_header, end

    def finish(self, *, sync: bool) -> tuple[int, ShardSums]:
        """Write the header and rename the file to its name; return its size and checksums."""
        assert self._header_space is not None, "a shard has at least one part"
        start = encode_header(self._header, self._header_space)
        assert len(start) == 8 + self._header_space, "the header is longer than the space reserved for it"
        os.lseek(self._file.descriptor, 0, os.SEEK_SET)
        write_buffers(self._file.descriptor, [start])
        self._file.commit(sync=sync)
        return len(start) + self._end, ShardSums(xxh3_64_hexdigest(start), self._sums)

    def discard(self) -> None:
        self._file.discard()


def header_bytes(key: str, tensor: Tensor) -> int:
    """Return an upper bound of the bytes of a tensor's entry in a header."""
    return len(json.dumps(key)) + 20 * tensor.ndim + 128


class ShardReader:
    """Reads tensors from the shards of a recording, and verifies the checksums of tensors and headers.

    `safetensors.safe_open` maps the file, so that a file truncated later would kill the process, and parses the header
    whenever it opens one: 200 tensors of a shard of 8000 took 3.6 s, and take 0.1 s here. Open files cannot be kept: a
    recording may have more shards than a process may have open files.

    Args:
        sizes: The bytes of each complete file.
        header_sums: The checksum of each header, if known.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int], header_sums: Mapping[str, str]) -> None:
        self._folder = folder
        self._sizes = sizes
        self._header_sums = header_sums
        self._ranges: dict[str, dict[str, TensorRange]] = {}
        self._lock = threading.Lock()
        self._closed = False

    @torch.inference_mode(False)  # so that a tensor that is loaded in it can be used outside
    def load(self, file: str, key: str, shape: tuple[int, ...], dtype: torch.dtype, expected: str | None) -> Tensor:
        """Read a tensor.

        Args:
            expected: Its checksum, if known.
        """
        path = self._folder / file
        if self._closed:
            raise BadQuery(f"the recording {str(self._folder)!r} was closed; open it again to read from it")
        if not path.exists():
            raise BadFile(f"shard {str(path)!r} is missing; the tensors in the other shards can still be read")
        with open_regular(path) as stream:
            self._check_size(path, stream)
            place = self._place(file, stream, key)
            if (place.shape, place.dtype) != (shape, dtype):
                raise ValueError(f"{key!r}: the index says {dtype} {shape}, got {place.dtype} {place.shape}")
            values = read_values(stream, key, place)
            if expected is not None:
                _verify(f"tensor {key!r}", expected, _checksum(values))
            return values

    def _place(self, file: str, stream: BinaryIO, key: str) -> TensorRange:
        """Return the location of a tensor in its file."""
        with self._lock:
            if file not in self._ranges:
                start, ranges = read_header(stream, self._folder / file)
                if (expected := self._header_sums.get(file)) is not None:
                    _verify("its header", expected, xxh3_64_hexdigest(start))
                self._ranges[file] = ranges
            return self._ranges[file][key]

    def _check_size(self, path: Path, stream: BinaryIO) -> None:
        got, expected = os.fstat(stream.fileno()).st_size, self._sizes[path.name]
        if got != expected:
            raise BadFile(
                f"damaged shard {str(path)!r}: expected {expected} bytes, got {got}; "
                f"the tensors in the other shards can still be read"
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._ranges.clear()


def _verify(part: str, expected: str, got: str) -> None:
    if got != expected:
        raise ValueError(f"{part}: expected the checksum {expected}, got {got}")

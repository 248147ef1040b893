"""Files of tensors in the safetensors format: written whole or not at all, read one tensor at a time.

Written here and not by `safetensors.torch.save_file`, which refuses tensors that share memory, needs numpy and tells
a full disk only in the text of an error of its own. The format: 8 bytes that say how long the header is, the header
(JSON: dtype, shape and place of each tensor), then the values.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from microtome.errors import BadFile, BadQuery, said

#: What safetensors calls each dtype.
CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}

#: The most files that a reader has mapped at a time, beside those whose tensors somebody has.
_MAPPED_FILES = 64

#: The most buffers that the system takes in one call.
_BUFFERS = 1024


def write_whole(file: Path, write: Callable[[int], None], *, sync: bool) -> None:
    """Have a file written under another name, then give it its own; on an error nothing is left of it."""
    partial = Partial(file)
    try:
        write(partial.descriptor)
        partial.finish(sync=sync)
    except BaseException:
        partial.discard()
        raise


class Partial:
    """A file that has another name until it is whole."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._path = file.with_name(f".{file.name}.tmp")
        self._is_open = True
        self.descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def finish(self, *, sync: bool) -> None:
        """Give it its name."""
        if sync:
            os.fsync(self.descriptor)
        self._close()
        os.replace(self._path, self._file)
        if sync:
            sync_folder(self._file.parent)

    def discard(self) -> None:
        """Leave nothing of it, unless it is finished."""
        self._close()
        self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self.descriptor)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, buffers: Iterable[Any]) -> None:
    """Write buffers of bytes, whatever part of them the system takes at a time."""
    left = [memoryview(buffer) for buffer in buffers]
    left.reverse()
    while left:
        done = os.writev(descriptor, left[: -_BUFFERS - 1 : -1])
        while left and done >= left[-1].nbytes:  # empty ones too
            done -= left.pop().nbytes
        if done:
            left[-1] = left[-1][done:]


class ShardSums(NamedTuple):
    """The checksums of a shard: of the bytes before the values, and of each tensor's values by its key."""

    header: str
    tensors: dict[str, str]


def write_shard(file: Path, tensors: Mapping[str, Tensor], *, sync: bool) -> tuple[int, ShardSums]:
    """Write contiguous tensors of the CPU; returns the size of the file and its checksums."""
    header, ordered, end = _places(tensors, 0)
    head = _head(header, 0)
    write_whole(file, lambda descriptor: write_all(descriptor, [head, *map(_bytes_of, ordered)]), sync=sync)
    return len(head) + end, ShardSums(xxh3_64_hexdigest(head), _sums_of(tensors))


def _sums_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {key: _sum_of(tensor) for key, tensor in tensors.items()}


def _sum_of(tensor: Tensor) -> str:
    return xxh3_64_hexdigest(_bytes_of(tensor) if tensor.nbytes else b"")


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
        header, ordered, end = _places(tensors, self._end)
        os.lseek(self._file.descriptor, 8 + self._room + self._end, os.SEEK_SET)
        values, whole = [*map(_bytes_of, ordered)], self._header | header
        begun()
        write_all(self._file.descriptor, values)
        self._sums |= _sums_of(tensors)
        self._header, self._end = whole, end

    def finish(self, *, sync: bool) -> tuple[int, ShardSums]:
        """Write the header and give the file its name; returns its size and its checksums."""
        head = _head(self._header, self._room)
        assert len(head) == 8 + self._room, "the header is longer than the room that was left for it"
        os.lseek(self._file.descriptor, 0, os.SEEK_SET)
        write_all(self._file.descriptor, [head])
        self._file.finish(sync=sync)
        return len(head) + self._end, ShardSums(xxh3_64_hexdigest(head), self._sums)

    def discard(self) -> None:
        self._file.discard()


def header_bytes(key: str, tensor: Tensor) -> int:
    """At least what a tensor takes in a header."""
    return len(json.dumps(key)) + 20 * tensor.ndim + 128


def _places(tensors: Mapping[str, Tensor], end: int) -> tuple[dict[str, Any], list[Tensor], int]:
    """What the header says of the tensors when they come after `end`, those of them with values in order, their end."""
    header: dict[str, Any] = {}
    # The widest first, so that each begins at a multiple of its width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    for key, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[key] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    return header, [tensor for _, tensor in ordered if tensor.nbytes], end


def _head(header: dict[str, Any], room: int) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(max(room, len(text) + -len(text) % 8))
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class Shards:
    """The files of a recording that tensors are read from, few of them mapped at a time.

    Not with `safetensors.safe_open`, which reads the whole header whenever a file is opened: with many shards, and many
    names that are read one after the other, nothing else would be done.

    A tensor's checksum is verified when it is first read, and so is that of the header of its file.

    Args:
        folder: Where they are.
        sizes: How many bytes each has when it is whole.
        header_sums: The checksum of each one's header, where it is known.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int], header_sums: Mapping[str, str]) -> None:
        self._folder = folder
        self._sizes = sizes
        self._header_sums = header_sums
        self._verified: set[tuple[str, str]] = set()
        self._mapped: OrderedDict[str, Tensor] = OrderedDict()
        self._begins: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()
        self._closed = False

    @torch.inference_mode(False)  # a tensor that is read in it can be used outside of it
    def load(self, file: str, key: str, shape: tuple[int, ...], dtype: torch.dtype, expected: str | None) -> Tensor:
        """Read a tensor.

        Args:
            expected: Its checksum, where it is known.
        """
        with self._lock:
            if self._closed:
                raise BadQuery(f"the recording {str(self._folder)!r} was closed; open it again to read from it")
            try:
                whole = self._map(file)
                begin = self._begin(file, whole, key)
                end = begin + math.prod(shape) * dtype.itemsize
                if not 8 <= begin <= end <= len(whole):
                    raise ValueError(f"{key!r} would be at {begin} to {end} of {len(whole)} bytes")
                values = whole[begin:end]
                if expected is not None and (file, key) not in self._verified:
                    _check_sum(f"tensor {key!r}", expected, _sum_of(values))
                    self._verified.add((file, key))
                return values.view(dtype).view(shape)
            except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise BadFile(f"shard {str(self._folder / file)!r} cannot be read: {said(error)}") from error

    def _map(self, file: str) -> Tensor:
        """The bytes of a file."""
        if file not in self._mapped:
            self._check(file)
            while len(self._mapped) >= _MAPPED_FILES:
                self._mapped.popitem(last=False)
            # Not shared with the file: who writes to a tensor writes to a page of its own.
            path, size = str(self._folder / file), self._sizes[file]
            self._mapped[file] = torch.from_file(path, shared=False, size=size, dtype=torch.uint8, device="cpu")
        self._mapped.move_to_end(file)
        return self._mapped[file]

    def _begin(self, file: str, whole: Tensor, key: str) -> int:
        """Where in the file a tensor begins."""
        if file not in self._begins:
            length = int.from_bytes(_bytes_of(whole[:8]), "little")
            if not 0 < length <= len(whole) - 8:
                raise ValueError(f"its header would be {length} bytes long")
            if (expected := self._header_sums.get(file)) is not None:
                _check_sum("its header", expected, xxh3_64_hexdigest(_bytes_of(whole[: 8 + length])))
            header = json.loads(bytes(_bytes_of(whole[8 : 8 + length])))
            self._begins[file] = {name: 8 + length + place["data_offsets"][0] for name, place in header.items()}
        return self._begins[file][key]

    def _check(self, file: str) -> None:
        """Before it is mapped: reading past the end of a mapped file would end the process."""
        path = self._folder / file
        if not path.exists():
            raise BadFile(f"shard {str(path)!r} is missing; the tensors in the other shards can still be read")
        there, whole = path.stat().st_size, self._sizes[file]
        if there != whole:
            raise BadFile(
                f"shard {str(path)!r} is not whole: it has {there} bytes and was written with {whole}; "
                f"the tensors in the other shards can still be read"
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._mapped.clear()
            self._begins.clear()


def _check_sum(what: str, expected: str, found: str) -> None:
    if found != expected:
        raise ValueError(f"{what} is damaged: expected the checksum {expected}, got {found}")


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

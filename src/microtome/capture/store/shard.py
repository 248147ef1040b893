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
from safetensors import SafetensorError, safe_open
from torch import Tensor

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

#: The most files that a reader has open at a time.
_OPEN_FILES = 8

#: The most buffers that the system takes in one call.
_BUFFERS = 1024


def write_whole(file: Path, write: Callable[[int], None], *, sync: bool) -> None:
    """Have a file written under another name, then give it its own; on an error nothing is left of it."""
    partial = file.with_name(f".{file.name}.tmp")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        try:
            write(descriptor)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(file.parent)


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


def write_shard(file: Path, tensors: Mapping[str, Tensor], *, sync: bool) -> int:
    """Write contiguous tensors of the CPU; returns the size of the file."""
    # The widest first, so that each begins at a multiple of its width.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[key] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    values = [_bytes_of(tensor) for _, tensor in ordered if tensor.nbytes]
    write_whole(file, lambda descriptor: write_all(descriptor, [head, *values]), sync=sync)
    return len(head) + end


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class Shards:
    """The files of a recording that tensors are read from, few of them open at a time.

    Args:
        folder: Where they are.
        sizes: How many bytes each has when it is whole.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        self._folder = folder
        self._sizes = sizes
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    def load(self, file: str, key: str) -> Tensor:
        with self._lock:
            try:
                tensor: Tensor = self._opened(file).get_tensor(key)
            except (OSError, SafetensorError) as error:
                raise BadFile(f"shard {str(self._folder / file)!r} cannot be read: {said(error)}") from error
            return tensor

    def _opened(self, file: str) -> Any:
        if self._closed:
            raise BadQuery(f"the recording {str(self._folder)!r} was closed; open it again to read from it")
        if file not in self._open:
            self._check(file)
            while len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)[1].__exit__(None, None, None)
            self._open[file] = safe_open(self._folder / file, framework="pt")
        self._open.move_to_end(file)
        return self._open[file]

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
            while self._open:
                self._open.popitem()[1].__exit__(None, None, None)


class OnDisk(NamedTuple):
    """A tensor in a shard."""

    shards: Shards
    file: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def load(self) -> Tensor:
        return self.shards.load(self.file, self.key)

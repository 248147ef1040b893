"""Read samples from a .npy array, or from a folder of arrays or images."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from microtome.errors import BadFile, BadInputs, describe_error
from microtome.files.reading import open_regular, translate_read_errors
from microtome.inputs import Inputs
from microtome.zoo.packages import import_package

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
#: The decoders to try, whatever the suffix of a file.
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
_MAX_PIXELS = 1 << 26


def single_tensor(inputs: Inputs, alternative: str) -> Tensor:
    """Return the only input of a model, whose shape, dtype and device samples get.

    Args:
        alternative: What to do for other models, for the error.
    """
    tensors = [value for value in (*inputs.args, *inputs.kwargs.values()) if isinstance(value, Tensor)]
    if len(tensors) != 1 or inputs.kwargs:
        raise BadInputs(f"--data needs a model with one positional input: {alternative}")
    return tensors[0]


def count_samples(data: str) -> int:
    path = Path(data)
    return len(_list_files(path)) if path.is_dir() else len(_ArrayFile(path))


def describe_images(data: str, like: Tensor) -> Iterator[str]:
    """Describe how images, if there are any, become samples."""
    path = Path(data)
    if path.is_dir() and any(file.suffix.lower() in _SUFFIXES for file in _list_files(path)):
        resized = f"resized to {like.shape[-2]}x{like.shape[-1]}, " if like.ndim == 4 else ""
        yield f"images are {resized}with values from 0 to 1, not normalized: for others, pass .npy files"


def read_batches(data: str, size: int, like: Tensor) -> Iterator[Tensor]:
    """Read samples in batches, the last one possibly smaller, with the dtype and device of a tensor.

    Images become (3, height, width) with values from 0 to 1, resized to the tensor's height and width.
    """
    path = Path(data)
    if not path.is_dir():
        array = _ArrayFile(path)
        for start in range(0, len(array), size):
            yield array.read(start, start + size).to(like.device, like.dtype)
        return
    files = _list_files(path)
    for start in range(0, len(files), size):
        samples = [_read_sample(file, like).to(like.dtype) for file in files[start : start + size]]
        try:
            batch = torch.stack(samples)
        except RuntimeError as error:
            shapes = sorted({tuple(sample.shape) for sample in samples})
            raise BadFile(f"expected samples of one shape in {data!r}, got {shapes}") from error
        yield batch.to(like.device)


def _list_files(path: Path) -> list[Path]:
    with translate_read_errors(repr(str(path))):
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in {".npy", *_SUFFIXES})
    if not files:
        raise BadFile(f"expected .npy files or images ({', '.join(sorted(_SUFFIXES))}) in {str(path)!r}, got none")
    return files


class _ArrayFile:
    """The samples of a .npy file, read in slices.

    The file is not memory-mapped: truncating a mapped file kills the process.
    """

    def __init__(self, path: Path) -> None:
        numpy: Any = import_package("numpy")
        self._path = path
        if path.exists() and path.suffix != ".npy":
            raise BadFile(f"expected a .npy file, or a folder of .npy files or images, got {str(path)!r}")
        try:
            with open_regular(path) as stream:
                version = numpy.lib.format.read_magic(stream)
                read = {(1, 0): numpy.lib.format.read_array_header_1_0, (2, 0): numpy.lib.format.read_array_header_2_0}
                self.shape, self._is_fortran, self._dtype = read[version](stream)
                self._start, file_bytes = stream.tell(), os.fstat(stream.fileno()).st_size
        except BadFile:
            raise
        except Exception as error:  # numpy's parser raises all kinds
            raise BadFile(f"cannot read {str(path)!r} as .npy: {describe_error(error)}") from error
        if not self.shape or not self.shape[0]:
            raise BadFile(f"expected an array of samples in {str(path)!r}, got the shape {self.shape}")
        if self._dtype.kind not in "fiub":
            raise BadFile(f"expected floats, integers or booleans in {str(path)!r}, got {self._dtype}")
        expected = math.prod(self.shape) * self._dtype.itemsize
        if min(self.shape) < 0 or self._start + expected > file_bytes:
            got = file_bytes - self._start
            raise BadFile(f"truncated array in {str(path)!r}: expected {expected} bytes of {self.shape}, got {got}")

    def __len__(self) -> int:
        return int(self.shape[0])

    def read(self, start: int, end: int) -> Tensor:
        numpy: Any = import_package("numpy")
        end = min(end, len(self))
        row_bytes = math.prod(self.shape[1:]) * self._dtype.itemsize
        with open_regular(self._path) as stream:
            if self._is_fortran:  # samples are interleaved
                stream.seek(self._start)
                whole = numpy.frombuffer(stream.read(len(self) * row_bytes), self._dtype)
                array = whole.reshape(self.shape, order="F")[start:end]
            else:
                stream.seek(self._start + start * row_bytes)
                array = numpy.frombuffer(stream.read((end - start) * row_bytes), self._dtype)
                array = array.reshape(end - start, *self.shape[1:])
            return torch.tensor(array.astype(self._dtype.newbyteorder("=")))


def _read_sample(file: Path, like: Tensor) -> Tensor:
    if file.suffix.lower() == ".npy":
        array = _ArrayFile(file)
        return array.read(0, len(array))
    image: Any = import_package("PIL", lambda: import_module("PIL.Image"))
    try:
        with open_regular(file) as stream, image.open(stream, formats=_FORMATS) as opened:
            width, height = opened.size
            if width * height > _MAX_PIXELS:
                got = f"{width} x {height}"
                raise BadFile(f"expected at most {_MAX_PIXELS} pixels in the image {str(file)!r}, got {got}")
            data = opened.convert("RGB").tobytes()
    except BadFile:
        raise
    except Exception as error:  # each decoder has errors of its own
        raise BadFile(f"cannot read the image {str(file)!r}: {describe_error(error)}") from error
    pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(1, height, width, 3).permute(0, 3, 1, 2) / 255
    if like.ndim == 4:
        pixels = F.interpolate(pixels, like.shape[-2:], mode="bilinear", antialias=True)
    return pixels[0]

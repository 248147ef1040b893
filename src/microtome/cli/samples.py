"""Samples from files: a .npy array, or a folder of arrays or images."""

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

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
#: What is looked for in an image, whatever its name ends in, and the most pixels that one may have.
_FORMATS, _PIXELS = ("PNG", "JPEG", "BMP", "WEBP"), 1 << 26


def lone_tensor(inputs: Inputs, instead: str) -> Tensor:
    """The one input of a model, which samples are to be like; for others, what to do instead is said."""
    tensors = [value for value in (*inputs.args, *inputs.kwargs.values()) if isinstance(value, Tensor)]
    if len(tensors) != 1 or inputs.kwargs:
        raise BadInputs(f"data goes to models with one positional input: {instead}")
    return tensors[0]


def count_of(data: str) -> int:
    """Count the samples."""
    path = Path(data)
    return len(_files(path)) if path.is_dir() else len(_Array(path))


def batches(data: str, size: int, like: Tensor) -> Iterator[Tensor]:
    """The samples in batches, the last perhaps smaller, of the dtype of an input like this one.

    Images become (3, height, width) with values from 0 to 1, resized to the input's height and width.
    """
    path = Path(data)
    if not path.is_dir():
        array = _Array(path)
        for at in range(0, len(array), size):
            yield array.read(at, at + size, like)
        return
    files = _files(path)
    for at in range(0, len(files), size):
        samples = [_sample(file, like) for file in files[at : at + size]]
        try:
            yield torch.stack(samples)
        except RuntimeError as error:
            shapes = sorted({tuple(sample.shape) for sample in samples})
            raise BadFile(f"the samples in {data!r} are not of one shape: {shapes}") from error


def _files(path: Path) -> list[Path]:
    with translate_read_errors(repr(str(path))):
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in {".npy", *_IMAGES})
    if not files:
        raise BadFile(f"{str(path)!r} holds no .npy file and no image ({', '.join(sorted(_IMAGES))})")
    return files


class _Array:
    """The samples of a .npy file, read when they are asked for.

    Not mapped: a mapped file that is truncated ends the process.
    """

    def __init__(self, path: Path) -> None:
        numpy: Any = import_package("numpy")
        self._path = path
        try:
            with open_regular(path) as stream:
                version = numpy.lib.format.read_magic(stream)
                read = {(1, 0): numpy.lib.format.read_array_header_1_0, (2, 0): numpy.lib.format.read_array_header_2_0}
                self.shape, self._is_fortran, self._dtype = read[version](stream)
                self._begin, there = stream.tell(), os.fstat(stream.fileno()).st_size
        except Exception as error:  # numpy's parser raises all kinds
            raise BadFile(f"cannot read {str(path)!r} as .npy: {describe_error(error)}") from error
        if not self.shape or not self.shape[0]:
            raise BadFile(f"{str(path)!r} is no array of samples")
        if self._dtype.kind not in "fiub":
            raise BadFile(f"{str(path)!r} holds {self._dtype}: numbers or truth values are needed")
        need_bytes = math.prod(self.shape) * self._dtype.itemsize
        if min(self.shape) < 0 or self._begin + need_bytes > there:
            got = there - self._begin
            raise BadFile(f"truncated array in {str(path)!r}: expected {need_bytes} bytes of {self.shape}, got {got}")

    def __len__(self) -> int:
        return int(self.shape[0])

    def read(self, begin: int, end: int, like: Tensor) -> Tensor:
        """Samples, of the dtype of a tensor like this one."""
        numpy: Any = import_package("numpy")
        end = min(end, len(self))
        row = math.prod(self.shape[1:]) * self._dtype.itemsize
        shape = (end - begin, *self.shape[1:])
        with open_regular(self._path) as stream:
            if self._is_fortran:  # the samples do not lie one after the other
                stream.seek(self._begin)
                whole = numpy.frombuffer(stream.read(len(self) * row), self._dtype)
                array = whole.reshape(self.shape, order="F")[begin:end]
            else:
                stream.seek(self._begin + begin * row)
                array = numpy.frombuffer(stream.read((end - begin) * row), self._dtype).reshape(shape)
            return torch.tensor(array.astype(self._dtype.newbyteorder("="))).to(like.dtype)


def _sample(file: Path, like: Tensor) -> Tensor:
    if file.suffix.lower() == ".npy":
        array = _Array(file)
        return array.read(0, len(array), like)
    image: Any = import_package("PIL", lambda: import_module("PIL.Image"))
    try:
        with open_regular(file) as stream, image.open(stream, formats=_FORMATS) as found:
            width, height = found.size
            if width * height > _PIXELS:
                raise BadFile(f"expected at most {_PIXELS} pixels, got {width} x {height}")
            data = found.convert("RGB").tobytes()
    except Exception as error:  # each decoder has errors of its own
        raise BadFile(f"cannot read the image {str(file)!r}: {describe_error(error)}") from error
    pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(1, height, width, 3).permute(0, 3, 1, 2) / 255
    sized = F.interpolate(pixels, like.shape[-2:], mode="bilinear", antialias=True) if like.ndim == 4 else pixels
    return sized[0].to(like.dtype)

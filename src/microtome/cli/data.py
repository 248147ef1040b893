"""Samples from files: a .npy array, or a folder of arrays or images."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from microtome.errors import BadFile, BadInputs, said
from microtome.inputs import Inputs
from microtome.zoo.packages import need

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


def lone_tensor(inputs: Inputs, instead: str) -> Tensor:
    """The one input of a model, which samples are to be like; for others, what to do instead is said."""
    tensors = [value for value in (*inputs.args, *inputs.kwargs.values()) if isinstance(value, Tensor)]
    if len(tensors) != 1 or inputs.kwargs:
        raise BadInputs(f"data goes to models with one positional input: {instead}")
    return tensors[0]


def count_of(data: str) -> int:
    """How many samples there are."""
    path = Path(data)
    return len(_files(path)) if path.is_dir() else len(_array(path))


def batches(data: str, size: int, like: Tensor) -> Iterator[Tensor]:
    """The samples in batches, the last perhaps smaller, of the dtype of an input like this one.

    Images become (3, height, width) with values from 0 to 1, resized to the input's height and width.
    """
    path = Path(data)
    if not path.is_dir():
        array = _array(path)
        for at in range(0, len(array), size):
            yield _as_tensor(array[at : at + size], like, path)
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
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in {".npy", *_IMAGES})
    if not files:
        raise BadFile(f"{str(path)!r} holds no .npy file and no image ({', '.join(sorted(_IMAGES))})")
    return files


def _array(path: Path) -> Any:
    numpy: Any = need("numpy")
    try:
        array = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BadFile(f"cannot read {str(path)!r} as .npy: {said(error)}") from error
    if not hasattr(array, "ndim") or array.ndim == 0 or not len(array):
        raise BadFile(f"{str(path)!r} is no array of samples")
    return array


def _as_tensor(array: Any, like: Tensor, path: Path) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise BadFile(f"{str(path)!r} holds {array.dtype}: numbers or truth values are needed")
    return torch.tensor(array.astype(array.dtype.newbyteorder("="))).to(like.dtype)


def _sample(file: Path, like: Tensor) -> Tensor:
    if file.suffix.lower() == ".npy":
        return _as_tensor(_array(file)[...], like, file)
    image: Any = need("PIL", lambda: import_module("PIL.Image"))
    try:
        with image.open(file) as opened:
            data, (width, height) = opened.convert("RGB").tobytes(), opened.size
    except OSError as error:
        raise BadFile(f"cannot read the image {str(file)!r}: {said(error)}") from error
    pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(1, height, width, 3).permute(0, 3, 1, 2) / 255
    sized = F.interpolate(pixels, like.shape[-2:], mode="bilinear", antialias=True) if like.ndim == 4 else pixels
    return sized[0].to(like.dtype)

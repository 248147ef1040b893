"""Pictures as pixels: colour maps, tiles, and PNG files."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from microtome.errors import BadQuery
from microtome.files.reading import File
from microtome.files.writing import translate_write_errors
from microtome.units import plural

#: Nine colours of matplotlib's viridis, evenly spaced.
_VIRIDIS = (0x440154, 0x472C7A, 0x3B518B, 0x2C718E, 0x21908D, 0x27AD81, 0x5CC863, 0xAADC32, 0xFDE725)
#: The width of the gap between tiles in pixels.
_BETWEEN = 2
#: The most class, register and prompt tokens before those of the patches.
_MAX_OTHERS = 64


@dataclass(frozen=True, eq=False, repr=False)
class Picture:
    """A picture that notebooks show.

    Attributes:
        pixels: (height, width, 3), RGB, or (height, width, 4), RGBA; uint8.
    """

    pixels: Tensor

    @property
    def png(self) -> bytes:
        return png(self.pixels)

    def _repr_png_(self) -> bytes:
        return self.png

    def save(self, file: File) -> None:
        """Write the picture as PNG; raise BadQuery if the file is named as one of another format."""
        if Path(file).suffix.lower() not in (".png", ""):
            raise BadQuery(f"expected a file for a PNG picture, such as {Path(file).stem}.png, got {str(file)!r}")
        with translate_write_errors(repr(str(file))):
            Path(file).write_bytes(png(self.pixels))

    def __repr__(self) -> str:
        return f"<Picture, {self.pixels.shape[1]} wide, {self.pixels.shape[0]} high>"


def png(pixels: Tensor) -> bytes:
    """Encode pixels, RGB or RGBA, as PNG.

    Pillow would be a dependency for these few lines: reports need neither filters, palettes nor metadata.
    """
    height, width, channels = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = F.pad(pixels.reshape(height, width * channels), (1, 0))  # each line begins with its filter: 0, none
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 6, 0, 0, 0)  # 8 bits a channel
    data = zlib.compress(bytes(lines.flatten().tolist()))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def tile(pictures: Sequence[Tensor], columns: int | None = None) -> Picture:
    """Tile pictures of one size row by row; without `columns`, about as wide as high. The rest is transparent."""
    height, width = pictures[0].shape[:2]
    columns = columns or min(math.ceil(math.sqrt(len(pictures) * height / width)), len(pictures))
    rows = math.ceil(len(pictures) / columns)
    sheet = torch.zeros(rows * (height + _BETWEEN) - _BETWEEN, columns * (width + _BETWEEN) - _BETWEEN, 4)
    for at, pixels in enumerate(pictures):
        top, left = (at // columns) * (height + _BETWEEN), (at % columns) * (width + _BETWEEN)
        sheet[top : top + height, left : left + width] = F.pad(pixels, (0, 1), value=255)
    return Picture(sheet.to(torch.uint8))


def scale_values(values: Tensor) -> Tensor:
    """Scale values to between 0 and 1; to 0 where all are the same."""
    values = values.nan_to_num()
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else torch.zeros_like(values)


def colour(values: Tensor) -> Tensor:
    """Map values between 0 and 1 to colours, (..., 3)."""
    table = torch.tensor([[colour >> 16, colour >> 8 & 255, colour & 255] for colour in _VIRIDIS]) / 255
    at = values * (len(table) - 1)
    below = at.long().clamp(max=len(table) - 2)
    return torch.lerp(table[below], table[below + 1], (at - below)[..., None])


def as_bytes(pixels: Tensor) -> Tensor:
    return (pixels * 255).round().to(torch.uint8)


def draw_map(values: Tensor, height: int, width: int) -> Tensor:
    """Draw values between 0 and 1 as pixels, each as a rectangle of this size."""
    return as_bytes(colour(values.repeat_interleave(height, 0).repeat_interleave(width, 1)))


def arrange_patches(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Arrange tokens, (n, ...), in a grid of patches, (height, width, ...).

    Tokens before those of the patches, such as the class token, are left out.
    """
    try:
        height, width = map(index, grid)
    except (TypeError, ValueError) as error:
        raise BadQuery(f"expected grid to be the patches in height and in width, got {grid!r}") from error
    if height < 1 or width < 1 or height * width > len(tokens):
        raise BadQuery(
            f"expected a grid of at most {plural(len(tokens), 'patch')}, one a token, got {height} x {width}"
        )
    first = len(tokens) - height * width
    if first > _MAX_OTHERS or first >= height * width:
        raise BadQuery(
            f"expected a grid of all {len(tokens)} tokens, or all but a few first ones such as the class token, "
            f"got {height} x {width}, which leaves out {first}"
        )
    return tokens[first:].unflatten(0, (height, width))


def pick(values: Any, position: Any, noun: str, *, others: str = "") -> Tensor:
    """Return one of several layers, heads, rows or samples by its position.

    Args:
        others: What the caller accepts instead of a position, for the error.
    """
    try:
        position = index(position)
    except TypeError as error:
        raise BadQuery(f"expected the position of a {noun}{others}, got {position!r}") from error
    if not -len(values) <= position < len(values):
        expected = f"expected a {noun} from 0 to {len(values) - 1}" if len(values) else f"there is no {noun}"
        raise BadQuery(f"{expected}, got {position}")
    tensor: Tensor = values[position]
    return tensor

"""Attention as a picture: what one query looks at, over the image."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from microtome.capture.attention import Attention
from microtome.errors import BadQuery
from microtome.results import File

#: Nine colours of matplotlib's viridis, evenly spaced: as light as what they stand for is large.
_VIRIDIS = (0x440154, 0x472C7A, 0x3B518B, 0x2C718E, 0x21908D, 0x27AD81, 0x5CC863, 0xAADC32, 0xFDE725)
#: A map without an image is drawn about so many pixels high or wide.
_SIZE = 224


@dataclass(frozen=True, eq=False, repr=False)
class Picture:
    """A picture that notebooks show.

    Attributes:
        pixels: (height, width, 3), uint8.
    """

    pixels: Tensor

    def _repr_png_(self) -> bytes:
        return png(self.pixels)

    def save(self, file: File) -> None:
        Path(file).write_bytes(png(self.pixels))

    def __repr__(self) -> str:
        return f"<Picture, {self.pixels.shape[1]} wide, {self.pixels.shape[0]} high>"


def plot(
    attention: Attention,
    image: Any = None,
    *,
    layer: int | str = -1,
    head: int | None = None,
    row: int = 0,
    grid: tuple[int, int] | None = None,
    sample: int = 0,
    alpha: float = 0.6,
) -> Picture:
    """What one query looks at, as a picture. `Attention.to_png` says what the options mean."""
    if isinstance(layer, int) and not -len(attention) <= layer < len(attention):
        raise BadQuery(f"there is no layer {layer}: there are {len(attention)}")
    weights = _pick(attention[layer], sample, "sample")
    heads = weights.mean(0) if head is None else _pick(weights, head, "head")
    return picture(_pick(heads, row, "row"), _of_sample(image, sample), grid=grid, alpha=alpha)


def picture(values: Tensor, image: Any = None, *, grid: tuple[int, int] | None = None, alpha: float = 0.6) -> Picture:
    """One value for each token, such as a row of weights or of a rollout, as a picture.

    Tokens before those of the patches, such as the class token, are left out.
    """
    heat = _scaled(_on_grid(values.detach().float().cpu(), grid))
    if image is None:
        times = max(1, _SIZE // max(heat.shape))
        return Picture(_bytes(_colours(heat.repeat_interleave(times, 0).repeat_interleave(times, 1))))
    if not 0 <= alpha <= 1:
        raise BadQuery(f"alpha is from 0 (the image alone) to 1 (the map alone), got {alpha!r}")
    under = _as_image(image)
    size = under.shape[0], under.shape[1]
    heat = F.interpolate(heat[None, None], size=size, mode="bilinear", align_corners=False)[0, 0]
    return Picture(_bytes(torch.lerp(under, _colours(heat), alpha)))


def png(pixels: Tensor) -> bytes:
    """Pixels (height, width, 3), uint8, as a PNG file."""
    height, width = pixels.shape[:2]

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = F.pad(pixels.reshape(height, width * 3), (1, 0))  # each line begins with its filter: 0, none
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    data = zlib.compress(bytes(lines.flatten().tolist()))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def _pick(tensor: Tensor, index: int, what: str) -> Tensor:
    if not -len(tensor) <= index < len(tensor):
        raise BadQuery(f"there is no {what} {index}: {len(tensor)} were kept")
    return tensor[index]


def _of_sample(image: Any, sample: int) -> Any:
    return image if image is None or torch.as_tensor(image).dim() != 4 else _pick(image, sample, "image")


def _on_grid(values: Tensor, grid: tuple[int, int] | None) -> Tensor:
    side = math.isqrt(len(values))
    height, width = grid or (side, side)
    if height < 1 or width < 1 or height * width > len(values):
        raise BadQuery(f"a grid of {height} x {width} patches cannot be made of {len(values)} tokens")
    return values[len(values) - height * width :].view(height, width)


def _scaled(values: Tensor) -> Tensor:
    """Between 0 and 1; 0 where all are the same."""
    values = values.nan_to_num()
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else torch.zeros_like(values)


def _as_image(image: Any) -> Tensor:
    """As (height, width, 3), floats between 0 and 1."""
    pixels = torch.as_tensor(image).detach().cpu()
    if pixels.dim() == 2:
        pixels = pixels[..., None]
    elif pixels.dim() == 3 and pixels.shape[0] in (1, 3):
        pixels = pixels.permute(1, 2, 0)
    if pixels.dim() != 3 or pixels.shape[2] not in (1, 3):
        raise BadQuery(f"an image is (3, H, W), (H, W, 3) or (H, W), got {tuple(pixels.shape)}")
    scaled = pixels / 255 if pixels.dtype == torch.uint8 else _scaled(pixels.float())
    return scaled.expand(*scaled.shape[:2], 3)


def _colours(values: Tensor) -> Tensor:
    """Of values between 0 and 1, as (..., 3)."""
    table = torch.tensor([[colour >> 16, colour >> 8 & 255, colour & 255] for colour in _VIRIDIS]) / 255
    at = values * (len(table) - 1)
    below = at.long().clamp(max=len(table) - 2)
    return torch.lerp(table[below], table[below + 1], (at - below)[..., None])


def _bytes(pixels: Tensor) -> Tensor:
    return (pixels * 255).round().to(torch.uint8)

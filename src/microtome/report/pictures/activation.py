"""Draw activations: the channels of a layer side by side."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from microtome.engine.pytree import tensors_in
from microtome.errors import BadQuery
from microtome.report.pictures.pixels import Picture, arrange_patches, draw_map, pick, scale_values, tile
from microtome.units import shape

#: The height or width of a map in pixels, about: of several, and of a single one.
_SMALL, _LARGE = 96, 384
#: The least height of a row of values in pixels.
_LEAST = 24
#: A thumbnail in pixels, about, and the most channels in it.
_THUMBNAIL, _FEW = (44, 340), 8


def plot(
    value: Any,
    name: str = "",
    *,
    sample: int = 0,
    channels: int = 64,
    grid: tuple[int, int] | None = None,
    scale: Literal["each", "all"] = "each",
    part: int | None = None,
) -> Picture:
    """Draw the output of a layer for one sample. `Features.plot` describes the options."""
    if scale not in ("each", "all"):
        raise BadQuery(f"expected scale to be 'each' or 'all', got {scale!r}")
    if not isinstance(channels, int) or channels < 1:
        raise BadQuery(f"expected channels of 1 or more, got {channels!r}")
    tensor = _tensor(value, name, part)
    if not 2 <= tensor.dim() <= 4 or not tensor.numel():
        raise BadQuery(
            f"expected {name!r} to be (batch, channels, height, width), (batch, tokens, channels) or "
            f"(batch, channels), got {shape(tensor.shape)}"
        )
    maps = _maps(pick(tensor, sample, "sample"), grid)[:channels]
    maps = torch.stack([scale_values(one) for one in maps]) if scale == "each" else scale_values(maps)
    width = max(1, (_SMALL if len(maps) > 1 else _LARGE) // max(maps.shape[1:]))
    height = max(width, _LEAST // maps.shape[1])
    return tile([draw_map(one, height, width) for one in maps])


def thumbnail(tensor: Tensor) -> Picture:
    """Draw a few channels of the first sample in a row, as small as a line of a table."""
    if not 2 <= tensor.dim() <= 4 or not tensor.numel():
        raise BadQuery(f"expected a tensor of 2 to 4 dimensions, got {shape(tensor.shape)}")
    maps = _maps(_tensor(tensor, "", None)[0], None)[:_FEW]
    high, wide = _THUMBNAIL[0], _THUMBNAIL[0] if len(maps) > 1 else _THUMBNAIL[1]
    shown = min(maps.shape[1], high), min(maps.shape[2], wide)
    maps = F.adaptive_avg_pool2d(maps.nan_to_num()[None], shown)[0]
    zoom = high // shown[0] if shown[0] > 1 else _LEAST, wide // shown[1]
    return tile([draw_map(scale_values(one), *zoom) for one in maps], len(maps))


def _tensor(value: Any, name: str, part: int | None) -> Tensor:
    tensors = list(tensors_in(value))
    if not tensors:
        raise BadQuery(f"{name!r} returned no tensor, so there is nothing to draw")
    if part is None and len(tensors) > 1:
        raise BadQuery(
            f"{name!r} returned {len(tensors)} tensors: "
            f"expected part= from {-len(tensors)} to {len(tensors) - 1}, got None"
        )
    tensor = pick(tensors, part or 0, "part").detach().cpu()
    return tensor.abs().float() if tensor.is_complex() else tensor.float()


def _maps(value: Tensor, grid: tuple[int, int] | None) -> Tensor:
    """Return the maps of a sample, (maps, height, width); channels of one value each are one row."""
    if value.dim() == 3 and value.shape[1:].numel() == 1:
        value = value.flatten()
    if value.dim() == 3:
        return value
    if value.dim() == 1:
        return value[None, None]
    return value[None] if grid is None else arrange_patches(value, grid).permute(2, 0, 1)

"""Draw activations: the channels of a layer side by side."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from microtome.engine.pytree import tensors_in
from microtome.errors import BadQuery
from microtome.report.pictures.pixels import Picture, arrange_patches, draw_map, pick, scale_values, tile
from microtome.units import shape

#: The height or width of a map in pixels, about: of several, and of a single one.
_SMALL, _LARGE = 48, 384
#: The least height of a row of values in pixels.
_LEAST = 16


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
    """Return the maps of a sample, (maps, height, width)."""
    if value.dim() == 3:
        return value
    if value.dim() == 1:
        return value[None, None]
    return value[None] if grid is None else arrange_patches(value, grid).permute(2, 0, 1)

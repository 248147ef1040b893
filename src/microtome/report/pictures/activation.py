"""Activations as pictures: the channels of a layer side by side."""

from __future__ import annotations

from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from microtome.engine.pytree import tensors_in
from microtome.errors import BadQuery
from microtome.report.pictures.pixels import Picture, as_bytes, colour, scale_values, tile
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
        raise BadQuery(f"channels are scaled 'each' by itself or 'all' together, got {scale!r}")
    if not isinstance(channels, int) or channels < 1:
        raise BadQuery(f"channels are 1 or more, got {channels!r}")
    maps = _maps(_sample(_tensor(value, name, part), name, sample), name, grid)[:channels]
    maps = torch.stack([scale_values(one) for one in maps]) if scale == "each" else scale_values(maps)
    times = max(1, (_SMALL if len(maps) > 1 else _LARGE) // max(maps.shape[1:]))
    tall = max(times, _LEAST // maps.shape[1])
    drawn = [as_bytes(colour(one.repeat_interleave(tall, 0).repeat_interleave(times, 1))) for one in maps]
    return tile(drawn)


def _tensor(value: Any, name: str, part: int | None) -> Tensor:
    found = list(tensors_in(value))
    if not found:
        raise BadQuery(f"{name!r} gave no tensor, so there is nothing to draw")
    if part is None and len(found) > 1:
        raise BadQuery(f"{name!r} gave {len(found)} tensors: say which to draw, with part=0 to part={len(found) - 1}")
    if part is not None and not 0 <= index(part) < len(found):
        raise BadQuery(f"{name!r} gave {len(found)} tensors, and none is part {part}")
    tensor = found[part or 0].detach().cpu()
    return tensor.abs().float() if tensor.is_complex() else tensor.float()


def _sample(tensor: Tensor, name: str, sample: int) -> Tensor:
    if not 2 <= tensor.dim() <= 4 or not tensor.numel():
        raise BadQuery(
            f"{name!r} is of shape {shape(tensor.shape)}: what can be drawn is (batch, channels, height, width), "
            "(batch, tokens, channels) or (batch, channels)"
        )
    if not -len(tensor) <= index(sample) < len(tensor):
        raise BadQuery(f"there is no sample {sample}: {name!r} has {len(tensor)}")
    return tensor[sample]


def _maps(value: Tensor, name: str, grid: tuple[int, int] | None) -> Tensor:
    """The maps of a sample, (maps, height, width)."""
    if value.dim() == 3:
        return value
    if value.dim() == 1:
        return value[None, None]
    if grid is None:
        return value[None]
    try:
        height, width = map(index, grid)
    except (TypeError, ValueError) as error:
        raise BadQuery(f"a grid is (patches in height, in width), got {grid!r}") from error
    if height < 1 or width < 1 or height * width > len(value):
        raise BadQuery(f"a grid of {height} x {width} patches cannot be made of the {len(value)} tokens of {name!r}")
    return value[len(value) - height * width :].T.reshape(-1, height, width)

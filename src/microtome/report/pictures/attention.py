"""Attention as a picture: the weights of one query over the image."""

from __future__ import annotations

import math
from operator import index
from typing import Any, Literal, SupportsFloat

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from microtome.capture.attention.attention import Attention
from microtome.errors import BadQuery
from microtome.report.pictures.pixels import Picture, as_bytes, colour, scale_values, tile

#: The height or width of a map without an image in pixels, about.
_SIZE = 224


def plot(
    attention: Attention,
    image: Any = None,
    *,
    layer: int | str = -1,
    head: int | Literal["all"] | None = None,
    row: int = 0,
    grid: tuple[int, int] | None = None,
    sample: int = 0,
    alpha: float = 0.6,
) -> Picture:
    """Draw the weights of one query. `Attention.plot` describes the options."""
    chosen = attention[layer] if isinstance(layer, str) else _pick(attention.by_layer, layer, "layer")
    weights = _pick(chosen, sample, "sample")
    under = _of_sample(image, sample)
    if head == "all":
        return tile([picture(_pick(one, row, "row"), under, grid=grid, alpha=alpha).pixels for one in weights])
    heads = weights.mean(0) if head is None else _pick(weights, head, "head")
    return picture(_pick(heads, row, "row"), under, grid=grid, alpha=alpha)


def picture(values: Tensor, image: Any = None, *, grid: tuple[int, int] | None = None, alpha: float = 0.6) -> Picture:
    """One value for each token, such as a row of weights or of a rollout, as a picture.

    Tokens before those of the patches, such as the class token, are left out.
    """
    heat = scale_values(_on_grid(values.detach().float().cpu(), grid))
    if image is None:
        times = max(1, _SIZE // max(heat.shape))
        return Picture(as_bytes(colour(heat.repeat_interleave(times, 0).repeat_interleave(times, 1))))
    if not isinstance(alpha, SupportsFloat) or not 0 <= alpha <= 1:
        raise BadQuery(f"alpha is from 0 (the image alone) to 1 (the map alone), got {alpha!r}")
    under = _as_image(image)
    size = under.shape[0], under.shape[1]
    heat = F.interpolate(heat[None, None], size=size, mode="bilinear", align_corners=False)[0, 0]
    return Picture(as_bytes(torch.lerp(under, colour(heat), alpha)))


def _pick(several: Any, at: Any, what: str) -> Tensor:
    try:
        position = index(at)
    except TypeError as error:
        raise BadQuery(f"a {what} is named by its position, got {at!r}") from error
    if not -len(several) <= position < len(several):
        raise BadQuery(f"there is no {what} {position}: {len(several)} were kept")
    return several[position]


def _of_sample(image: Any, sample: int) -> Any:
    if image is None:
        return None
    pixels = _pixels(image)
    return pixels if pixels.dim() != 4 else _pick(pixels, sample, "image")


def _pixels(image: Any) -> Tensor:
    """An image, or several, as a tensor."""
    if hasattr(image, "convert") and hasattr(image, "tobytes"):  # one of PIL, of whatever mode
        width, height = image.size
        return torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8).view(height, width, 3)
    try:
        return torch.as_tensor(image)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(image).__name__
        raise BadQuery(f"an image is a tensor, an array or an image of PIL, got a {kind}") from error


def _on_grid(values: Tensor, grid: tuple[int, int] | None) -> Tensor:
    side = math.isqrt(len(values))
    try:
        height, width = grid or (side, side)
    except (TypeError, ValueError) as error:
        raise BadQuery(f"a grid is (patches in height, in width), got {grid!r}") from error
    if height < 1 or width < 1 or height * width > len(values):
        raise BadQuery(f"a grid of {height} x {width} patches cannot be made of {len(values)} tokens")
    return values[len(values) - height * width :].view(height, width)


def _as_image(image: Any) -> Tensor:
    """Convert an image to (height, width, 3), floats between 0 and 1."""
    pixels = _pixels(image).detach().cpu()
    if pixels.dim() == 2:
        pixels = pixels[..., None]
    elif pixels.dim() == 3 and pixels.shape[0] in (1, 3):
        pixels = pixels.permute(1, 2, 0)
    if pixels.dim() != 3 or pixels.shape[2] not in (1, 3):
        raise BadQuery(f"an image is (3, H, W), (H, W, 3) or (H, W), got {tuple(pixels.shape)}")
    light = pixels / 255 if _are_bytes(pixels) else scale_values(pixels.float())
    return light.expand(*light.shape[:2], 3)


def _are_bytes(pixels: Tensor) -> bool:
    """Whether all values are integers from 0 to 255, of any integer dtype."""
    whole = not pixels.is_floating_point() and not pixels.is_complex() and pixels.dtype != torch.bool
    return whole and (not pixels.numel() or (int(pixels.min()) >= 0 and int(pixels.max()) <= 255))

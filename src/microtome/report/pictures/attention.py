"""Draw attention: a map of queries and keys, or the weights of one query over the image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, SupportsFloat

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from microtome.capture.attention.attention import Attention, is_image
from microtome.errors import BadQuery
from microtome.inputs import Inputs
from microtome.report.pictures.pixels import (
    Picture,
    arrange_patches,
    as_bytes,
    colour,
    draw_map,
    pick,
    scale_values,
    tile,
)

#: The least height or width of a map in pixels, about: of a single one, and of one of several.
_SIZE, _SMALL = 384, 224
#: The least height of a row of tokens in pixels.
_LEAST = 24
#: The most class and register tokens before a square of patches.
_MAX_SPECIAL = 5
#: The most queries and keys of a map, and the most pixels of one in an overview, in height and in width.
_MOST, _OVERVIEW = 1024, 160


def plot(
    attention: Attention,
    image: Any,
    *,
    layer: int | str,
    head: int | Literal["all"] | None,
    row: int | None,
    grid: tuple[int, int] | None,
    sample: int,
    alpha: float,
) -> Picture:
    """Draw all queries, or the weights of one. `Attention.plot` has the options and their defaults."""
    chosen = attention[layer] if isinstance(layer, str) else pick(attention.by_layer, layer, "layer")
    weights = pick(chosen, sample, "sample")
    under = None if image is None else _pixels(image)
    if under is not None and under.dim() == 4:
        under = pick(under, sample, "image")
    if row is None and under is None and grid is None and not (attention.of_image and is_square(weights.shape[-1])):
        draw = _draw_queries
    else:
        if grid is None and under is None and not attention.of_image:
            grid = 1, weights.shape[-1]
        draw = partial(_draw_query, image=under, row=row or 0, grid=grid, alpha=alpha)
    if head == "all":
        return tile([draw(one, least=_SMALL).pixels for one in weights])
    if head is None:
        return draw(weights.mean(0), least=_SIZE)
    return draw(pick(weights, head, "head", others=', "all", or None for their mean'), least=_SIZE)


def _draw_queries(weights: Tensor, *, least: int) -> Picture:
    """Draw the weights of each query as a row of the picture, one key a column; of many tokens, averages."""
    heat = _downsample(weights, _MOST)
    zoom = max(1, least // max(heat.shape))
    return Picture(draw_map(heat, max(zoom, _LEAST // heat.shape[0]), zoom))


def _downsample(weights: Tensor, most: int) -> Tensor:
    """Scale weights (queries, keys) to between 0 and 1, averaged to at most so many in height and in width."""
    heat = weights.detach().float().cpu().nan_to_num()
    shown = min(heat.shape[0], most), min(heat.shape[1], most)
    return scale_values(F.adaptive_avg_pool2d(heat[None, None], shown)[0, 0])


def _draw_query(weights: Tensor, *, row: int, least: int, **options: Any) -> Picture:
    return picture(pick(weights, row, "row"), least=least, **options)


def overview(weights: Tensor) -> Picture:
    """Draw the weights of the first sample: the mean of the heads over queries and keys; of one query, each head."""
    first = weights[0].float()
    heat = _downsample(first[:, 0] if first.shape[1] == 1 else first.mean(0), _OVERVIEW)
    zoom = _OVERVIEW // max(heat.shape)
    return Picture(draw_map(heat, zoom, zoom))


def picture(
    values: Tensor,
    image: Any = None,
    *,
    grid: tuple[int, int] | None = None,
    alpha: float = 0.6,
    least: int = _SIZE,
) -> Picture:
    """Draw one value for each token, such as a row of weights or of a rollout.

    Args:
        grid: None: a square of patches if the tokens are one, else a single row of tokens.
        least: The height or width of the picture in pixels, about: a smaller image is enlarged.
    """
    grid = _infer_grid(len(values), over_image=image is not None) if grid is None else grid
    heat = scale_values(arrange_patches(values.detach().float().cpu(), grid))
    if image is None:
        zoom = max(1, least // max(heat.shape))
        return Picture(draw_map(heat, max(zoom, _LEAST // heat.shape[0]), zoom))
    if not isinstance(alpha, SupportsFloat) or not 0 <= alpha <= 1:
        raise BadQuery(f"expected alpha from 0 (the image alone) to 1 (the map alone), got {alpha!r}")
    under = _as_image(image)
    zoom = max(1, least // max(under.shape[:2]))
    under = under.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1)
    size = under.shape[0], under.shape[1]
    heat = F.interpolate(heat[None, None], size=size, mode="bilinear", align_corners=False)[0, 0]
    return Picture(as_bytes(torch.lerp(under, colour(heat), alpha)))


def _infer_grid(tokens: int, *, over_image: bool) -> tuple[int, int]:
    """Return the square of patches after the class token, if the tokens are one; else a row, if there is no image."""
    side = math.isqrt(tokens)
    if is_square(tokens, _MAX_SPECIAL if over_image else 1):
        return side, side
    if over_image:
        raise BadQuery(f"expected grid=, the patches in height and in width: {tokens} tokens are no square, got None")
    return 1, tokens


def is_square(tokens: int, special: int = 1) -> bool:
    """Whether the tokens are a square of patches, after at most so many others."""
    side = math.isqrt(tokens)
    others = tokens - side * side
    return others < side and others <= special


def _pixels(image: Any) -> Tensor:
    """Convert an image, several, or the inputs of a model with images among them, to a tensor."""
    if isinstance(image, Inputs | Mapping):
        image = _images_in(Inputs.of(image))
    if hasattr(image, "convert") and hasattr(image, "tobytes"):  # a PIL image of any mode
        width, height = image.size
        return torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8).view(height, width, 3)
    try:
        return torch.as_tensor(image)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(image).__name__
        raise BadQuery(
            f"expected the image as a tensor, an array, a PIL image or the inputs of the model, got a {kind}"
        ) from error


def _images_in(inputs: Inputs) -> Tensor:
    values = (*inputs.args, *inputs.kwargs.values())
    images = [value for value in values if isinstance(value, Tensor) and is_image(value)]
    if len(images) != 1:
        raise BadQuery(f"expected inputs with one tensor of (batch, channels, height, width), got {inputs}")
    return images[0]


def _as_image(image: Any) -> Tensor:
    """Convert an image to (height, width, 3), floats between 0 and 1."""
    pixels = _pixels(image).detach().cpu()
    if pixels.dim() == 2:
        pixels = pixels[..., None]
    elif pixels.dim() == 3 and pixels.shape[0] in (1, 3):
        pixels = pixels.permute(1, 2, 0)
    if pixels.dim() != 3 or pixels.shape[2] not in (1, 3):
        raise BadQuery(f"expected an image of (3, H, W), (H, W, 3) or (H, W), got {tuple(pixels.shape)}")
    light = pixels / 255 if _are_bytes(pixels) else scale_values(pixels.float())
    return light.expand(*light.shape[:2], 3)


def _are_bytes(pixels: Tensor) -> bool:
    """Whether all values are integers from 0 to 255, of any integer dtype."""
    whole = not pixels.is_floating_point() and not pixels.is_complex() and pixels.dtype != torch.bool
    return whole and (not pixels.numel() or (int(pixels.min()) >= 0 and int(pixels.max()) <= 255))

"""Convert PIL images to inputs."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from microtome.errors import BadInputs

#: The number of channels of each mode with 8 bits per channel.
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4, "YCbCr": 3, "HSV": 3, "LAB": 3}


def is_image(value: Any) -> bool:
    """Return whether a value is a PIL image, without importing PIL."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def image_to_tensor(image: Any, input_size: tuple[int, ...] | None, device: str) -> Tensor:
    """Return a batch of one image, resized to the input size of the model, with values from 0 to 1.

    Args:
        input_size: Channels, height and width.
    """
    if input_size is None or len(input_size) != 3:
        raise BadInputs(f"an image is channels x height x width, and the model's input is {input_size}: pass a tensor")
    channels, height, width = input_size
    if _CHANNELS.get(image.mode) != channels:
        mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(channels)
        hint = f": image.convert({mode!r})" if mode else ""
        raise BadInputs(f"expected an image of {channels} channels of 8 bits, got mode {image.mode!r}{hint}")
    if image.size != (width, height):
        image = image.resize((width, height))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, channels)
    batch = pixels.permute(2, 0, 1)[None].contiguous()
    return (batch.to(torch.get_default_dtype()) / 255).to(device)

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.capture.attention.attention import Attention
from microtome.errors import BadQuery
from microtome.report.pictures.attention import picture
from microtome.report.pictures.pixels import png

DARK, LIGHT = (0x44, 0x01, 0x54), (0xFD, 0xE7, 0x25)


def read_png(data: bytes) -> Tensor:
    """The pixels of a PNG of one IDAT chunk, read by the format's rules, the sums checked."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        body = data[at + 4 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(body)
        chunks[body[:4]] = body[4:]
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0]
    lines = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8).view(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    return lines[:, 1:].view(height, width, 3)


def one_hot(tokens: int, at: int, heads: int = 2) -> Attention:
    """One layer in which every query looks at one token, but those of the second head at the last."""
    weights = torch.zeros(1, heads, tokens, tokens)
    weights[:, 0, :, at] = 1
    weights[:, 1:, :, -1] = 1
    return Attention(("attn",), (weights,))


def test_a_png_holds_the_pixels() -> None:
    pixels = torch.randint(256, (5, 7, 3), dtype=torch.uint8)
    assert torch.equal(read_png(png(pixels)), pixels)


def test_the_map_alone_has_one_square_for_each_patch() -> None:
    # 1 + 2 x 2 tokens; token 2 is the second patch, at the upper right
    pixels = read_png(one_hot(5, 2).plot(head=0)._repr_png_())
    assert pixels.shape == (384, 384, 3)
    assert tuple(pixels[10, 200].tolist()) == LIGHT
    assert {tuple(pixels[y, x].tolist()) for y, x in [(10, 10), (200, 10), (200, 200)]} == {DARK}


def test_tokens_of_text_are_a_map_of_queries_and_keys() -> None:
    found = replace(one_hot(16, 3), of_image=False)  # a sequence of 16 tokens, not 4 x 4 patches
    pixels = found.plot(head=0).pixels
    assert pixels.shape == (384, 384, 3)
    assert {tuple(pixel.tolist()) for pixel in pixels[:, 3 * 24 + 5]} == {LIGHT}  # every query looks at key 3
    assert {tuple(pixel.tolist()) for pixel in pixels[:, 4 * 24 + 5]} == {DARK}
    assert found.plot(head=0, row=2).pixels.shape == (24, 384, 3)  # one query is a row of tokens
    assert found.plot(head="all").pixels.shape[:2] == (224, 2 * 224 + 2)
    assert replace(one_hot(7, 3), of_image=True).plot().pixels.shape == (7 * 54, 7 * 54, 3)  # no square
    long = Attention(("attn",), (torch.rand(1, 1, 3000, 3000),), of_image=False)
    assert long.plot().pixels.shape == (1024, 1024, 3)


def test_a_model_that_takes_no_image_has_no_patches() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    assert not mt.attention(layer, torch.randn(1, 16, 8)).of_image
    assert not mt.attention(layer, torch.randn(1, 16, 8))[:1].of_image
    assert mt.attention(*zoo.build("tiny-vit")).of_image


def test_heads_are_averaged_unless_one_is_chosen() -> None:
    both = one_hot(5, 2).plot().pixels
    assert torch.equal(both[10, 200], both[200, 200])
    assert tuple(one_hot(5, 2).plot(head=1).pixels[200, 200].tolist()) == LIGHT


@pytest.mark.parametrize(
    "image",
    [
        torch.zeros(3, 8, 12),
        torch.zeros(8, 12, 3),
        torch.zeros(8, 12),
        torch.zeros(1, 3, 8, 12),
        torch.zeros(3, 8, 12, dtype=torch.uint8),
        [[0.0] * 12] * 8,
        mt.Inputs(torch.zeros(1, 3, 8, 12)),
        {"ids": torch.zeros(1, 4, dtype=torch.int64), "pixel_values": torch.zeros(1, 3, 8, 12)},
    ],
)
def test_images_of_all_layouts(image: Any, tmp_path: Path) -> None:
    file = tmp_path / "map.png"
    assert one_hot(5, 1).to_png(file, image, head=0, alpha=1.0) == str(file)
    pixels = read_png(file.read_bytes())
    assert pixels.shape == (8 * 32, 12 * 32, 3)  # a small image is enlarged to 384 pixels
    assert tuple(pixels[0, 0].tolist()) == LIGHT
    assert tuple(pixels[-1, -1].tolist()) == DARK


def test_an_image_is_scaled_between_its_least_and_greatest_and_blended() -> None:
    image = torch.tensor([[-2.0, 2.0], [0.0, 2.0]])
    under = one_hot(5, 1).plot(image, alpha=0.0).pixels[::192, ::192]
    assert under[..., 0].tolist() == [[0, 255], [128, 255]]
    over = one_hot(5, 1).plot(image, head=0, alpha=0.5).pixels
    assert over[0, 0].tolist() == [round(channel / 2) for channel in LIGHT]
    coloured = torch.randint(256, (3, 4, 4), dtype=torch.uint8)
    assert torch.equal(picture(torch.rand(4), coloured, alpha=0.0, least=1).pixels, coloured.permute(1, 2, 0))


def test_the_map_is_smooth_over_the_image() -> None:
    # The largest value lies between the first and the second patch of four: the colours between are there too
    pixels = picture(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.zeros(16, 16), alpha=1.0).pixels
    assert len({tuple(pixel.tolist()) for pixel in pixels[8]}) > 6


def test_a_grid_may_be_given() -> None:
    values = torch.tensor([9.0, 0, 0, 0, 0, 0, 1])
    pixels = picture(values, grid=(2, 3)).pixels
    assert pixels.shape == (2 * 128, 3 * 128, 3)
    assert tuple(pixels[-1, -1].tolist()) == LIGHT
    with pytest.raises(BadQuery, match="expected a grid of at most 7 patches, one a token, got 3 x 3"):
        picture(values, grid=(3, 3))


def test_tokens_that_are_no_square_of_patches_are_one_row() -> None:
    assert picture(torch.arange(7.0)).pixels.shape == (384 // 7, 7 * (384 // 7), 3)
    assert picture(torch.arange(198.0)).pixels.shape == (24, 198, 3)
    for tokens in (4, 5):  # a class token and 2 x 2 patches
        assert picture(torch.arange(float(tokens))).pixels.shape == (384, 384, 3)


def test_over_an_image_a_grid_is_asked_for_unless_the_patches_are_a_square() -> None:
    image = torch.rand(3, 8, 8)
    picture(torch.arange(16.0 * 16 + 5), image)  # a class token and four registers
    with pytest.raises(BadQuery, match="expected grid=, the patches in height and in width: 7 tokens are no square"):
        picture(torch.arange(7.0), image)


@pytest.mark.parametrize(("tokens", "grid", "left"), [(16, (2, 2), 12), (197, (10, 10), 97)])
def test_a_grid_that_leaves_out_most_tokens_is_refused(tokens: int, grid: tuple[int, int], left: int) -> None:
    with pytest.raises(BadQuery, match=f"expected a grid of all {tokens} tokens, .* which leaves out {left}$"):
        picture(torch.arange(float(tokens)), grid=grid)


def test_weights_that_are_all_the_same_are_dark() -> None:
    assert {tuple(p.tolist()) for p in picture(torch.ones(4)).pixels.flatten(0, 1)} == {DARK}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 1}, "expected a layer from 0 to 0, got 1"),
        ({"layer": 0.5}, "expected the position of a layer, got 0.5"),
        ({"head": "first"}, "expected the position of a head, \"all\", or None for their mean, got 'first'"),
        (
            {"image": "cat.png"},
            "expected the image as a tensor, an array, a PIL image or the inputs of the model, got a str",
        ),
        (
            {"image": {"ids": torch.zeros(1, 4)}},
            r"expected inputs with one tensor of \(batch, channels, height, width\), got Inputs\(ids=1x4",
        ),
        ({"head": 2}, "expected a head from 0 to 1, got 2"),
        ({"row": 5}, "expected a row from 0 to 4, got 5"),
        ({"sample": 1}, "expected a sample from 0 to 0, got 1"),
        (
            {"image": torch.zeros(5, 6, 7)},
            r"expected an image of \(3, H, W\), .* or \(H, W\), got \(5, 6, 7\)",
        ),
        ({"image": torch.zeros(5, 6), "alpha": 2}, "expected alpha from 0"),
        ({"image": torch.zeros(5, 6), "alpha": "much"}, "expected alpha from 0"),
        ({"grid": 3}, "expected grid to be the patches in height and in width, got 3"),
    ],
)
def test_bad_questions_are_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadQuery, match=message):
        one_hot(5, 1).plot(**options)


def test_a_picture_says_its_size() -> None:
    assert repr(picture(torch.ones(4), torch.zeros(3, 4, 6), least=6)) == "<Picture, 6 wide, 4 high>"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_whole_numbers_up_to_255_are_bytes_of_whatever_dtype(dtype: torch.dtype) -> None:
    image = torch.tensor([[0, 51], [102, 204]], dtype=dtype)
    pixels = picture(torch.rand(4), image, alpha=0.0, least=1).pixels
    assert pixels[..., 0].tolist() == [[0, 51], [102, 204]]


def test_other_whole_numbers_are_scaled() -> None:
    # the least is black and the greatest white
    pixels = picture(torch.rand(4), torch.tensor([[-100, 155], [1000, 450]]), alpha=0.0, least=1).pixels
    assert pixels[..., 0].tolist() == [[0, 59], [255, 128]]
    pixels = picture(torch.rand(4), torch.tensor([[True, False]]), alpha=0.0, least=1).pixels
    assert pixels[..., 0].tolist() == [[255, 0]]


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_images_of_pil_are_drawn_on(mode: str) -> None:
    from PIL import Image

    image = Image.new("RGB", (6, 4), (204, 204, 204)).convert(mode)
    pixels = one_hot(5, 1).plot(image, alpha=0.0).pixels
    assert pixels.shape == (4 * 64, 6 * 64, 3)
    assert set(pixels.flatten().tolist()) == {204}

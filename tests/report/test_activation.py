"""Activations as pictures."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.capture.attention.attention import Attention
from microtome.capture.features import Features
from microtome.errors import BadQuery
from microtome.report.pictures.activation import plot
from microtome.report.pictures.pixels import tile

DARK, LIGHT = [0x44, 0x01, 0x54], [0xFD, 0xE7, 0x25]


def pixel(picture: Any, y: int, x: int) -> list[int]:
    found: list[int] = picture.pixels[y, x, :3].tolist()
    return found


def test_channels_stand_side_by_side_each_scaled_by_itself() -> None:
    value = torch.tensor([[[0.0, 1.0]], [[5.0, 4.0]]])[None]  # two channels of 1 x 2
    found = plot(value)
    # 96 pixels wide, 48 high; two of them make a column, with two pixels between.
    assert found.pixels.shape == (48 + 2 + 48, 96, 4)
    assert [pixel(found, 0, 0), pixel(found, 0, 95)] == [DARK, LIGHT]
    assert [pixel(found, 97, 0), pixel(found, 97, 95)] == [LIGHT, DARK]
    together = plot(value, scale="all")
    assert pixel(together, 0, 0) == DARK
    assert pixel(together, 97, 0) == LIGHT
    assert pixel(together, 0, 95) not in (DARK, LIGHT)


def test_tokens_are_lines_or_maps_on_a_grid() -> None:
    value = torch.arange(15.0).reshape(1, 5, 3)  # a class token and 2 x 2 patches, three channels
    lines = plot(value)
    assert lines.pixels.shape == (5 * 76, 3 * 76, 4)
    maps = plot(value, grid=(2, 2))
    assert maps.pixels.shape == (2 * 96 + 2, 2 * 96 + 2, 4)
    assert [pixel(maps, 0, 0), pixel(maps, 95, 95)] == [DARK, LIGHT]


def test_a_vector_is_one_line_and_what_is_not_finite_does_not_matter() -> None:
    assert plot(torch.rand(1, 1000)).pixels.shape == (24, 1000, 4)
    value = torch.rand(1, 10)
    assert torch.equal(plot(value[..., None, None]).pixels, plot(value).pixels)  # maps of one value each
    found = plot(torch.tensor([[0.0, float("nan"), 2.0]]))
    assert [pixel(found, 0, 0), pixel(found, 0, 383 // 3 * 3)] == [DARK, LIGHT]


def test_features_are_written(tmp_path: Path) -> None:
    model, x = zoo.build("tiny-resnet")
    feats = mt.extract(model, x, ["layer1.*"])
    assert feats.to_png(tmp_path / "a.png", "layer1.0", channels=4) == str(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    # Four maps of 32 x 32, each value three pixels wide, make two rows of two.
    assert feats.plot("layer1.0", channels=4).pixels.shape == (2 * 96 + 2, 2 * 96 + 2, 4)


def test_tensors_of_a_recording_are_drawn(tmp_path: Path) -> None:
    model, x = zoo.build("tiny-resnet")
    with mt.record(model, "stem", to=tmp_path / "acts"):
        model(x)
    with mt.load(tmp_path / "acts") as recording:
        assert recording["stem"].plot(0, channels=1).pixels.shape == (384, 384, 4)


class Several:
    pair = (torch.zeros(1, 2), torch.ones(1, 3))


def test_a_negative_part_counts_from_the_last() -> None:
    assert (plot(Several.pair, "x", part=-1).pixels == plot(Several.pair, "x", part=1).pixels).all()


@pytest.mark.parametrize(
    ("value", "options", "words"),
    [
        (Several.pair, {}, "'x' returned 2 tensors: expected part= from -2 to 1, got None"),
        (Several.pair, {"part": 2}, "expected a part from 0 to 1, got 2"),
        ("text", {}, "'x' returned no tensor"),
        (torch.zeros(3), {}, "expected 'x' to be (batch, channels, height, width), "),
        (torch.zeros(1, 2, 3, 4, 5), {}, "got 1x2x3x4x5"),
        (torch.zeros(2, 3), {"sample": 2}, "expected a sample from 0 to 1, got 2"),
        (torch.zeros(2, 3), {"channels": 0}, "expected channels of 1 or more, got 0"),
        (torch.zeros(2, 3), {"scale": "log"}, "expected scale to be 'each' or 'all', got 'log'"),
        (torch.zeros(1, 5, 3), {"grid": (3, 2)}, "expected a grid of at most 5 patches, one a token, got 3 x 2"),
        (torch.zeros(1, 5, 3), {"grid": 4}, "expected grid to be the patches in height and in width, got 4"),
    ],
)
def test_wrong_words_are_told(value: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadQuery, match=re.escape(words)):
        plot(value, "x", **options)


def test_a_part_can_be_chosen() -> None:
    assert plot(Several.pair, "x", part=1).pixels.shape[1] == 384


def test_pictures_are_tiled_row_by_row() -> None:
    ones: list[Tensor] = [torch.full((2, 2, 3), at) for at in range(3)]
    sheet = tile(ones, columns=2).pixels
    assert sheet.shape == (6, 6, 4)
    assert [int(sheet[0, 0, 0]), int(sheet[0, 4, 0]), int(sheet[4, 0, 0])] == [0, 1, 2]
    alpha = sheet[..., 3]
    assert int(alpha.sum()) == 3 * 2 * 2 * 255  # the gaps and the place of a fourth have the colour of the page
    assert not alpha[4:, 4:].any()


def test_all_heads_stand_side_by_side() -> None:
    weights = torch.rand(1, 4, 5, 5)
    found = Attention(("a",), (weights,)).plot(head="all")
    assert found.pixels.shape == (224 * 2 + 2, 224 * 2 + 2, 4)


def test_features_and_series_have_the_same_options() -> None:
    options = {
        name: option for name, option in signature(plot).parameters.items() if option.kind is option.KEYWORD_ONLY
    }
    of_features = signature(Features.plot).parameters
    assert options == {name: option for name, option in of_features.items() if option.kind is option.KEYWORD_ONLY}


def test_a_picture_is_not_written_under_the_name_of_another_format(tmp_path: Path) -> None:
    picture = mt.extract(nn.Conv2d(3, 2, 3), torch.ones(1, 3, 8, 8), "").plot("")
    with pytest.raises(BadQuery, match=r"expected a file for a PNG picture, such as act.png, got '.*act.jpg'"):
        picture.save(tmp_path / "act.jpg")
    assert not list(tmp_path.iterdir())
    picture.save(tmp_path / "act.PNG")
    assert (tmp_path / "act.PNG").read_bytes().startswith(b"\x89PNG")

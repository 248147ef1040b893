from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from microtome.errors import BadBoundary, NoMatch, NotInstalled
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.codecs import COMPRESSORS, is_lossless, parse_codec

LOSSLESS = ["raw", "zstd", "lz4"]
LOSSY = ["fp16", "bf16", "int8", "int8_tensor"]
WIDE = [torch.float64, torch.float32]
NARROW = [torch.float16, torch.bfloat16]


def sent(tensor: Tensor, codec: str) -> Tensor:
    data = Boundary("a", "f", {"x": tensor}, {}).to_bytes(codec)
    return Boundary.from_bytes(data).tensors["x"]


def stored_bytes(tensor: Tensor, codec: str) -> int:
    return len(Boundary("a", "f", {"x": tensor}, {}).to_bytes(codec))


@st.composite
def floats(draw: st.DrawFn, dtypes: list[torch.dtype]) -> Tensor:
    """Of many magnitudes, channel by channel."""
    shape: list[int] = draw(st.lists(st.integers(1, 6), max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    powers = torch.randint(-draw(st.integers(1, 300)), 30, shape[1:2], generator=generator).double()
    if len(shape) > 1:
        numbers *= (10**powers).reshape(-1, *[1] * (len(shape) - 2))
    flip = draw(st.booleans())
    tensor = numbers.to(draw(st.sampled_from(dtypes))).nan_to_num(nan=0, posinf=0, neginf=0)
    return tensor.transpose(0, -1) if flip and shape else tensor


# -- names -----------------------------------------------------------------------------------------------------------


def test_only_codecs_without_a_lossy_step_are_lossless() -> None:
    assert all(is_lossless(name) for name in LOSSLESS)
    assert not any(is_lossless(name) for name in [*LOSSY, "fp16+zstd", "int8+lz4"])


@pytest.mark.parametrize(
    "name", ["", "zip", "zstd+fp16", "fp16+", "+zstd", "fp16+raw", "zstd+zstd", "fp16+int8", "RAW"]
)
def test_an_unknown_codec_is_an_error_that_lists_the_known(name: str) -> None:
    with pytest.raises(NoMatch, match=r"known: raw, zstd, lz4, fp16, bf16, int8, int8_tensor, and such as fp16\+zstd"):
        parse_codec(name)


@pytest.mark.parametrize(("codec", "package"), [("zstd", "zstandard"), ("lz4", "lz4")])
def test_a_missing_package_is_an_error_that_names_the_extra(
    codec: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Boundary("a", "f", {"x": torch.zeros(100)}, {}).to_bytes(codec)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.block", None)
    message = rf"codec '{codec}' needs {package}, which is not installed: pip install 'microtome\[remote\]'"
    with pytest.raises(NotInstalled, match=message):
        sent(torch.zeros(100), codec)
    with pytest.raises(NotInstalled, match=message):
        Boundary.from_bytes(data)


# -- errors within their bounds --------------------------------------------------------------------------------------


@given(floats(WIDE))
def test_fp16_errs_by_half_a_step_at_most(tensor: Tensor) -> None:
    # 11 bits of precision: half a step is 2**-11 of the number; below 2**-14 steps are 2**-24 wide.
    bound = torch.maximum(tensor.abs() * 2**-11, torch.tensor(2.0**-25, dtype=tensor.dtype))
    assert ((sent(tensor, "fp16") - tensor).abs() <= bound).all()


@given(floats(WIDE))
def test_bf16_errs_by_half_a_step_at_most(tensor: Tensor) -> None:
    # 8 bits of precision; below 2**-126 steps are 2**-133 wide. Compared in float64: float32 may flush such numbers.
    exact = tensor.double()
    bound = torch.maximum(exact.abs() * 2**-8, torch.tensor(2.0**-134, dtype=torch.float64))
    assert ((sent(tensor, "bf16").double() - exact).abs() <= bound).all()


@given(floats([*WIDE, *NARROW]))
def test_int8_of_a_tensor_errs_by_half_its_scale_at_most(tensor: Tensor) -> None:
    got = sent(tensor, "int8_tensor")
    assert_within_half_a_scale(tensor, got, tensor.double().abs().amax())


@given(floats([*WIDE, *NARROW]))
def test_int8_of_channels_errs_by_half_the_scale_of_each_at_most(tensor: Tensor) -> None:
    channel = 1 if tensor.ndim >= 4 else tensor.ndim - 1
    peaks = tensor.double().abs().amax()
    if tensor.ndim >= 2 and tensor.numel() // tensor.shape[channel] >= 16:
        peaks = tensor.double().abs().amax([dim for dim in range(tensor.ndim) if dim != channel], keepdim=True)
    assert_within_half_a_scale(tensor, sent(tensor, "int8"), peaks)


def assert_within_half_a_scale(tensor: Tensor, got: Tensor, peaks: Tensor) -> None:
    work = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    scales = (peaks / 127).clamp_min(torch.finfo(work).tiny)
    # To half a scale comes rounding: of scale and quotient, up to 127 times 2**-23 of a scale each, and to the dtype.
    rounding = torch.finfo(tensor.dtype).eps * tensor.double().abs() + torch.finfo(tensor.dtype).tiny
    assert got.dtype == tensor.dtype
    assert ((got.double() - tensor.double()).abs() <= scales * (0.5 + 1e-4) + rounding).all()


def test_a_channel_is_dimension_1_of_images_and_the_last_of_tokens() -> None:
    images = torch.ones(2, 3, 4, 4) * torch.tensor([1.0, 100.0, 1e4]).reshape(3, 1, 1)
    tokens = torch.ones(4, 5, 3) * torch.tensor([1.0, 100.0, 1e4])
    for tensor in (images, tokens, tokens.reshape(20, 3)):
        assert torch.allclose(sent(tensor, "int8"), tensor)
        assert not torch.allclose(sent(tensor, "int8_tensor"), tensor)


def test_few_values_share_one_scale_rather_than_have_one_each() -> None:
    row = torch.randn(1, 1000)
    assert stored_bytes(row, "int8") == pytest.approx(1000, abs=400)


# -- what a lossy step leaves as it is -------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [*LOSSY, "fp16+zstd", "int8+lz4"])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(-50, 50),
        torch.arange(100, dtype=torch.uint8),
        torch.arange(100) % 3 == 0,
        torch.randn(40, dtype=torch.complex64),
        torch.randn(40).to(torch.float8_e5m2),
        torch.zeros(0, 3),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_a_lossy_codec_loses_nothing_of_other_kinds(codec: str, tensor: Tensor) -> None:
    got = sent(tensor, codec)
    assert got.dtype == tensor.dtype
    assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(("codec", "number"), [("fp16", 65520.0), ("fp16", -1e30), ("bf16", 3.4e38)])
def test_a_cast_that_would_overflow_is_not_made(codec: str, number: float) -> None:
    tensor = torch.tensor([0.1, number, float("inf")])
    assert torch.equal(sent(tensor, codec), tensor)


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_infinities_and_nan_are_cast_to_themselves(codec: str) -> None:
    tensor = torch.tensor([0.1, float("inf"), -float("inf"), float("nan")])
    got = sent(tensor, codec)
    assert not torch.equal(got[0], tensor[0])
    assert torch.equal(got[1:3], tensor[1:3])
    assert got[3].isnan()


@pytest.mark.parametrize("codec", ["int8", "int8_tensor"])
@pytest.mark.parametrize("number", [float("inf"), -float("inf"), float("nan"), 3.4e38])
def test_int8_leaves_a_tensor_with_what_it_cannot_scale(codec: str, number: float) -> None:
    tensor = torch.tensor([0.1, number, 0.3]).repeat(7, 40)
    assert torch.equal(sent(tensor, codec).view(torch.int32), tensor.view(torch.int32))


@pytest.mark.parametrize("codec", ["int8", "int8_tensor"])
def test_zeros_and_the_smallest_numbers_become_numbers(codec: str) -> None:
    tensor = torch.tensor([[0.0, 1e-45, 1e-42, 2e-38]]).repeat(20, 1)
    got = sent(tensor, codec).double()
    assert ((got - tensor.double()).abs() <= 1.2e-38).all()


# -- compression -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compression_pays_or_is_left_out(codec: str) -> None:
    zeros, noise = torch.zeros(3_000_000), torch.randint(0, 256, (10_000,), dtype=torch.uint8)
    assert stored_bytes(zeros, codec) < zeros.nbytes / 100
    assert torch.equal(sent(zeros, codec), zeros)
    assert stored_bytes(noise, codec) == stored_bytes(noise, "raw") == pytest.approx(noise.nbytes, abs=400)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@given(data=st.binary(max_size=3000), times=st.integers(1, 3))
def test_compressors_restore_their_input(codec: str, data: bytes, times: int) -> None:
    compressor = COMPRESSORS[codec]
    room = bytearray(len(data) * times)
    compressor.decompress(memoryview(compressor.compress(memoryview(data * times))), memoryview(room))
    assert room == data * times


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("room", [0, 1, 999, 1001, 1 << 21])
def test_compressors_raise_if_the_data_does_not_fill_the_target_exactly(codec: str, room: int) -> None:
    packed = COMPRESSORS[codec].compress(memoryview(bytes(1000)))
    with pytest.raises(Exception, match=r"."):
        COMPRESSORS[codec].decompress(memoryview(packed), memoryview(bytearray(room)))


def test_a_forged_look_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # A window of 64 MiB, which a decompressor would have to set aside.
    import zstandard

    parameters = zstandard.ZstdCompressionParameters(window_log=26, write_content_size=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    forged = compressor.compress(bytes(1000)) + compressor.flush()
    monkeypatch.setattr(type(COMPRESSORS["zstd"]), "compress", lambda self, data: forged)
    data = Boundary("a", "f", {"x": torch.zeros(250)}, {}).to_bytes("zstd")
    with pytest.raises(BadBoundary, match=r"cannot decompress a tensor with zstd"):
        Boundary.from_bytes(data)

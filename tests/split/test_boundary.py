from __future__ import annotations

import json
import math
import re
import struct
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from microtome.errors import BadBoundary, BadQuery, MicrotomeError
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.serialization import DTYPES
from microtome.split.boundary.tensor_bytes import BLOCK
from microtome.units import parse_size, size
from tests.marks import slow

LOSSY = ["fp16", "bf16", "int8", "int8_tensor"]
ALL_LOSSY = [lossy + packer for lossy in LOSSY for packer in ("", "+zstd", "+lz4")]
LOSSLESS = ["raw", "zstd", "lz4"]
PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def bits(tensor: Tensor) -> list[int]:
    """The bytes of the values, in the order of their indices."""
    plain = tensor.resolve_conj().resolve_neg().view(PLAIN[tensor.itemsize])
    # Not .contiguous(), which leaves any stride to a dimension of one element.
    flat = torch.empty(tensor.shape, dtype=plain.dtype).copy_(plain).reshape(-1)
    values: list[int] = flat.view(torch.uint8).tolist()
    return values


def of(*tensors: Tensor, **facts: Any) -> Boundary:
    return Boundary("layer2.0.conv1", "8d1f", {f"t{number}": tensor for number, tensor in enumerate(tensors)}, facts)


def again(boundary: Boundary, codec: str = "raw") -> Boundary:
    return Boundary.from_bytes(boundary.to_bytes(codec))


@contextmanager
def allocations() -> Iterator[Callable[[], int]]:
    """Asks for what was allocated inside at most, by Python together with all that torch was asked for."""

    class Counted(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, Tensor) and made._base is None and not func._schema.is_mutable:
                self.nbytes += made.untyped_storage().nbytes()
            return made

    tracemalloc.start()
    try:
        with Counted() as counted:
            yield lambda: counted.nbytes + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# -- round trips -----------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, any bits, any strides."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    count = math.prod(shape)
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    values = torch.tensor(list(raw), dtype=torch.uint8)
    if dtype == torch.bool:
        values %= 2
    tensor = values.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=PLAIN[dtype.itemsize]).view(dtype)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    change = draw(st.sampled_from(["none", "none", "slice", "expand", "step", "conj", "offset", "unfold"]))
    if change == "slice" and shape:
        tensor = tensor[1:]
    elif change == "step" and shape:
        tensor = tensor[..., ::2]
    elif change == "offset" and shape:
        tensor = tensor[..., 1:]
    elif change == "unfold" and shape:
        tensor = tensor.unfold(0, min(2, len(tensor)), 1)
    elif change == "expand":
        tensor = tensor.expand(2, *tensor.shape)
    elif change == "conj" and dtype in (torch.complex64, torch.complex128):
        tensor = tensor.conj()
    return tensor


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.integration
@given(st.lists(tensors(), max_size=4), st.sampled_from(LOSSLESS), st.dictionaries(st.text(), JSONS, max_size=4))
@example([torch.tensor(5)], "raw", {})
@settings(max_examples=300, deadline=None)
def test_everything_comes_back_bit_for_bit(made: list[Tensor], codec: str, facts: dict[str, Any]) -> None:
    names = [f"{'é.#' * number}{number}" for number in range(len(made))]
    before = Boundary("layer1\n#2", "ü", dict(zip(names, made, strict=True)), facts)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        after = again(before, codec)
    assert (after.at, after.fingerprint, after.facts) == (before.at, before.fingerprint, before.facts)
    assert repr(after.facts) == repr(before.facts)  # 1 and 1.0 and True are equal
    assert list(after.tensors) == names
    assert after.nbytes == before.nbytes
    for was, got in zip(made, after.tensors.values(), strict=True):
        assert (got.dtype, got.shape, got.device.type) == (was.dtype, was.shape, "cpu")
        assert bits(got) == bits(was)
        assert got.stride() == was.stride()
        assert got.data_ptr() % 64 == (was.data_ptr() % 64 if was.numel() else 0)


@given(tensors(), st.sampled_from(ALL_LOSSY))
@settings(deadline=None)
def test_lossy_codecs_keep_dtypes_shapes_and_strides(tensor: Tensor, codec: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        (got,) = again(of(tensor), codec).tensors.values()
    assert (got.dtype, got.shape, got.stride()) == (tensor.dtype, tensor.shape, tensor.stride())


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_blocks_of_any_length_come_back(count: int) -> None:
    tensor = torch.randint(0, 256, (count,), dtype=torch.uint8)
    (got,) = again(of(tensor)).tensors.values()
    assert torch.equal(got, tensor)


def test_the_payload_of_a_nan_comes_back() -> None:
    tensor = torch.tensor([0x7FC01234, 0x7F800001, -1], dtype=torch.int32).view(
        torch.float32
    )  # the second is signalling
    (got,) = again(of(tensor)).tensors.values()
    assert got.view(torch.int32).tolist() == [0x7FC01234, 0x7F800001, -1]


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (1, 3, 1, 1)])
@pytest.mark.parametrize("codec", [*LOSSLESS, *ALL_LOSSY])
def test_channels_last_stays_so(codec: str, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(memory_format=torch.channels_last)
    (got,) = again(of(tensor), codec).tensors.values()
    assert got.stride() == tensor.stride()
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_a_slice_keeps_its_strides_and_its_alignment() -> None:
    tensor = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)[:, 3:]
    (got,) = again(of(tensor)).tensors.values()
    assert torch.equal(got, tensor)
    assert (got.stride(), got.data_ptr() % 64) == (tensor.stride(), 12)


@pytest.mark.parametrize("codec", [*LOSSLESS, *ALL_LOSSY])
def test_decoded_tensors_are_writable_apart_and_aligned(codec: str) -> None:
    shared = torch.randn(1000)
    data = of(shared, shared, shared[:500]).to_bytes(codec)
    copy = bytes(bytearray(data))
    first, second, third = Boundary.from_bytes(data).tensors.values()
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (first, second, third))
    kept = second.clone(), third.clone()
    first.add_(1)
    assert torch.equal(second, kept[0])
    assert torch.equal(third, kept[1])
    assert data == copy


def test_tensors_that_require_grad_arrive_without_it() -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    for codec in ("raw", "int8"):
        got = again(of(weight * 2, weight, weight.expand(2, 3)), codec).tensors.values()
        assert not any(tensor.requires_grad for tensor in got)


def test_it_can_be_read_from_anything_that_holds_bytes() -> None:
    data = of(torch.arange(5)).to_bytes()
    for holder in (bytearray(data), memoryview(data), memoryview(bytearray(data)).cast("i")):
        (got,) = Boundary.from_bytes(holder).tensors.values()
        assert got.tolist() == [0, 1, 2, 3, 4]


def test_the_same_boundary_makes_the_same_bytes() -> None:
    boundary = of(torch.arange(5), torch.randn(3), a=1)
    assert boundary.to_bytes() == boundary.to_bytes() == again(boundary).to_bytes()


def test_it_says_how_much_it_is_and_moves() -> None:
    boundary = of(torch.zeros(2, 3), torch.zeros(1).expand(1000))
    assert boundary.nbytes == 24 + 4000
    assert repr(boundary) == "Boundary(at='layer2.0.conv1', 2 tensors, 3.93 KiB)"
    moved = boundary.to("meta")
    assert [tensor.device.type for tensor in moved.tensors.values()] == ["meta", "meta"]
    assert (moved.at, moved.facts) == (boundary.at, boundary.facts)


@pytest.mark.parametrize("codec", [*LOSSLESS, "fp16", "int8+zstd"])
def test_any_device_encodes_alike(device: str, codec: str) -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    here, there = of(tensor, tensor[:, :2]), of(tensor.to(device), tensor.to(device)[:, :2])
    for was, got in zip(again(here, codec).tensors.values(), again(there, codec).tensors.values(), strict=True):
        assert torch.allclose(was, got, atol=0.02)
        assert was.stride() == got.stride()


# -- what cannot be sent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            torch.eye(3).to_sparse(),
            r"cannot send tensor 't0': expected a strided .* got a torch.sparse_coo tensor",
        ),
        (
            torch.zeros(3, device="meta"),
            r"tensor 't0': expected a strided tensor with values, got a meta tensor",
        ),
    ],
)
def test_tensors_without_plain_memory_are_refused(tensor: Tensor, message: str) -> None:
    with pytest.raises(BadBoundary, match=message):
        of(tensor).to_bytes()


def test_quantised_tensors_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
        with pytest.raises(BadBoundary, match=r"cannot send tensor 't0' of torch.qint8: dequantize it first"):
            of(tensor).to_bytes()


def test_facts_that_would_arrive_as_something_else_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"a": [1, (2, 3)]}, r"facts\['a'\]\[1\]: expected a list, got a tuple, which JSON would not restore"),
        ({"a": {1: 2}}, r"facts\['a'\]: expected strings as keys, got 1, which JSON would make a string"),
        ({"a": torch.zeros(1)}, r"facts\['a'\]: expected a number, string, None, list or dict, got a Tensor"),
        ({"a": 10**5000}, r"the facts of the boundary cannot be encoded as JSON: ValueError"),
    ]
    for facts, message in cases:
        with pytest.raises(BadBoundary, match=message):
            of(**facts).to_bytes()
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(BadBoundary, match=r"cannot be encoded as JSON: RecursionError"):
        of(a=endless).to_bytes()
    with pytest.raises(BadBoundary, match=r"expected strings as address, fingerprint and tensor names, got 3"):
        Boundary("a", "f", {3: torch.zeros(1)}, {}).to_bytes()  # type: ignore[dict-item]


# -- damage ----------------------------------------------------------------------------------------------------------

SAMPLES = {
    codec: Boundary(
        "layer1",
        "f00d",
        {
            "a": torch.arange(70.0).repeat(4),
            "b": torch.tensor([True, False]),
            "c": torch.randn(2, 3, 4, 4),
            "d": torch.empty(0),
        },
        {"n": [1, None, {"k": "v"}]},
    ).to_bytes(codec)
    for codec in ("raw", "zstd", "lz4", "int8", "fp16+lz4")
}


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Bytes of a boundary that are not as they were."""
    whole = draw(st.sampled_from(sorted(SAMPLES.values())))
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        at, to = sorted(draw(st.tuples(st.integers(0, len(data)), st.integers(0, len(data)))))
        change = draw(st.sampled_from(["flip", "delete", "insert", "swap", "truncate", "extend", "join"]))
        if change == "flip" and data:
            data[min(at, len(data) - 1)] ^= 1 << draw(st.integers(0, 7))
        elif change == "delete":
            del data[at:to]
        elif change == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=80))
        elif change == "swap":
            data[:] = data[:at] + data[to:] + data[at:to]
        elif change == "truncate":
            del data[at:]
        elif change == "extend":
            data += bytes(draw(st.integers(1, 100)))
        else:
            other = draw(st.sampled_from(sorted(SAMPLES.values())))
            data[:] = data[:at] + other[at:]
    return bytes(data)


@pytest.mark.integration
@given(damaged())
@settings(max_examples=1500, deadline=None)
def test_damaged_bytes_never_give_a_result(data: bytes) -> None:
    if data in SAMPLES.values():
        return
    with pytest.raises(BadBoundary):
        Boundary.from_bytes(data)


@pytest.mark.parametrize("codec", ["raw", "zstd", "int8"])
def test_every_single_flipped_bit_is_found(codec: str) -> None:
    whole = SAMPLES[codec]
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << (at % 8)
        with pytest.raises(BadBoundary):
            Boundary.from_bytes(data)


@pytest.mark.parametrize("codec", ["raw", "lz4"])
def test_every_beginning_is_refused(codec: str) -> None:
    for end in range(len(SAMPLES[codec])):
        with pytest.raises(BadBoundary):
            Boundary.from_bytes(SAMPLES[codec][:end])


@given(st.binary(max_size=300))
def test_other_bytes_are_no_boundary(data: bytes) -> None:
    with pytest.raises(BadBoundary):
        Boundary.from_bytes(data)


def test_messages_say_what_is_wrong() -> None:
    data = SAMPLES["raw"]
    changed = bytearray(data)
    changed[-200] ^= 1
    header = bytearray(data)
    header[40] ^= 1
    for wrong, message in [
        (b"", r"not a boundary: expected at least 48 bytes, got 0"),
        (b"PK" + data[2:], r"not a boundary: expected .* at the start, got b'PK"),
        (
            data[:8] + b"\7" + data[9:],
            r"expected boundary version 2, got 7: install the same version",
        ),
        (data + b"\0", rf"damaged boundary: expected {len(data)} bytes, got {len(data) + 1}"),
        (data[:-1], rf"truncated boundary: expected {len(data)} bytes, got {len(data) - 1}"),
        (bytes(header), r"checksum mismatch in the header: the bytes were damaged in transit"),
        (bytes(changed), r"checksum mismatch in the tensors: the bytes were damaged in transit"),
        ("text", r"expected contiguous bytes of a boundary, got a str"),
    ]:
        with pytest.raises(BadBoundary, match=message):
            Boundary.from_bytes(wrong)  # type: ignore[arg-type]


# -- forgery: the checksums are right --------------------------------------------------------------------------------


def forge(header: Any, body: bytes = b"", *, text: bytes | None = None) -> bytes:
    """A boundary with any header, and parts that lie as one says, all of less than 256 KiB."""
    text = json.dumps(header).encode() if text is None else text
    text += b" " * (-(32 + len(text)) % 64)
    prefix = struct.pack("<8sIIQ", b"\x89MTBOUND", 2, len(text), 32 + len(text) + len(body) + 16)
    digest = xxhash.xxh3_64_digest(prefix + text)
    digests, at = [digest], 0
    entries = header.get("tensors") if isinstance(header, dict) else None
    for entry in entries if isinstance(entries, list) else []:
        parts = entry.get("parts") if isinstance(entry, dict) else None
        for part in parts if isinstance(parts, list) else []:
            count = part[0] if isinstance(part, list) and part and isinstance(part[0], int) else 0
            digests.append(xxhash.xxh3_128_digest(body[at : at + max(count, 0)]))
            at += count + -count % 64
    return prefix + digest + text + body + xxhash.xxh3_128_digest(b"".join(digests))


def header_of(*entries: Any, **others: Any) -> dict[str, Any]:
    return {"at": "a", "fingerprint": "f", "facts": {}, "tensors": list(entries), **others}


def entry(**others: Any) -> dict[str, Any]:
    """16 floats."""
    plain = {"name": "x", "dtype": "float32", "shape": [16], "strides": [1], "parts": [[64, None]]}
    return {key: value for key, value in {**plain, **others}.items() if value is not ...}


def test_what_is_forged_without_a_lie_is_read() -> None:
    body = struct.pack("<16f", *range(16))
    (got,) = Boundary.from_bytes(forge(header_of(entry()), body)).tensors.values()
    assert got.tolist() == list(range(16))


LIES: list[tuple[Any, str]] = [
    (header_of(entry(), entry()), r"duplicate tensor name in the boundary: 'x'"),
    (header_of(entry(name=3)), r"invalid header entry of tensor 0: ValueError: expected a string as name, got 3"),
    (header_of(entry(name=...)), r"invalid header entry of tensor 0: TypeError"),
    (header_of(entry(offset=0)), r"invalid header entry of tensor 0: TypeError"),
    (header_of("x"), r"invalid header entry of tensor 0: TypeError"),
    (header_of(entry(dtype="float33")), r"has no dtype 'float33'"),
    (header_of(entry(dtype="qint8")), r"has no dtype 'qint8'"),
    (header_of(entry(dtype=["float32"])), r"has no dtype"),
    (header_of(entry(shape=[17])), r"expected 68 bytes, got 64"),
    (header_of(entry(shape=[-16])), r"invalid shape \[-16\]"),
    (header_of(entry(shape=[-4, -4], strides=[4, 1])), r"invalid shape"),
    (header_of(entry(shape=[16.0])), r"invalid shape"),
    (header_of(entry(shape=[True], strides=[1])), r"invalid shape"),
    (header_of(entry(shape=[2**61, 2**61], strides=[2**61, 1])), r"no memory holds a tensor of shape"),
    (header_of(entry(shape=[2**62], strides=[1])), r"invalid shape"),
    (header_of(entry(shape=[0, 2**60], strides=[2**60, 1], parts=[[0, None]])), r"no memory holds a tensor of shape"),
    (header_of(entry(shape=[1] * 65, strides=[1] * 65)), r"invalid shape"),
    (header_of(entry(strides=[0])), r"strides \[0\] leave gaps or overlap in shape \[16\]"),
    (header_of(entry(strides=[2])), r"strides \[2\] leave gaps or overlap in shape \[16\]"),
    (header_of(entry(shape=[4, 4], strides=[1, 1])), r"leave gaps or overlap"),
    (header_of(entry(strides=[1, 1])), r"with strides \[1, 1\]"),
    (header_of(entry(strides=[-1])), r"with strides \[-1\]"),
    (header_of(entry(layout=[[1]])), r"expected strides and an offset as layout, got \[\[1\]\]"),
    (header_of(entry(layout=[[1], -1])), r"expected strides and an offset as layout, got"),
    (header_of(entry(layout=[[-1], 0])), r"expected strides and an offset as layout, got"),
    (header_of(entry(layout=[[1, 1], 0])), r"layout \[\[1, 1\], 0\] does not fit shape \[16\]"),
    (header_of(entry(layout=[[1], 16])), r"layout \[\[1\], 16\] does not fit shape \[16\]"),
    (header_of(entry(layout=[[2**40], 0])), r"decoding the boundary may take 60.0 TiB of memory, and the limit is"),
    (header_of(entry(parts=[])), r"expected 1 parts, got \[\]"),
    (header_of(entry(parts=[[64, None], [0, None]])), r"expected 1 parts, got"),
    (header_of(entry(parts=[[-64, None]])), r"expected bytes and compression of a part, got \[-64, None\]"),
    (header_of(entry(parts=[[10**30, None]])), r"expected bytes and compression of a part, got"),
    (header_of(entry(parts=[[63, None]])), r"expected 64 bytes, got 63"),
    (header_of(entry(parts=[[64, "zstd"]])), r"invalid compression 'zstd' of 64 to 64 bytes"),
    (header_of(entry(parts=[[32, "gzip"]])), r"invalid compression 'gzip'"),
    (header_of(entry(parts=[[32, ["zstd"]]])), r"invalid compression"),
    (header_of(entry(coded="float32")), r"no codec stores float32 as float32"),
    (header_of(entry(dtype="int64", shape=[8], coded="int8")), r"no codec stores int64 as int8"),
    (header_of(entry(shape=[32], coded="float16", channel=0)), r"invalid channel 0"),
    (header_of(entry(shape=[64], coded="int8", parts=[[64, None], [4, None]], channel=1)), r"invalid channel 1"),
    (header_of(entry(shape=[64], coded="int8", parts=[[64, None], [4, None]], channel=-1)), r"invalid channel -1"),
    (header_of(entry(shape=[64], coded="int8", parts=[[64, None], [8, None]])), r"expected 4 bytes, got 8"),
    (header_of(), r"the header states 0 bytes of tensors, got 64"),
    (
        header_of(entry(), entry(name="y")),
        r"the header states 128 bytes of tensors, got 64",
    ),
    (header_of(entry(), facts=[]), r"header field 'facts': expected dict, got list"),
    (header_of(entry(), at=None), r"header field 'at': expected str, got NoneType"),
    (header_of(entry(), more=1), r"expected the header fields at, fingerprint, facts, tensors, got"),
    ([], r"expected the header fields .*, got list"),
]


@pytest.mark.parametrize(("header", "message"), LIES, ids=[message for _, message in LIES])
def test_a_header_that_lies_is_refused_before_anything_is_allocated(header: Any, message: str) -> None:
    data = forge(header, bytes(64))
    with allocations() as allocated, pytest.raises(BadBoundary, match=message):
        Boundary.from_bytes(data, limit="100kB")
    assert allocated() < 100_000


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"1" * 5000, b"nul", b"[]x"]
)
def test_a_header_that_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(BadBoundary, match=r"the header is not valid JSON|expected the header fields"):
        Boundary.from_bytes(forge({}, text=text))


@pytest.mark.parametrize(
    "brick", [b"[],", b"{},", b'{"":0},', b'"ab",', b"1e1,", b'{"a":{"b":0}},', b"[[0]],", b"12345678901,"]
)
def test_the_objects_of_a_header_count_against_the_limit(brick: bytes) -> None:
    text = b'{"at":"","fingerprint":"","facts":{"x":[' + brick * 100_000 + b'0]},"tensors":[]}'
    data = forge({}, text=text)
    most = 45 * len(text)
    with allocations() as allocated:
        Boundary.from_bytes(data, limit=most)
    assert allocated() < most
    with pytest.raises(
        BadBoundary, match=r"decoding the boundary may take .* of memory, and the limit is .*: raise limit="
    ):
        Boundary.from_bytes(data, limit=most // 2)


def test_names_that_are_often_the_same_are_refused_soon() -> None:
    empty = entry(shape=[0], parts=[[0, None]])
    with pytest.raises(BadBoundary, match=r"duplicate tensor name"):
        Boundary.from_bytes(forge(header_of(*[empty] * 20_000)))


def test_something_between_tensors_is_refused() -> None:
    two = header_of(entry(shape=[1], parts=[[4, None]]), entry(name="y", shape=[1], parts=[[4, None]]))
    Boundary.from_bytes(forge(two, bytes(128)))
    with pytest.raises(BadBoundary, match=r"expected zeros between two tensors"):
        Boundary.from_bytes(forge(two, bytes(60) + b"\1" + bytes(67)))


def test_bools_that_are_neither_are_refused() -> None:
    bools = header_of(entry(dtype="bool", shape=[64]))
    with pytest.raises(BadBoundary, match=r"tensor 'x' of torch.bool: expected bytes 0 and 1"):
        Boundary.from_bytes(forge(bools, bytes([0, 1, 2]) + bytes(61)))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_scales_that_scale_nothing_are_refused(scale: float) -> None:
    scaled = header_of(entry(shape=[64], coded="int8", parts=[[64, None], [4, None]]))
    body = bytes(range(64)) + struct.pack("<f", 0.5) + bytes(60)
    (got,) = Boundary.from_bytes(forge(scaled, body)).tensors.values()
    assert got.tolist() == [number / 2 for number in range(64)]
    with pytest.raises(BadBoundary, match=r"tensor 'x': expected positive, finite scales"):
        Boundary.from_bytes(forge(scaled, bytes(64) + struct.pack("<f", scale) + bytes(60)))


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_bytes_that_unpack_to_more_or_less_than_was_said_are_refused(codec: str) -> None:
    data = of(torch.zeros(1000)).to_bytes(codec)
    length = struct.unpack_from("<I", data, 12)[0]
    header = json.loads(data[32 : 32 + length])
    for count in (999, 1001, 100_000):
        header["tensors"][0]["shape"] = [count]
        forged = forge(header, data[32 + length : -16])
        with pytest.raises(BadBoundary, match=rf"cannot decompress a tensor with {codec}"):
            Boundary.from_bytes(forged)


@given(st.data())
@settings(max_examples=500, deadline=None)
def test_forged_headers_give_an_error_or_what_they_say(data: st.DataObject) -> None:
    sample = SAMPLES[data.draw(st.sampled_from(sorted(SAMPLES)))]
    length = struct.unpack_from("<I", sample, 12)[0]
    header = json.loads(sample[32 : 32 + length])
    victim: Any = data.draw(st.sampled_from([header, *header["tensors"]]))
    odd = JSONS | st.sampled_from(
        [-1, 0, 2**31, 2**63, 1e300, [2**40, 2**40], "int8", "bool", "complex128", [[1, "lz4"]]]
    )
    victim[data.draw(st.sampled_from(sorted(victim)))] = data.draw(odd)
    try:
        got = Boundary.from_bytes(forge(header, sample[32 + length : -16]), limit="1MB")
    except MicrotomeError:
        return
    assert (got.at, got.fingerprint, got.facts) == (header["at"], header["fingerprint"], header["facts"])
    for said, (name, tensor) in zip(header["tensors"], got.tensors.items(), strict=True):
        assert (name, list(tensor.shape), str(tensor.dtype)) == (said["name"], said["shape"], f"torch.{said['dtype']}")


# -- the limit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [*LOSSLESS, "bf16+lz4", "int8", "int8_tensor+zstd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_reading_takes_no_more_than_the_limit_and_no_limit_that_suffices_is_refused_by_much(
    codec: str, dtype: torch.dtype
) -> None:
    tensor = torch.zeros(4, 16, 50, 50, dtype=dtype)
    data = of(tensor).to_bytes(codec)
    enough = 0
    for limit in range(tensor.nbytes // 2, 10 * tensor.nbytes, tensor.nbytes // 4):
        with allocations() as allocated:
            try:
                Boundary.from_bytes(data, limit=limit)
                enough = enough or limit
            except BadBoundary:
                pass
        assert allocated() <= limit + 2**20  # what a decompressor works with
    assert tensor.nbytes <= enough <= (1.3 if codec in LOSSLESS else 8) * tensor.nbytes


def test_a_limit_can_be_a_text_and_must_be_a_size() -> None:
    data = of(torch.zeros(1_000_000)).to_bytes()
    assert Boundary.from_bytes(data, limit="5MB").nbytes == 4_000_000
    with pytest.raises(BadBoundary, match=r"may take 3.8. MiB of memory, and the limit is 9.. KiB"):
        Boundary.from_bytes(data, limit="1MB")
    with pytest.raises(BadQuery, match=r"expected a number of bytes"):
        Boundary.from_bytes(data, limit="much")


@pytest.mark.parametrize("limit", ["10B", "100KB", "799KB"])
def test_an_error_about_the_limit_has_it_and_the_one_that_is_enough(limit: str) -> None:
    data = of(torch.zeros(200_000)).to_bytes()
    with pytest.raises(BadBoundary, match=f"and the limit is {size(parse_size(limit))}: raise limit= to") as caught:
        Boundary.from_bytes(data, limit=limit)
    need = int(re.search(r"to ([\d,]+) bytes", str(caught.value))[1].replace(",", ""))  # type: ignore[index]
    assert Boundary.from_bytes(data, limit=need).nbytes == 800_000


BOMB = """
import resource, sys, torch
from microtome.errors import BadBoundary
from microtome.split.boundary.boundary import Boundary
data = open(sys.argv[1], "rb").read()
Boundary.from_bytes(Boundary("", "", {"x": torch.zeros(1000)}, {}).to_bytes(sys.argv[2]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    Boundary.from_bytes(data, limit="10MB")
except BadBoundary as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.integration
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("honest", [False, *slow(True)])
def test_a_bomb_does_not_go_off(codec: str, honest: bool, tmp_path: Any) -> None:
    """300 MB of zeros; where the header says so, and where it says 1 MB."""
    data = of(torch.zeros(75_000_000)).to_bytes(codec)
    if not honest:
        length = struct.unpack_from("<I", data, 12)[0]
        header = json.loads(data[32 : 32 + length])
        stored = header["tensors"][0]["parts"][0][0]
        count = max(stored // 4 + 1, 250_000)
        header["tensors"][0]["shape"] = [count]
        body = data[32 + length : -16]
        digests = [xxhash.xxh3_128_digest(body[at : min(at + BLOCK, stored)]) for at in range(0, stored, BLOCK)]
        forged = forge(header, body)
        data = forged[:-16] + xxhash.xxh3_128_digest(forged[24:32] + b"".join(digests))
    file = tmp_path / "bomb"
    file.write_bytes(data)
    ran = subprocess.run([sys.executable, "-c", BOMB, str(file), codec], capture_output=True, text=True, check=True)
    assert int(ran.stdout) * (1 if sys.platform == "darwin" else 1024) < 20_000_000


def test_a_tensor_without_memory_cannot_be_sent() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2, 3)
    with pytest.raises(BadBoundary, match="cannot send tensor 'x': expected one with values, got a FakeTensor"):
        Boundary("a", "f", {"x": fake}, {}).to_bytes()

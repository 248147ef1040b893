"""Measure the costs of codecs on this machine, for each value that crosses a cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from microtome.addresses import strip_first_index
from microtome.devices.machine import environment
from microtome.engine import Call, Probe, Session, tensors_in
from microtome.engine.meta_run import copy_inputs
from microtome.errors import BadInputs
from microtome.inputs import Inputs
from microtome.results.codec_costs import CodecCost, CodecCosts
from microtome.results.cuts import Cuts, Live
from microtome.split.analysis.arrays import to_tensor
from microtome.split.analysis.structure_spec import flatten
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.codecs import parse_codec

#: The most repetitions of encoding and decoding a value, and the seconds after which no further one begins.
_MAX_REPEAT, _BUDGET_S = 5, 0.05

Measure = Callable[[str, Tensor], None]


def codec_costs(
    cuts: Cuts,
    codecs: Collection[str] | str = ("raw", "zstd"),
    *,
    model: nn.Module | None = None,
    inputs: Any = None,
) -> CodecCosts:
    """Measure the costs of codecs on this machine, for all values that cross the cuts of a model.

    Args:
        cuts: The cuts of the model.
        codecs: The names of the codecs, such as `"raw"`, `"zstd"` or `"fp16"`; see `microtome.split.boundary.codecs`.
        model: Run it once on the inputs, and encode the values that cross. None: encode noise of the same shapes, which
            lossless codecs can hardly compress.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> costs = codec_costs(mt.cuts(model, x), ["raw", "fp16"], model=model, inputs=x)
    >>> whole, half = (costs.costs[codec]["layer1"].nbytes for codec in ("raw", "fp16"))
    >>> whole, round(half / whole, 2)
    (65536, 0.5)
    """
    names = (codecs,) if isinstance(codecs, str) else tuple(codecs)
    for name in names:
        parse_codec(name)  # raises if there is none
    values = crossing_values(cuts)
    table: dict[str, dict[str, CodecCost]] = {codec: {} for codec in names}
    if model is None:
        for codec in names:
            table[codec] = {value.name: _noise_cost(value.shape, value.dtype, codec) for value in values}
        return CodecCosts(cuts.model, "noise in the shapes that cross", table, environment())

    def measure(name: str, tensor: Tensor) -> None:
        for codec in names:
            table[codec][name] = _cost(tensor, codec)

    _run(model, copy_inputs(Inputs.of(inputs, model), model), values, measure)
    return CodecCosts(cuts.model, "what a run of the model gave", table, environment())


def crossing_values(cuts: Cuts) -> list[Live]:
    """Return the model's inputs and every value that crosses a cut, each once."""
    values: dict[str, Live] = {}
    for value in (*cuts.inputs, *(value for cut in cuts for value in cut.live)):
        values.setdefault(value.name, value)
    return list(values.values())


class _CrossingValues(Probe):
    """Measure the values that cross a cut when their calls return, and keep none of them."""

    def __init__(self, values: Iterable[Live], measure: Measure) -> None:
        self._measure = measure
        self._by_source: dict[str, list[Live]] = {}
        for value in values:
            if value.source is not None:
                self._by_source.setdefault(strip_first_index(value.source), []).append(value)

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for value in self._by_source.get(call.address, ()):
            self._measure(value.name, _find(value, (output, args, kwargs)))


def _run(model: nn.Module, inputs: Inputs, values: Iterable[Live], measure: Measure) -> None:
    arrays: list[Any] = []
    flatten((inputs.args, inputs.kwargs), arrays=arrays)
    for value in values:
        if value.source is None:
            measure(value.name, _find(value, (inputs.args, inputs.kwargs, list(map(to_tensor, arrays)))))
    with torch.no_grad(), Session(model, [_CrossingValues(values, measure)], other_threads="ignore"):
        inputs.run(model)


def _find(value: Live, tree: Any) -> Tensor:
    """Return the first tensor of the value's shape and dtype."""
    for tensor in tensors_in(tree):
        if (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) == (value.shape, value.dtype):
            return tensor.detach()
    raise BadInputs(
        f"expected {value.dtype} of {'x'.join(map(str, value.shape))} for {value.name!r} in the run, got none: use the "
        "inputs that the cuts were made with"
    )


@lru_cache(maxsize=4096)
def _noise_cost(shape: tuple[int, ...], dtype: str, codec: str) -> CodecCost:
    return _cost(_noise(shape, getattr(torch, dtype)), codec)


def _noise(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def _cost(tensor: Tensor, codec: str) -> CodecCost:
    """Return the medians of several measurements, after a warm-up."""
    boundary = Boundary("", "", {"value": tensor}, {})
    envelope_bytes = len(boundary.to_bytes()) - tensor.nbytes
    encode_s: list[float] = []
    decode_s: list[float] = []
    Boundary.from_bytes(boundary.to_bytes(codec))
    began = perf_counter()
    while not encode_s or (len(encode_s) < _MAX_REPEAT and perf_counter() - began < _BUDGET_S):
        start = perf_counter()
        data = boundary.to_bytes(codec)
        middle = perf_counter()
        Boundary.from_bytes(data)
        encode_s.append(middle - start)
        decode_s.append(perf_counter() - middle)
    return CodecCost(max(len(data) - envelope_bytes, 0), median(encode_s), median(decode_s))

"""Measure the costs of codecs on this machine, for each value that crosses a cut."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
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
from microtome.split.arrays import to_tensor
from microtome.split.boundary import Boundary
from microtome.split.codecs import parse_codec
from microtome.split.structure_spec import flatten

#: How often a value is encoded and decoded at most, and the seconds after which no further time begins.
_REPEAT, _BUDGET_S = 5, 0.05

NOISE = "noise in the shapes that cross"
REAL = "what a run of the model gave"


def codec_costs(
    cuts: Cuts,
    codecs: Collection[str] | str = ("raw", "zstd"),
    *,
    model: nn.Module | None = None,
    inputs: Any = None,
) -> CodecCosts:
    """Measure on this machine what codecs cost, for all values that cross the cuts of a model.

    Args:
        cuts: Where the model can be cut.
        codecs: The names of the codecs, such as `"raw"`, `"zstd"` or `"fp16"`; see `microtome.split.codecs`.
        model: With it and its inputs it is run once, and what crosses is encoded as it is. Without it noise of the same
            shapes is, which a codec without loss cannot make much smaller.

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
    wanted = {value.name: value for value in crossing(cuts)}
    if model is None:
        found = {codec: {name: _noise_cost(live.shape, live.dtype, codec) for name, live in wanted.items()} for codec in names}  # fmt: skip  # noqa: E501
        return CodecCosts(cuts.model, NOISE, found, environment())
    real: dict[str, dict[str, CodecCost]] = {codec: {} for codec in names}

    def measure(name: str, tensor: Tensor) -> None:
        for codec in names:
            real[codec][name] = _cost(tensor, codec)

    _run(model, copy_inputs(Inputs.of(inputs), model), wanted, measure)
    return CodecCosts(cuts.model, REAL, real, environment())


def crossing(cuts: Cuts) -> Iterator[Live]:
    """Every value that crosses a cut, and the model's inputs, each once."""
    seen: set[str] = set()
    for value in (*cuts.inputs, *(value for cut in cuts for value in cut.live)):
        if value.name not in seen:
            seen.add(value.name)
            yield value


class _CrossingValues(Probe):
    """Shows the values that calls return, where they cross a cut. None is kept."""

    def __init__(self, wanted: Iterable[Live], measure: Any) -> None:
        self._measure = measure
        self._by_source: dict[str, list[Live]] = {}
        for value in wanted:
            if value.source is not None:
                self._by_source.setdefault(strip_first_index(value.source), []).append(value)

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for value in self._by_source.get(call.address, ()):
            self._measure(value.name, _find(value, (output, args, kwargs)))


def _run(model: nn.Module, inputs: Inputs, wanted: dict[str, Live], measure: Any) -> None:
    arrays: list[Any] = []
    flatten((inputs.args, inputs.kwargs), arrays=arrays)
    for value in wanted.values():
        if value.source is None:
            measure(value.name, _find(value, (inputs.args, inputs.kwargs, list(map(to_tensor, arrays)))))
    with torch.no_grad(), Session(model, [_CrossingValues(wanted.values(), measure)], other_threads="ignore"):
        inputs.run(model)


def _find(value: Live, among: Any) -> Tensor:
    """The tensor that crosses, or one like it that the same call returned."""
    for tensor in tensors_in(among):
        if (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) == (value.shape, value.dtype):
            return tensor.detach()
    raise BadInputs(
        f"the run gave no {value.dtype} of {'x'.join(map(str, value.shape))} for {value.name!r}: "
        "give the inputs that the cuts were made with"
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
    """The median of a few times, after one that does not count."""
    boundary = Boundary("", "", {"value": tensor}, {})
    around = len(boundary.to_bytes()) - tensor.nbytes
    encoded: list[float] = []
    decoded: list[float] = []
    data = boundary.to_bytes(codec)
    Boundary.from_bytes(data)
    began = perf_counter()
    while not encoded or (len(encoded) < _REPEAT and perf_counter() - began < _BUDGET_S):
        start = perf_counter()
        data = boundary.to_bytes(codec)
        middle = perf_counter()
        Boundary.from_bytes(data)
        encoded.append(middle - start)
        decoded.append(perf_counter() - middle)
    return CodecCost(max(len(data) - around, 0), median(encoded), median(decoded))

"""Captured tensors in notebooks: the outputs of calls, and attention weights, with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from microtome.engine.pytree import tensors_in
from microtome.errors import BadQuery
from microtome.report.capping import cap
from microtome.report.notebook import MOST_ROWS, bytes_column, count_note, fill_gaps, image, page, some_of
from microtome.report.pictures import activation
from microtome.report.pictures import attention as pictures
from microtome.report.table import Cell, Column, Image, Report, Table
from microtome.units import UNKNOWN, count, shape, size

if TYPE_CHECKING:
    from microtome.capture.attention.attention import Attention
    from microtome.capture.features import Features


def features(result: Features) -> str:
    """Render the captured outputs: their shapes, statistics, and pictures of the first sample."""
    addresses = list(result.addresses)
    values = {address: list(tensors_in(result[address])) for address in addresses}
    kept = cap([sum(one.nbytes for one in values[address]) for address in addresses], MOST_ROWS)
    rows = [addresses[index] for index in kept]

    def shapes(address: str) -> str:
        return some_of([shape(one.shape) for one in values[address]])

    def statistic(address: str, name: str) -> str:
        one = values[address]
        if len(one) != 1 or not _is_readable(one[0]) or one[0].is_complex():
            return UNKNOWN
        return f"{float(getattr(one[0].detach().float(), name)()):.4g}"

    columns = (
        Column("name", lambda address: address, "left"),
        Column("shape", shapes, "left"),
        Column("dtype", lambda address: some_of(list(dict.fromkeys(map(_dtype, values[address])))), "left"),
        bytes_column(rows, lambda address: sum(one.nbytes for one in values[address])),
        *(Column(name, partial(statistic, name=name)) for name in ("mean", "std", "min", "max")),
        Column("first sample", lambda address: _thumbnail(values[address]), "left"),
    )
    nbytes = sum(one.nbytes for several in values.values() for one in several)
    figures = [
        ("modules", str(len(result))),
        ("tensors", count(sum(map(len, values.values())))),
        ("bytes", size(nbytes)),
    ]
    ended = ["the run ended after the last of them"] if result.stopped else []
    notes = [*ended, f"pictures: channels side by side, each scaled by its own values; {_PLOT}"]
    notes += [f"never ran: {some_of(list(result.never_ran))}"] if result.never_ran else []
    notes += count_note(rows, addresses, "calls")
    table = fill_gaps(Table.of(columns, rows), kept, len(addresses))
    return page(Report("Features", (table,), tuple(notes), figures=tuple(figures)))


_PLOT = "plot(name) draws one larger"


def _is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has plain numbers in memory: not one that is meta, fake, sparse or quantized."""
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized
    has_values = not tensor.is_meta and type(tensor).__name__ != "FakeTensor"
    return is_plain and has_values and tensor.numel() > 0


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _thumbnail(tensors: Sequence[Tensor]) -> Cell:
    """Draw the only tensor of a call, if it can be drawn."""
    if len(tensors) != 1 or not _is_readable(tensors[0]):
        return UNKNOWN
    try:
        return Image(activation.thumbnail(tensors[0]).png)
    except BadQuery:
        return UNKNOWN


def attention(result: Attention) -> str:
    """Render the layers, with a picture of the weights of each: of the first sample, over queries and keys."""
    kept = cap([0.0] * len(result), _MAPS)
    rows = [(result.layers[index], result.by_layer[index]) for index in kept]
    shapes = some_of(list(dict.fromkeys(shape(weights.shape) for weights in result.by_layer)))
    figures = [("layers", str(len(result))), ("batch x heads x queries x keys", shapes)]
    figures += [("bytes", size(sum(weights.nbytes for weights in result.by_layer)))]
    maps = "".join(
        f'<span style="{_FIGURE}">{image(pictures.overview(weights).png)}<br>'
        f'<span style="opacity:.7;font-size:11px">{escape(layer)}</span></span>'
        for layer, weights in rows
        if _is_readable(weights)
    )
    notes = (
        "first sample, the mean of the heads: a row for each query, a column for each key, lighter is more; "
        "of a single query, a row for each head",
        "plot(layer=, head=) draws one larger; plot(image) draws one query over the image",
        *count_note(rows, result.layers, "layers"),
    )
    return page(Report("Attention", (), notes, figures=tuple(figures)), f"<div>{maps}</div>")


#: The most layers whose weights are drawn.
_MAPS = 24
_FIGURE = "display:inline-block;margin:4px 10px 4px 0;text-align:center;vertical-align:top"

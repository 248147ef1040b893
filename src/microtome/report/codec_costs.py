"""Costs of codecs as a table: on a terminal, as text, as Markdown, as CSV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text

from microtome.report.spreadsheet import csv_text
from microtome.report.terminal import escaped, plain_text
from microtome.results.codec_costs import CodecCosts
from microtome.units import seconds, share, size

_HEADERS = ("codec", "values", "bytes", "of raw", "encode", "decode")


def renderable(costs: CodecCosts) -> Any:
    """What rich draws: a row a codec, of all values together."""
    table = Table(show_edge=False, pad_edge=False)
    for at, header in enumerate(_HEADERS):
        table.add_column(header, justify="right" if at else "left", no_wrap=True)
    for row in _rows(costs):
        table.add_row(*map(Text, row))
    return Stack(Text(f"{costs.model}: codecs, all values together", style="italic"), table, Text(_note(costs), "dim"))


def text(costs: CodecCosts) -> str:
    return plain_text(lambda width: renderable(costs))


def markdown(costs: CodecCosts) -> str:
    lines = [list(_HEADERS), ["---", *["---:"] * (len(_HEADERS) - 1)], *_rows(costs)]
    table = "\n".join("| " + " | ".join(map(escaped, line)) + " |" for line in lines)
    return f"**{escaped(costs.model)}**\n\n{table}\n\n- {escaped(_note(costs))}\n"


def csv(costs: CodecCosts) -> str:
    """A line for each codec and value, raw numbers."""
    rows = ([codec, name, *cost] for codec, known in costs.costs.items() for name, cost in known.items())
    return csv_text(["codec", "value", "nbytes", "encode_s", "decode_s"], rows)


def _rows(costs: CodecCosts) -> Iterator[list[str]]:
    raw = costs.costs.get("raw", {})
    for codec, known in costs.costs.items():
        nbytes, encode_s, decode_s = (sum(column) for column in zip((0, 0.0, 0.0), *known.values(), strict=True))
        whole = sum(raw[name].nbytes for name in known if name in raw) or None
        yield [codec, str(len(known)), size(int(nbytes)), share(nbytes, whole), seconds(encode_s), seconds(decode_s)]


def _note(costs: CodecCosts) -> str:
    return f"measured on {costs.environment.get('cpu', 'a machine that is not said')}, with {costs.values}"

"""The table of the costs of codecs."""

from __future__ import annotations

from typing import Any

from microtome.report.table import Column, Line, Medium, Report, Table
from microtome.results.codec_costs import CodecCosts
from microtome.units import seconds, share, size


def report(costs: CodecCosts, medium: Medium = "terminal") -> Report:
    """A row for each codec, of all values together."""
    headers = ("values", "bytes", "of raw", "encode", "decode")
    lines = tuple(Line((codec, *_cells(costs, codec))) for codec in costs.costs)
    note = f"measured on {costs.environment.get('cpu', 'a machine that is not said')}, with {costs.values}"
    columns = (Column("codec", right=False), *map(Column, headers))
    return Report(f"{costs.model}: codecs, all values together", (Table(columns, lines),), (note,))


def _cells(costs: CodecCosts, codec: str) -> tuple[str, ...]:
    known, raw = costs.costs[codec], costs.costs.get("raw", {})
    nbytes, encode_s, decode_s = (sum(column) for column in zip((0, 0.0, 0.0), *known.values(), strict=True))
    whole = sum(raw[name].nbytes for name in known if name in raw) or None
    return str(len(known)), size(int(nbytes)), share(nbytes, whole), seconds(encode_s), seconds(decode_s)


def records(costs: CodecCosts) -> list[dict[str, Any]]:
    """A record for each codec and value."""
    return [
        {"codec": codec, "value": name, **cost._asdict()}
        for codec, known in costs.costs.items()
        for name, cost in known.items()
    ]

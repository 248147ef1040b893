"""The table of the costs of codecs."""

from __future__ import annotations

from typing import Any

from microtome.report.table import Column, Medium, Report, Table
from microtome.results.codec_costs import CodecCost, CodecCosts
from microtome.units import share, size, write


def report(costs: CodecCosts, medium: Medium = "terminal") -> Report:
    """Describe each codec in a row, with all values together."""
    raw = costs.costs.get("raw", {})

    def total(codec: str) -> CodecCost:
        return CodecCost.total(costs.costs[codec].values())

    def of_raw(codec: str) -> str:
        return share(total(codec).nbytes, sum(raw[name].nbytes for name in costs.costs[codec] if name in raw))

    columns = (
        Column("codec", align="left"),
        Column("values", lambda codec: str(len(costs.costs[codec]))),
        Column("bytes", lambda codec: size(total(codec).nbytes)),
        Column("of raw", of_raw),
        Column("encode", lambda codec: write(total(codec).encode_s, "seconds")),
        Column("decode", lambda codec: write(total(codec).decode_s, "seconds")),
    )
    note = f"measured on {costs.environment.get('cpu', 'an unknown machine')}, with {costs.values}"
    return Report(f"{costs.model}: codecs, all values together", (Table.of(columns, costs.costs),), (note,))


def records(costs: CodecCosts) -> list[dict[str, Any]]:
    """Return a record for each codec and value."""
    return [
        {"codec": codec, "value": name, **cost._asdict()}
        for codec, known in costs.costs.items()
        for name, cost in known.items()
    ]

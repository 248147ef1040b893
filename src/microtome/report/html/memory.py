"""The table of the values that are alive at the peak of memory."""

from __future__ import annotations

from html import escape

from microtome.results.measurements import Alive, Timeline
from microtome.units import share, size

_KINDS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "input": "input",
    "constant": "a tensor that the model keeps",
    "op": "made in",
    "rest": "smaller ones",
}


def alive_table(line: Timeline) -> str:
    """The largest first."""
    if line.peak is None:
        return ""
    whole = line.live_bytes[line.peak]
    rows = "".join(
        f'<tr><th scope="row">{_name(one)}<td class="n b{round(100 * one.nbytes / whole) if whole else 0}">'
        f'{size(one.nbytes)}<td class="n">{share(one.nbytes, whole)}'
        for one in line.alive
    )
    phase = "" if line.peak < line.forward else " of the backward"
    return (
        f"<details><summary>What lives at the peak: {size(whole)}, at operator {line.peak + 1:,} of "
        f"{len(line.live_bytes):,}{phase}</summary>"
        '<div class="scroll short"><table><thead><tr><th scope="col">what<th scope="col" class="n">bytes'
        f'<th scope="col" class="n">share</thead><tbody>{rows}</tbody></table></div></details>'
    )


def _name(one: Alive) -> str:
    kind = _KINDS[one.kind]
    if one.kind == "op":
        return f"{kind} {escape(one.name or '(root)')}"
    return f"{kind} {escape(one.name)}" if one.name else f"{one.count:,} {kind}" if one.count > 1 else kind

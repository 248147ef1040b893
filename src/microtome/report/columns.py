"""The columns that a table of a profile can have, and how their cells are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from microtome.measure.spread import Spread
from microtome.profile import Profile
from microtome.report.terminal import bar
from microtome.units import UNKNOWN, count, ratio, seconds, shape, share, size


@dataclass(frozen=True)
class Column:
    header: str
    cell: Callable[[Any, Profile], str]
    right: bool = True


def _amount(name: str, write: Callable[[Any], str], header: str) -> Column:
    return Column(header, lambda row, _: write(getattr(row, name, None)))


def _flops_share(row: Any, profile: Profile) -> str:
    whole = profile.total.flops
    return f"{bar(row.flops, whole)} {share(row.flops, whole):>7}" if whole else UNKNOWN


COLUMNS = {
    "type": Column("module", lambda row, _: getattr(row, "type", ""), right=False),
    "runs": Column("runs", lambda row, _: str(getattr(row, "runs", ""))),
    "inputs": Column("input", lambda row, _: _shapes(getattr(row, "inputs", ())), right=False),
    "outputs": Column("output", lambda row, _: _shapes(getattr(row, "outputs", ())), right=False),
    "dtype": Column("dtype", lambda row, _: " ".join(dict.fromkeys(t.dtype for t in row.outputs)), right=False),
    "params": Column("params", lambda row, _: _params(row)),
    "share": Column("FLOPs share", _flops_share, right=False),
    "intensity": Column("FLOPs/B", lambda row, _: ratio(row.intensity)),
    "output_bytes": _amount("output_bytes", size, "output"),
    "peak_bytes": _amount("peak_bytes", size, "peak"),
    "moved_bytes": _amount("moved_bytes", size, "moved"),
    "trainable_params": _amount("trainable_params", count, "trainable"),
    "param_bytes": _amount("param_bytes", size, "weights"),
    "buffer_bytes": _amount("buffer_bytes", size, "buffers"),
    "macs": _amount("macs", count, "MACs"),
    "flops": _amount("flops", count, "FLOPs"),
    "madds": _amount("madds", count, "MAdds"),
    "read_bytes": _amount("read_bytes", size, "read"),
    "write_bytes": _amount("write_bytes", size, "written"),
    "backward_macs": _amount("backward_macs", count, "bwd MACs"),
    "backward_flops": _amount("backward_flops", count, "bwd FLOPs"),
    "saved_bytes": _amount("saved_bytes", size, "saved"),
    "time": _amount("time_s", seconds, "time"),
    "time_share": Column("time share", lambda row, profile: share(row.time_s, profile.total.time_s)),
    "spread": Column("95 % interval", lambda row, _: interval(getattr(row, "time", None))),
}


#: Of groups there is only what adds up; of operators, what they do in the forward.
_OF_CALLS = ("type", "inputs", "outputs", "dtype", "output_bytes", "peak_bytes", "spread")
_OF_MODULES = ("params", "trainable_params", "param_bytes", "buffer_bytes", "backward_macs", "backward_flops", "saved_bytes", "time", "time_share")  # fmt: skip  # noqa: E501


def columns_of(by: str | None) -> tuple[str, ...]:
    """The names of the columns that a view can have."""
    missing = {None: ("runs",), "type": _OF_CALLS, "op": (*_OF_CALLS, *_OF_MODULES)}[by]
    return tuple(name for name in COLUMNS if name not in missing)


def _shapes(tensors: Sequence[Any]) -> str:
    shown = [shape(tensor.shape) for tensor in tensors[:2]]
    return ", ".join(shown) + (", …" if len(tensors) > 2 else "")


def _params(row: Any) -> str:
    shared = getattr(row, "shared_params", 0)
    if not shared:
        return count(row.params)
    return f"{count(row.params)} (+{count(shared)})" if row.params else f"({count(shared)})"


def interval(spread: Spread | None) -> str:
    return UNKNOWN if spread is None else f"{seconds(spread.low)} to {seconds(spread.high)}"

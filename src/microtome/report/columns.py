"""The columns that a table of a profile can have, and how their cells are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from microtome.errors import BadQuery, said
from microtome.report.shared_units import Kind
from microtome.results.profile import Profile
from microtome.results.profile_records import flat
from microtome.results.rows import Row
from microtome.results.spread import Spread
from microtome.units import UNKNOWN, count, joules, ratio, seconds, shape, share, size, watts

Write = Callable[[Any], str]

#: How a number is written in a unit of its own.
_EACH: dict[Kind, Write] = {"count": count, "bytes": size, "seconds": seconds, "joules": joules, "watts": watts}


class Numbers(NamedTuple):
    """The numbers of a column's cells, which can have a unit in common.

    Attributes:
        of: Those of a row.
        text: A cell with its numbers written in a given way.
    """

    kind: Kind
    of: Callable[[Any], tuple[float | None, ...]]
    text: Callable[[Any, Write], str]


@dataclass(frozen=True)
class Column:
    """How the cells of a column are written.

    Attributes:
        needs: The quantity that a profile must have for the column to be shown unasked; None: any has it.
        numbers: None where the cells hold none, or such as have no unit.
    """

    header: str
    cell: Callable[[Any, Profile], str]
    right: bool = True
    needs: str | None = None
    numbers: Numbers | None = None


def _numbers(numbers: Numbers, header: str, needs: str | None = None) -> Column:
    each = _EACH[numbers.kind]
    return Column(header, lambda row, _: numbers.text(row, each), needs=needs, numbers=numbers)


def _amount(name: str, kind: Kind, header: str, *, measured: bool = False) -> Column:
    def of(row: Any) -> Any:
        return getattr(row, name, None)

    return _numbers(
        Numbers(kind, lambda row: (of(row),), lambda row, write: write(of(row))), header, name if measured else None
    )


def _load(name: str, header: str, write: Callable[[Any], str]) -> Column:
    return Column(header, lambda row, _: write(getattr(getattr(row, "load", None), name, None)), needs="load")


def _part(of: str, header: str, needs: str | None = None) -> Column:
    return Column(header, lambda row, profile: share(getattr(row, of), getattr(profile.total, of)), needs=needs)


def _per_cent(part: float | None) -> str:
    return UNKNOWN if part is None else f"{100 * part:.0f} %"


_BOUND = {None: UNKNOWN, True: "launch", False: "device"}


def _params(row: Any, write: Write) -> str:
    shared = getattr(row, "shared_params", 0)
    if not shared:
        return write(row.params)
    return f"{write(row.params)} (+{write(shared)})" if row.params else f"({write(shared)})"


_PARAMS = Numbers("count", lambda row: (row.params, getattr(row, "shared_params", 0)), _params)

#: The quantities that columns are shares of.
SHARES = {"share": "flops", "time_share": "time_s", "device_share": "device_s", "energy_share": "energy_j"}

COLUMNS = {
    "type": Column("module", lambda row, _: getattr(row, "type", ""), right=False),
    "runs": Column("runs", lambda row, _: str(getattr(row, "runs", ""))),
    "inputs": Column("input", lambda row, _: _shapes(getattr(row, "inputs", ())), right=False),
    "outputs": Column("output", lambda row, _: _shapes(getattr(row, "outputs", ())), right=False),
    "dtype": Column("dtype", lambda row, _: " ".join(dict.fromkeys(t.dtype for t in row.outputs)), right=False),
    "params": _numbers(_PARAMS, "params"),
    "share": _part("flops", "FLOPs share"),
    "intensity": Column("FLOPs/B", lambda row, _: ratio(row.intensity)),
    "output_bytes": _amount("output_bytes", "bytes", "output"),
    "peak_bytes": _amount("peak_bytes", "bytes", "peak"),
    "moved_bytes": _amount("moved_bytes", "bytes", "moved"),
    "trainable_params": _amount("trainable_params", "count", "trainable"),
    "param_bytes": _amount("param_bytes", "bytes", "weights"),
    "buffer_bytes": _amount("buffer_bytes", "bytes", "buffers"),
    "macs": _amount("macs", "count", "MACs"),
    "flops": _amount("flops", "count", "FLOPs"),
    "madds": _amount("madds", "count", "MAdds"),
    "read_bytes": _amount("read_bytes", "bytes", "read"),
    "write_bytes": _amount("write_bytes", "bytes", "written"),
    "backward_macs": _amount("backward_macs", "count", "bwd MACs"),
    "backward_flops": _amount("backward_flops", "count", "bwd FLOPs", measured=True),
    "saved_bytes": _amount("saved_bytes", "bytes", "saved", measured=True),
    "time": _amount("time_s", "seconds", "time", measured=True),
    "time_share": _part("time_s", "time share", needs="time_s"),
    "spread": Column("95 % interval", lambda row, _: interval(getattr(row, "spreads", {}).get("time_s"))),
    "device_time": _amount("device_s", "seconds", "device", measured=True),
    "device_share": _part("device_s", "device share", needs="device_s"),
    "device_spread": Column("device 95 %", lambda row, _: interval(getattr(row, "spreads", {}).get("device_s"))),
    "bound": Column(
        "bound", lambda row, _: _BOUND[getattr(row, "is_launch_bound", None)], right=False, needs="device_s"
    ),
    "backward_time": _amount("backward_s", "seconds", "bwd time", measured=True),
    "backward_device": _amount("backward_device_s", "seconds", "bwd device", measured=True),
    "energy": _amount("energy_j", "joules", "energy", measured=True),
    "energy_share": _part("energy_j", "energy share", needs="energy_j"),
    "net_energy": _amount("net_energy_j", "joules", "net energy", measured=True),
    "energy_spread": Column(
        "energy 95 %", lambda row, _: interval(getattr(row, "spreads", {}).get("energy_j"), joules)
    ),
    "measured_peak": _amount("measured_peak_bytes", "bytes", "measured peak", measured=True),
    "cpu": _load("cpu", "CPU", _per_cent),
    "gpu": _load("gpu", "GPU", _per_cent),
    "memory": _load("memory", "memory", _per_cent),
    "gpu_memory": _load("gpu_memory", "GPU memory", _per_cent),
    "watts": _load("watts", "power", watts),
}


def register_column(name: str, value: Callable[[Row], Any], header: str | None = None) -> None:
    """Have a column of your own in the tables and files of profiles, where `columns` names it.

    Args:
        value: What it says of a call: a number, a text, or None where it says nothing.
        header: What is written above it; else the name.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> mt.register_column("flops_per_param", lambda row: row.flops / row.params if row.params else None)
    >>> from microtome.report.profile import csv
    >>> from microtome.report.row_selection import View
    >>> csv(mt.profile(*zoo.build("tiny-resnet")), View(columns=("flops_per_param",), top=1)).split()
    ['address,flops_per_param', ',1742.0194209674519']
    >>> unregister_column("flops_per_param")
    """
    taken = (*COLUMNS, *flat(Row()))
    if name in taken or not name.isidentifier():
        raise BadQuery(f"a column is named by a word that no other has, got {name!r}")
    REGISTERED[name] = value
    COLUMNS[name] = Column(header or name, lambda row, _: _written(of_registered(name, row)))


def unregister_column(name: str) -> None:
    """Forget a column that was registered."""
    if REGISTERED.pop(name, None) is None:
        raise BadQuery(f"no column is registered as {name!r}")
    del COLUMNS[name]


REGISTERED: dict[str, Callable[[Row], Any]] = {}


def of_registered(name: str, row: Row) -> Any:
    """What a registered column says of a call."""
    try:
        return REGISTERED[name](row)
    except Exception as error:
        raise BadQuery(f"the column {name!r} raised {said(error)} at {row.address!r}") from error


def _written(value: Any) -> str:
    return UNKNOWN if value is None else count(value) if isinstance(value, int | float) else str(value)


#: Of groups there is only what adds up; of operators, what they do in the forward.
_LOAD = ("cpu", "gpu", "memory", "gpu_memory", "watts")
_OF_CALLS = ("type", "inputs", "outputs", "dtype", "output_bytes", "peak_bytes", "measured_peak", "bound", "spread", "device_spread", "energy_spread", *_LOAD)  # fmt: skip  # noqa: E501
_TIMES = ("time", "time_share", "device_time", "device_share", "backward_time", "backward_device", "energy", "energy_share", "net_energy")  # fmt: skip  # noqa: E501
_OF_MODULES = ("params", "trainable_params", "param_bytes", "buffer_bytes", "backward_macs", "backward_flops", "saved_bytes", *_TIMES)  # fmt: skip  # noqa: E501


def columns_of(by: str | None) -> tuple[str, ...]:
    """The names of the columns that a view can have."""
    of_calls = (*_OF_CALLS, *REGISTERED)
    missing = {None: ("runs",), "module": of_calls, "type": of_calls, "op": (*of_calls, *_OF_MODULES)}[by]
    return tuple(name for name in COLUMNS if name not in missing)


def _shapes(tensors: Sequence[Any]) -> str:
    shown = [shape(tensor.shape) for tensor in tensors[:2]]
    return ", ".join(shown) + (", …" if len(tensors) > 2 else "")


def interval(spread: Spread | None, write: Callable[[float], str] = seconds) -> str:
    return UNKNOWN if spread is None else f"{write(spread.low)} to {write(spread.high)}"


#: What gives a quantity that is not always there: as an option of the command, and in Python.
_GIVEN_BY = {
    "time_s": ("--time", 'measure=["time"]'),
    "device_s": ("--time, on a GPU", 'measure=["time"], on a GPU'),
    "backward_s": ("--time --backward", 'measure=["time"], backward=True'),
    "backward_device_s": ("--time --backward, on a GPU", 'measure=["time"], backward=True, on a GPU'),
    "energy_j": ("--energy", 'measure=["energy"]'),
    "net_energy_j": ("--energy", 'measure=["energy"]'),
    "backward_macs": ("--backward", "backward=True"),
    "backward_flops": ("--backward", "backward=True"),
    "saved_bytes": ("--backward", "backward=True"),
    "measured_peak_bytes": ("--memory", 'measure=["memory"]'),
    "load": ("--load", 'measure=["load"]'),
}


def why_unknown(profile: Profile, column: str, by: str) -> str:
    """Why nothing is known of a column, and what to do about it."""
    if column in REGISTERED:
        return "the column says none"
    if by in ("energy_j", "net_energy_j") and "energy" in profile.unavailable:
        return profile.unavailable["energy"]
    if by.startswith("backward_") and profile.total.saved_bytes is not None and profile.total.backward_flops is None:
        return f"the {profile.convention} convention does not say what a backward costs"
    if by == "load" and profile.sampling is not None:
        return "; ".join(dict.fromkeys(profile.sampling.missing.values())) or "it was not sampled"
    if by in _GIVEN_BY:
        option, argument = _GIVEN_BY[by]
        return f"add {option} (in Python {argument})"
    unknown = ", ".join(op.name for op in profile.coverage.unknown)
    return f"no formula is known for {unknown}" if unknown else f"the {profile.convention} convention counts none"


#: Columns of what has formulas, and the quantity of an operator that is None where it has none.
COUNTED = {"macs": "macs", "flops": "flops", "madds": "madds", "intensity": "flops", "backward_macs": "", "backward_flops": ""}  # fmt: skip  # noqa: E501
#: How the types of rows end that are of what a call runs itself.
OWN = "(own)"


AT_LEAST = "≥ "


def at_least(cell: str) -> str:
    """A number of less than all that a call runs."""
    return cell if cell == UNKNOWN else AT_LEAST + cell


def leaves_out(profile: Profile, column: str, by: str | None) -> Callable[[Any], bool]:
    """Whether the number of a row or group is of less than all that it runs: some operators have no formula."""
    if quantity := COUNTED[column]:
        own = {row.address for row in profile if any(getattr(op, quantity) is None for op in row.ops)}
    else:
        own = {address for op in profile.coverage.unknown for address in op.calls}
    within = set(own)
    for row in reversed(profile.calls):  # what is inside a call begins after it
        if row.address in within and row.parent is not None:
            within.add(row.parent)
    if by is None:
        return lambda row: row.address in (own if row.type.endswith(OWN) else within)
    names = {
        "type": {row.type for row in profile if row.address in own},
        "module": {row.path for row in profile if row.address in within},
        "op": set(),  # of an operator all is known, or nothing
    }[by]
    return lambda group: group.name in names

"""Rows of a profile: calls and groups of them, their sums, and the records that files hold of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self, TypeVar

from microtome.addresses import number_calls
from microtome.results.measurements import Load, Spread
from microtome.results.metrics import LOAD, METRICS, Amounts, CallAmounts, Metric
from microtome.units import plural, shape, write

T = TypeVar("T")
_NOTHING = Amounts()
AMOUNTS = tuple(field.name for field in fields(Amounts))


def add(parts: Iterable[Amounts]) -> dict[str, Any]:
    """Sum each metric, by its name. A metric that is None in all parts is None; elsewhere None adds nothing."""
    columns = zip(*([getattr(amounts, name) for name in AMOUNTS] for amounts in parts), strict=True)
    sums = [sum(known) if (known := [value for value in column if value is not None]) else None for column in columns]
    return dict(zip(AMOUNTS, sums, strict=True)) if sums else {}


@dataclass(frozen=True, slots=True, repr=False)
class Group(Amounts):
    """The sums of several calls or operators.

    Attributes:
        name: The type of the modules, or the name of the operators.
        runs: The number of calls, or of runs of the operator.
    """

    name: str = ""
    runs: int = 0

    def __repr__(self) -> str:
        return f"<{self.name}: {plural(self.runs, 'run')}, {_main_amounts(self)}>"


@dataclass(frozen=True, slots=True)
class Tensor:
    """The shape and the dtype of a tensor that goes into a call or comes out of it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, repr=False)
class Row(CallAmounts):
    """One call, with all calls inside it; `microtome.results.metrics` describes the metrics.

    Attributes:
        parent: The address of the call that contains it; None for the root.
        height: 1 for a call without calls inside, else one more than the highest of those.
        own: What the call costs without the calls inside it; measured costs are with those that were not measured,
            below the `depth`.
        ops: The operators that its own code ran in the forward, by name.
        shared_params: Parameters that are used here and counted elsewhere: tied weights, modules that run again.
        elapsed_s: Seconds of the host from the beginning of the run to the end of the call, measured in one run: the
            time of several layers in a row is not the sum of theirs.
        elapsed_device_s: Seconds that the GPU worked for all that was launched by then.
        load: The load of the machine; None: not sampled.
        spreads: The distribution over the passes, and the method, by the name of the metric.
    """

    address: str = ""
    path: str = ""
    type: str = ""
    depth: int = 0
    height: int = 1
    parent: str | None = None
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    shared_params: int = 0
    own: Amounts = _NOTHING
    ops: tuple[Group, ...] = ()
    elapsed_s: float | None = None
    elapsed_device_s: float | None = None
    load: Load | None = None
    spreads: dict[str, Spread] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{self.address or '(root)'}: {self.type}, {_main_amounts(self)}>"

    @property
    def is_launch_bound(self) -> bool | None:
        """Whether the host takes longer to launch the work than the GPU to do it; None without device times."""
        return self.time_s > self.device_s if self.device_s and self.time_s is not None else None


class Ranking(tuple[Row, ...]):
    """Calls in the order of a metric, whose representation begins with it."""

    metric: Metric
    costs: list[float]

    def __new__(cls, metric: Metric, rows: Sequence[tuple[Row, float]]) -> Self:
        """Take the calls, each with its cost without the calls inside it."""
        ranking = super().__new__(cls, (row for row, _ in rows))
        ranking.metric, ranking.costs = metric, [cost for _, cost in rows]
        return ranking

    def __repr__(self) -> str:
        return f"({', '.join(map(self._describe, self, self.costs))}{',' * (len(self) == 1)})"

    def _describe(self, row: Row, cost: float) -> str:
        own = "own " if self.metric.adds_up == "sum" or row.height > 1 else ""
        amount = f"{write(cost, self.metric.unit)} {own}{self.metric.label}"
        return f"<{row.address or '(root)'}: {row.type}, {amount}; {_main_amounts(row)}>"


def merge_rows(rows: Sequence[Row]) -> Row:
    """Return the sum of several calls as a row at the address of the first: a peak is that of the highest."""
    summed = add(rows)
    for metric in METRICS.values():
        if metric.adds_up == "max":
            known = [value for row in rows if (value := metric.of(row)) is not None]
            summed[metric.name] = max(known, default=None)
    return replace(
        rows[0],
        **summed,
        own=Amounts(**add(row.own for row in rows)),
        # Further calls of a module share all its parameters with the first.
        shared_params=sum({row.path: row.shared_params for row in reversed(rows)}.values()),
        elapsed_s=None,
        elapsed_device_s=None,
        load=None,
        spreads={},
    )


def _main_amounts(row: Amounts) -> str:
    """Return the amounts of the short description of a row: those by which calls are ranked."""
    ranked = [METRICS[name] for name in ("params", "macs", "time_s", "device_s", "energy_j")]
    known = [(metric, value) for metric in ranked if (value := metric.of(row)) is not None]
    return ", ".join(f"{write(value, metric.unit)} {metric.label}" for metric, value in known)


def flat(row: Row) -> dict[str, Any]:
    """Return a row as one record of strings and numbers; the costs without the calls inside it are `own_…`."""
    record: dict[str, Any] = {
        "address": row.address,
        "type": row.type,
        "depth": row.depth,
        "input_shapes": " ".join(shape(tensor.shape) for tensor in row.inputs),
        "output_shapes": " ".join(shape(tensor.shape) for tensor in row.outputs),
        "dtypes": " ".join(dict.fromkeys(tensor.dtype for tensor in row.outputs)),
        "shared_params": row.shared_params,
        "elapsed_s": row.elapsed_s,
        "elapsed_device_s": row.elapsed_device_s,
    }
    metrics = [metric for metric in METRICS.values() if metric.shown != "named" and metric.requires is not LOAD]
    record |= {metric.file_name: metric.of(row) for metric in metrics}
    record |= {f"own_{metric.file_name}": metric.own(row) for metric in metrics if metric.adds_up == "sum"}
    for name, spread in row.spreads.items():
        record |= {f"{name}_{part}": getattr(spread, part) for part in ("q1", "q3", "low", "high", "count", "method")}
    if row.load is not None:
        record |= {f"load_{name}": value for name, value in asdict(row.load).items()}
    return record


def tracr_record(index: int, row: Row) -> dict[str, Any]:
    """Return the record that tracr keeps of a layer: seconds, joules, watts and per cent."""
    load = row.load or Load(None, None, None, None, None, 0)

    def per_cent(fraction: float | None) -> float | None:
        return None if fraction is None else 100 * fraction

    return {
        "layer_id": index,
        "layer_name": row.address,
        "layer_type": row.type,
        "output_bytes": row.output_bytes,
        "inference_time": row.time_s if row.device_s is None else row.device_s,
        "processing_energy": row.energy_j,
        "communication_energy": None,  # nothing is sent while a model is profiled
        "power_reading": load.watts,
        "gpu_utilization": per_cent(load.gpu),
        "memory_utilization": per_cent(load.memory),
        "cpu_utilization": per_cent(load.cpu),
        "total_energy": row.energy_j,
    }


def group(pairs: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """Collect values by their keys, in order.

    >>> group([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    groups: dict[str, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


#: Fields that have another name in files of an older microtome.
_OLDER_NAMES = {"until_s": "elapsed_s", "until_device_s": "elapsed_device_s"}


def upgrade_calls(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of a file with the field names and addresses of today, each after the call that contains it."""
    if not calls:
        raise ValueError("it has no calls")
    addresses = [row["address"] for row in calls]
    numbered = dict(zip(addresses, number_calls(addresses), strict=True))  # older files leave out `#0`
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    for call in calls:
        row = {_OLDER_NAMES.get(name, name): value for name, value in call.items()}
        row |= {"address": numbered[row["address"]], "parent": numbered.get(row["parent"], row["parent"])}
        # Otherwise a walk up from here would not end.
        if row["parent"] is not None and row["parent"] not in seen:
            raise ValueError(f"expected the call {row['parent']!r} before {row['address']!r}, which is inside it")
        if not 0 <= row["depth"] < len(calls) or not 1 <= row["height"] <= len(calls):
            raise ValueError(f"expected a depth and a height within {len(calls)} calls at {row['address']!r}")
        seen.add(row["address"])
        rows.append(row)
    return rows

"""Rows as flat records, and profiles read from what was written."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from microtome.addresses import number_calls
from microtome.results.memory import Timeline
from microtome.results.methods import EnergyUse, Load, MemoryUse, Sampling, Timing
from microtome.results.metric import LOAD
from microtome.results.metrics import METRICS, Amounts
from microtome.results.profile import Coverage, Profile, UnknownOp
from microtome.results.rows import Group, Row, Tensor
from microtome.results.spread import Spread
from microtome.units import shape


def flat(row: Row) -> dict[str, Any]:
    """A row as one record of texts and numbers: what it costs in all, and, as `own_…`, without the calls inside it."""
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
    known = [metric for metric in METRICS.values() if metric.shown != "named" and metric.requires is not LOAD]
    record |= {metric.file_name: metric.of(row) for metric in known}
    record |= {f"own_{metric.file_name}": metric.own(row) for metric in known if metric.adds_up == "sum"}
    for name, spread in row.spreads.items():
        record |= {f"{name}_{part}": getattr(spread, part) for part in ("q1", "q3", "low", "high", "count", "method")}
    if row.load is not None:
        record |= {f"load_{name}": value for name, value in asdict(row.load).items()}
    return record


def layer_metrics(profile: Profile, depth: int | None) -> list[dict[str, Any]]:
    """The records that tracr kept of each layer: seconds, joules, watts, and per cent."""
    layers = [row for row in profile if row.height == 1 or row.depth == depth]
    return [_metrics(at, row) for at, row in enumerate(row for row in layers if depth is None or row.depth <= depth)]


def _metrics(at: int, row: Row) -> dict[str, Any]:
    load = row.load
    return {
        "layer_id": at,
        "layer_name": row.address,
        "layer_type": row.type,
        "output_bytes": row.output_bytes,
        "inference_time": row.time_s if row.device_s is None else row.device_s,
        "processing_energy": row.energy_j,
        "communication_energy": None,  # nothing is sent while a model is profiled
        "power_reading": None if load is None else load.watts,
        "gpu_utilization": None if load is None else _per_cent(load.gpu),
        "memory_utilization": None if load is None else _per_cent(load.memory),
        "cpu_utilization": None if load is None else _per_cent(load.cpu),
        "total_energy": row.energy_j,
    }


def _per_cent(part: float | None) -> float | None:
    return None if part is None else 100 * part


def profile_from(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a profile, from those that `Profile.as_dict` gave."""
    if not data["calls"]:
        raise ValueError("it has no calls")
    calls = _numbered(data["calls"])
    _check_parents(calls)
    coverage = data["coverage"]
    unknown = tuple(UnknownOp(op["name"], op["runs"], tuple(op["calls"])) for op in coverage["unknown"])
    return {
        **{name: data[name] for name in ("model", "inputs", "convention", "how")},
        "coverage": Coverage(coverage["ops"], unknown, tuple(coverage["never_ran"])),
        "calls": tuple(map(_row, calls)),
        **{name: data[name] for name in ("environment", "unavailable")},
        "timing": _with_spreads(Timing, data["timing"]),
        **{name: _with_spreads(kind, data[name]) for name, kind in _HOW.items()},
        "timeline": Timeline.from_dict(data["timeline"], len(data["calls"])) if data.get("timeline") else None,
        "gradients": data.get("gradients"),
    }


def _numbered(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls with `#0` on the first of several, which older files leave out."""
    addresses = [row["address"] for row in calls]
    known = dict(zip(addresses, number_calls(addresses), strict=True))
    return [
        {**row, "address": known[row["address"]], "parent": known.get(row["parent"], row["parent"])} for row in calls
    ]


def _check_parents(calls: list[dict[str, Any]]) -> None:
    """Raise if a call is not after the one around it, or deeper than there are calls.

    Whoever walks up from there would not come to an end.
    """
    seen: set[str] = set()
    for row in calls:
        if row["parent"] is not None and row["parent"] not in seen:
            raise ValueError(f"expected the call {row['parent']!r} before {row['address']!r}, which is inside it")
        if not 0 <= row["depth"] < len(calls) or not 1 <= row["height"] <= len(calls):
            raise ValueError(f"expected a depth and a height within {len(calls)} calls at {row['address']!r}")
        seen.add(row["address"])


_HOW = {"energy": EnergyUse, "memory": MemoryUse, "sampling": Sampling}
_SPREADS = ("bare", "backward", "device", "device_backward", "whole")


def _with_spreads(kind: Any, data: dict[str, Any] | None) -> Any:
    if data is None:
        return None
    made = {name: Spread(**value) for name, value in data.items() if name in _SPREADS and value is not None}
    return kind(**(data | made))


#: Fields under the names that they have in files of an older microtome, which may also lack them.
_OLDER_NAMES = {"elapsed_s": "until_s", "elapsed_device_s": "until_device_s"}


def _row(data: dict[str, Any]) -> Row:
    nested: dict[str, Any] = {
        "inputs": tuple(Tensor(tuple(tensor["shape"]), tensor["dtype"]) for tensor in data["inputs"]),
        "outputs": tuple(Tensor(tuple(tensor["shape"]), tensor["dtype"]) for tensor in data["outputs"]),
        "own": Amounts(**data["own"]),
        "ops": tuple(Group(**op) for op in data["ops"]),
        "load": None if data["load"] is None else Load(**data["load"]),
        "spreads": {name: Spread(**spread) for name, spread in data["spreads"].items()},
    }
    older = {new: data.get(old) for new, old in _OLDER_NAMES.items()}
    known: dict[str, Any] = {
        field.name: data.get(field.name, older.get(field.name)) for field in fields(Row) if field.default is None
    }
    known |= {field.name: data[field.name] for field in fields(Row) if field.name not in nested | known}
    return Row(**(known | nested))

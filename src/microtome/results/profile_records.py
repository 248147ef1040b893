"""Rows as flat records, and profiles read from what was written."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from microtome.addresses import number_calls
from microtome.results.metric import LOAD
from microtome.results.metrics import METRICS
from microtome.results.profile import Profile
from microtome.results.rows import Row
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


def checked_calls(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a file under the names that they have now, each after the one that contains it."""
    if not calls:
        raise ValueError("it has no calls")
    numbered = _numbered([{_OLDER_NAMES.get(name, name): value for name, value in row.items()} for row in calls])
    _check_parents(numbered)
    return numbered


#: Fields that have another name in files of an older microtome.
_OLDER_NAMES = {"until_s": "elapsed_s", "until_device_s": "elapsed_device_s"}


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

"""Rows as flat records, and profiles read from what was written."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from microtome.measure.spread import Spread
from microtome.profile.data import AMOUNTS, Amounts, Coverage, Group, Row, Tensor, Unknown
from microtome.profile.timing import Timing
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
        "output_bytes": row.output_bytes,
        "peak_bytes": row.peak_bytes,
        "intensity_flops_per_byte": row.intensity,
    }
    record |= {name: getattr(row, name) for name in AMOUNTS}
    return record | {f"own_{name}": getattr(row.own, name) for name in AMOUNTS}


def profile_from(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a profile, from those that `Profile.as_dict` gave."""
    if not data["calls"]:
        raise ValueError("it has no calls")
    coverage = data["coverage"]
    unknown = tuple(Unknown(op["name"], op["runs"], tuple(op["calls"])) for op in coverage["unknown"])
    return {
        **{name: data[name] for name in ("model", "inputs", "convention", "how")},
        "coverage": Coverage(coverage["ops"], unknown, tuple(coverage["never_ran"])),
        "calls": tuple(_row(row) for row in data["calls"]),
        "timing": _timing(data["timing"]),
    }


def _timing(data: dict[str, Any] | None) -> Timing | None:
    return None if data is None else Timing(**{**data, "bare": Spread(**data["bare"])})


def _row(data: dict[str, Any]) -> Row:
    nested: dict[str, Any] = {
        "inputs": tuple(Tensor(tuple(tensor["shape"]), tensor["dtype"]) for tensor in data["inputs"]),
        "outputs": tuple(Tensor(tuple(tensor["shape"]), tensor["dtype"]) for tensor in data["outputs"]),
        "own": Amounts(**data["own"]),
        "ops": tuple(Group(**op) for op in data["ops"]),
        "time": None if data["time"] is None else Spread(**data["time"]),
    }
    return Row(**{field.name: data[field.name] for field in fields(Row) if field.name not in nested}, **nested)

"""Find and choose the energy meters of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from microtome.devices.base import backend_of
from microtome.devices.meters import jetson, nvml, pi, rapl
from microtome.devices.meters.base import Found, Meter, Missing
from microtome.devices.meters.csv_file import CsvMeter
from microtome.errors import BadQuery, SensorFailed, describe_error


class _Source(NamedTuple):
    """A built-in source of meters, and the processors that they cover."""

    find: Callable[[], Found]
    covers_cpu: bool
    covers_gpu: bool


#: In order of preference.
_SOURCES = {
    "nvml": _Source(nvml.find, covers_cpu=False, covers_gpu=True),
    "rapl": _Source(rapl.find, covers_cpu=True, covers_gpu=False),
    "jetson": _Source(jetson.find, covers_cpu=True, covers_gpu=True),
    "pi": _Source(pi.find, covers_cpu=True, covers_gpu=False),
}
_REGISTERED: dict[str, Callable[[], Meter]] = {}


def register_meter(name: str, make: Callable[[], Meter]) -> None:
    """Register a meter, which is preferred over the built-in ones if none is named.

    Args:
        name: Its name, as in `mt.profile(…, meter=name)`.
        make: Opens the meter, such as its class; raises `SensorFailed` if there is none.

    >>> import time
    >>> from microtome.devices.meters import Meter, MeterReading
    >>> class Bench(Meter):
    ...     name, kind, what, every_s = "bench", "power", "the bench supply", 0.01
    ...     def read(self):
    ...         return MeterReading(time.perf_counter(), watts=12.5)
    >>> register_meter("bench", Bench)
    >>> [meter.what for meter in find()[0] if meter.name == "bench"]
    ['the bench supply']
    >>> unregister_meter("bench")
    """
    if name in (*_SOURCES, "csv", *_REGISTERED) or not name.isidentifier():
        raise BadQuery(f"expected an unused identifier as the name of a meter, got {name!r}")
    _REGISTERED[name] = make


def unregister_meter(name: str) -> None:
    """Remove a registered meter."""
    if _REGISTERED.pop(name, None) is None:
        raise BadQuery(f"no meter is registered as {name!r}")


def check(meter: Meter | str | None) -> None:
    """Raise if there can be no such meter, before anything is measured."""
    if isinstance(meter, Meter | None):
        return
    if not isinstance(meter, str):
        raise BadQuery(f"expected a Meter, its name or 'csv:FILE', got {meter!r}")
    if meter.startswith("csv:"):
        CsvMeter(meter.removeprefix("csv:")).close()
    elif meter not in (*_REGISTERED, *_SOURCES):
        raise BadQuery(f"expected a meter of {', '.join((*_REGISTERED, *_SOURCES, 'csv:FILE'))}, got {meter!r}")


def pick(requested: Meter | str | None, devices: Sequence[torch.device] = ()) -> Meter:
    """Choose the meter that covers the devices of a model.

    Args:
        requested: A meter; its name; `csv:` and the file of an external one; or None for the first available one.
        devices: The accelerators that the model runs on; none for the CPU.

    Raises:
        SensorFailed: There is none; the message has the reasons and remedies.
    """
    check(requested)
    if isinstance(requested, Meter):
        return requested
    if requested is not None and requested.startswith("csv:"):
        return CsvMeter(requested.removeprefix("csv:"))
    if requested is not None:
        names = [requested]
    else:
        covering = (name for name, source in _SOURCES.items() if (source.covers_gpu if devices else source.covers_cpu))
        names = [*_REGISTERED, *covering]
    meters, missing = find()
    uuids = {backend_of(device).uuid(device) for device in devices}
    candidates = (meter for name in names for meter in meters if meter.name == name)
    chosen = next((meter for meter in candidates if not isinstance(meter, nvml.Nvml) or uuids == {meter.uuid}), None)
    for meter in meters:
        if meter is not chosen:
            meter.close()
    if chosen is not None:
        return chosen
    if len(uuids) > 1 and any(meter.name == "nvml" for meter in meters):
        raise SensorFailed(f"the model runs on {len(uuids)} GPUs, and a counter covers one: measure its parts")
    reasons = [str(meter) for meter in missing if meter.name in names]
    if requested == "nvml" and not devices:
        reasons.append("the model does not run on a GPU")
    raise SensorFailed("no sensor: " + ". ".join(reasons or [f"there is none of {', '.join(names)}"]))


def find() -> Found:
    """Return the meters that can be read, and the missing ones with the reasons; never raises.

    Two meters may cover the same device (a board's sensor and the GPU on it), so their readings must not be added.

    >>> meters, missing = find()
    >>> all(meter.reason and meter.fix for meter in missing)
    True
    """
    finders = {name: source.find for name, source in _SOURCES.items()}
    finders |= {name: partial(_find_registered, name) for name in _REGISTERED}
    meters: list[Meter] = []
    missing: list[Missing] = []
    for name, finder in finders.items():
        try:
            found, not_found = finder()
        except Exception as error:  # noqa: BLE001  a driver or its bindings may raise anything
            missing.append(Missing(name, f"looking for it failed: {describe_error(error)}", "report it with this text"))
            continue
        meters += found
        missing += not_found
    return meters, missing


def _find_registered(name: str) -> Found:
    try:
        meter = _REGISTERED[name]()
    except SensorFailed as error:
        return [], [Missing(name, str(error), "see its documentation: it is registered, not built in")]
    meter.name = name  # type: ignore[misc]  # the name it is registered as
    return [meter], []

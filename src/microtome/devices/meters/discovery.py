"""Find and choose the energy meters of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from microtome.devices.base import backend_of
from microtome.devices.meters import jetson, nvml, pi, rapl
from microtome.devices.meters.base import Meter, Missing
from microtome.devices.meters.csv_file import CsvMeter
from microtome.errors import BadQuery, SensorFailed, describe_error

Found = tuple[list[Meter], list[Missing]]


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
    if name in (*_BUILT_IN, *_REGISTERED) or not name.isidentifier():
        raise BadQuery(f"expected an unused identifier as the name of a meter, got {name!r}")
    _REGISTERED[name] = make


def unregister_meter(name: str) -> None:
    """Remove a registered meter."""
    if _REGISTERED.pop(name, None) is None:
        raise BadQuery(f"no meter is registered as {name!r}")


_BUILT_IN = ("nvml", "rapl", "jetson", "pi", "csv")


def check(meter: Meter | str | None) -> None:
    """Raise if there can be no such meter, before anything is measured."""
    if isinstance(meter, Meter | None):
        return
    if not isinstance(meter, str):
        raise BadQuery(f"expected a Meter, its name or 'csv:FILE', got {meter!r}")
    if meter.startswith("csv:"):
        CsvMeter(meter.removeprefix("csv:")).close()
    elif meter not in (*_REGISTERED, *_BUILT_IN[:-1]):
        names = ", ".join((*_REGISTERED, *_BUILT_IN[:-1], "csv:FILE"))
        raise BadQuery(f"expected a meter of {names}, got {meter!r}")


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
    found, missing = find()
    uuids = {backend_of(device).uuid(device) for device in devices}
    # A GPU's counter does not cover the CPU, nor a processor's the GPU; boards and registered meters cover both.
    order = (
        [requested] if requested is not None else [*_REGISTERED, *(("nvml", "jetson") if devices else _BUILT_IN[1:-1])]
    )
    named = (meter for name in order for meter in found if meter.name == name)
    covering = (meter for meter in named if not isinstance(meter, nvml.Nvml) or uuids == {meter.uuid})
    chosen = next(covering, None)
    for meter in found:
        if meter is not chosen:
            meter.close()
    if chosen is not None:
        return chosen
    if len(uuids) > 1 and any(meter.name == "nvml" for meter in found):
        raise SensorFailed(f"the model runs on {len(uuids)} GPUs, and a counter covers one: measure its parts")
    reasons = [str(one) for one in missing if one.name in order]
    if requested == "nvml" and not devices:
        reasons.append("the model does not run on a GPU")
    raise SensorFailed("no sensor: " + ". ".join(reasons or [f"there is none of {', '.join(order)}"]))


def find(*, csv: str | Path | None = None, powercap: Path = rapl.ROOT, ina3221: Path = jetson.ROOT) -> Found:
    """Return the meters that can be read, and the missing ones with the reasons; never raises.

    Two meters may cover the same device (a board's sensor and the GPU on it), so their readings must not be added.

    Args:
        csv: The file of an external meter, with times of day; see `CsvMeter` for other clocks.
        powercap: The folder of the processor's counters in Linux.
        ina3221: The folder of a Jetson's rails in Linux.

    >>> sources, missing = find()
    >>> all(one.reason and one.fix for one in missing)
    True
    """
    finders: dict[str, Callable[[], Found]] = {
        "nvml": nvml.find,
        "rapl": partial(rapl.find, powercap),
        "jetson": partial(jetson.find, ina3221),
        "pi": pi.find,
    }
    if csv is not None:
        finders["csv"] = partial(_find_csv, csv)
    finders |= {name: partial(_find_registered, name) for name in _REGISTERED}
    meters: list[Meter] = []
    missing: list[Missing] = []
    for name, find_some in finders.items():
        try:
            found, not_found = find_some()
        except Exception as error:  # noqa: BLE001  a driver or its bindings may raise anything
            found, not_found = (
                [],
                [Missing(name, f"looking for it failed: {describe_error(error)}", "report it with this text")],
            )
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


def _find_csv(path: str | Path) -> Found:
    try:
        return [CsvMeter(path)], []
    except SensorFailed as error:
        return [], [Missing(CsvMeter.name, str(error), "let the meter write the columns time_s and watts or joules")]

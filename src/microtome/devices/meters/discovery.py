"""Every source of energy that this machine has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from microtome.devices.meters import jetson, nvml, pi, rapl
from microtome.devices.meters.base import Meter, Missing
from microtome.devices.meters.csv_file import CsvMeter
from microtome.errors import BadQuery, SensorFailed, said

Found = tuple[list[Meter], list[Missing]]


_REGISTERED: dict[str, Callable[[], Meter]] = {}


def register_meter(name: str, make: Callable[[], Meter]) -> None:
    """Have a meter of your own beside the built-in ones, and before them where none is named.

    Args:
        name: What it is called by, as in `mt.profile(…, meter=name)`.
        make: Opens the meter, such as its class; it raises `SensorFailed` where there is none.

    >>> import time
    >>> from microtome.devices.meters import Meter, Reading
    >>> class Bench(Meter):
    ...     name, kind, what, every_s = "bench", "power", "the bench supply", 0.01
    ...     def read(self):
    ...         return Reading(time.perf_counter(), watts=12.5)
    >>> register_meter("bench", Bench)
    >>> [meter.what for meter in find()[0] if meter.name == "bench"]
    ['the bench supply']
    >>> unregister_meter("bench")
    """
    if name in (*_BUILT_IN, *_REGISTERED) or not name.isidentifier():
        raise BadQuery(f"a meter is named by a word that no other has, got {name!r}")
    _REGISTERED[name] = make


def unregister_meter(name: str) -> None:
    """Forget a meter."""
    if _REGISTERED.pop(name, None) is None:
        raise BadQuery(f"no meter is registered as {name!r}")


_BUILT_IN = ("nvml", "rapl", "jetson", "pi", "csv")


def check(wanted: Meter | str | None) -> None:
    """Raise where there can be no such meter, before anything is measured."""
    if isinstance(wanted, Meter | None):
        return
    if not isinstance(wanted, str):
        raise BadQuery(f"a meter is a Meter, the name of one or 'csv:FILE', got {wanted!r}")
    if wanted.startswith("csv:"):
        CsvMeter(wanted.removeprefix("csv:")).close()
    elif wanted not in (*_REGISTERED, *_BUILT_IN[:-1]):
        known = ", ".join((*_REGISTERED, *_BUILT_IN[:-1], "csv:FILE"))
        raise BadQuery(f"there is no meter {wanted!r}: write one of {known}")


def pick(wanted: Meter | str | None, devices: Sequence[int] = ()) -> Meter:
    """The meter that sees what a model does.

    Args:
        wanted: A meter; the name of one; `csv:` and the file of an external one; or None for the first that is there.
        devices: The CUDA devices that the model runs on; none for the CPU.

    Raises:
        SensorFailed: There is none; the error says why, and what would help.
    """
    check(wanted)
    if isinstance(wanted, Meter):
        return wanted
    if wanted is not None and wanted.startswith("csv:"):
        return CsvMeter(wanted.removeprefix("csv:"))
    found, missing = find()
    uuids = {f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in devices}
    # A GPU's counter does not see the CPU, nor a processor's the GPU; boards and meters of one's own see everything.
    order = [wanted] if wanted is not None else [*_REGISTERED, *(("nvml", "jetson") if devices else _BUILT_IN[1:-1])]
    named = (meter for name in order for meter in found if meter.name == name)
    fitting = (meter for meter in named if not isinstance(meter, nvml.Nvml) or uuids == {meter.uuid})
    chosen = next(fitting, None)
    for meter in found:
        if meter is not chosen:
            meter.close()
    if chosen is not None:
        return chosen
    if len(uuids) > 1 and any(meter.name == "nvml" for meter in found):
        raise SensorFailed(f"the model runs on {len(uuids)} GPUs, and a counter sees one: measure the parts alone")
    reasons = [str(one) for one in missing if one.name in order]
    if wanted == "nvml" and not devices:
        reasons.append("the model does not run on a GPU")
    raise SensorFailed("no sensor: " + ". ".join(reasons or [f"there is none of {', '.join(order)}"]))


def find(*, csv: str | Path | None = None, powercap: Path = rapl.ROOT, ina3221: Path = jetson.ROOT) -> Found:
    """The sources that can be read, and why the others cannot; never an error.

    What two sources see may overlap (a board's sensor and the GPU on it), so they are not to be added up unseen.

    Args:
        csv: The file of an external meter, whose times are those of the day; see `CsvMeter` for other clocks.
        powercap: Where Linux keeps the processor's counters.
        ina3221: Where Linux keeps the rails of a Jetson.

    >>> sources, missing = find()
    >>> all(one.reason and one.fix for one in missing)
    True
    """
    tries: dict[str, Callable[[], Found]] = {
        "nvml": nvml.find,
        "rapl": partial(rapl.find, powercap),
        "jetson": partial(jetson.find, ina3221),
        "pi": pi.find,
    }
    if csv is not None:
        tries["csv"] = partial(_find_csv, csv)
    tries |= {name: partial(_find_registered, name) for name in _REGISTERED}
    sources: list[Meter] = []
    missing: list[Missing] = []
    for name, look in tries.items():
        try:
            more, less = look()
        except Exception as error:  # noqa: BLE001  a driver or its bindings may raise anything
            more, less = [], [Missing(name, f"looking for it failed: {said(error)}", "report it with this text")]
        sources += more
        missing += less
    return sources, missing


def _find_registered(name: str) -> Found:
    try:
        meter = _REGISTERED[name]()
    except SensorFailed as error:
        return [], [Missing(name, str(error), "see what it needs: it is registered, not built in")]
    meter.name = name  # type: ignore[misc]  # it answers to what it is registered as
    return [meter], []


def _find_csv(path: str | Path) -> Found:
    try:
        return [CsvMeter(path)], []
    except SensorFailed as error:
        return [], [Missing(CsvMeter.name, str(error), "let the meter write the columns time_s and watts or joules")]

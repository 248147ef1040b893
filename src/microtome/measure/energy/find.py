"""Every source of energy that this machine has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from microtome.errors import SensorFailed, said
from microtome.measure.energy import jetson, nvml, pi, rapl
from microtome.measure.energy.csv_meter import CsvMeter
from microtome.measure.energy.source import Missing, Source

Found = tuple[list[Source], list[Missing]]


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
    sources: list[Source] = []
    missing: list[Missing] = []
    for name, look in tries.items():
        try:
            more, less = look()
        except Exception as error:  # noqa: BLE001  a driver or its bindings may raise anything
            more, less = [], [Missing(name, f"looking for it failed: {said(error)}", "report it with this text")]
        sources += more
        missing += less
    return sources, missing


def _find_csv(path: str | Path) -> Found:
    try:
        return [CsvMeter(path)], []
    except SensorFailed as error:
        return [], [Missing(CsvMeter.name, str(error), "let the meter write the columns time_s and watts or joules")]

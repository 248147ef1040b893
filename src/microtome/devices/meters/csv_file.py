"""Read an external meter that logs to a CSV file.

The first line names the columns; further ones are ignored::

    time_s,watts            or            time_s,joules
    1700000000.0,41.5                     1700000000.0,120.25
    1700000001.0,44.0                     1700000001.0,163.0

`time_s` is the time of day in seconds since 1970 (`time.time`), or that of `time.perf_counter` with `clock="perf"`,
which on Linux is the same in every process of a machine. `joules` is a counter; `watts` is integrated by trapezoids.
If both exist, `joules` is used. The file may still grow: an incomplete last line is ignored.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from microtome.devices.meters.base import Log, MeterReading, finite, interpolate, read_text
from microtome.errors import SensorFailed, describe_error


@dataclass(frozen=True)
class LogPoint:
    """A line of the file, with the joules since the first line."""

    line: int
    time_s: float
    joules: float


class CsvMeter(Log):
    """The file of an external meter.

    Args:
        clock: The clock of its times: "unix", the time of day, or "perf", `time.perf_counter`.
        gap_s: The maximum time between lines; the energy over a longer gap is unknown.
    """

    name = "csv"

    def __init__(self, path: str | Path, clock: Literal["unix", "perf"] = "unix", gap_s: float = 5.0) -> None:
        self._path = Path(path)
        self._clock = clock
        self._gap_s = gap_s
        self.what = f"external meter, {self._path}"
        self.read()

    def read(self) -> MeterReading:
        """Return the last line, which is from the past."""
        last = self._points()[-1]
        return MeterReading(last.time_s - self._offset_s(), joules=last.joules)

    def between(self, start_s: float, end_s: float) -> float:
        offset_s = self._offset_s()
        points = self._points()
        start, end = start_s + offset_s, end_s + offset_s
        if start < points[0].time_s or end > points[-1].time_s:
            raise SensorFailed(
                f"{self._path} covers {points[0].time_s} to {points[-1].time_s}, not {start} to {end}:"
                " the meter must log from before the block until after it, on the same clock"
            )
        for before, after in pairwise(points):
            if after.time_s - before.time_s > self._gap_s and before.time_s < end and after.time_s > start:
                raise SensorFailed(
                    f"{self._path}, line {after.line}: nothing was logged for {after.time_s - before.time_s:.3g} s,"
                    f" more than {self._gap_s:g} s"
                )
        curve = [(point.time_s, point.joules) for point in points]
        return interpolate(curve, end) - interpolate(curve, start)

    def _offset_s(self) -> float:
        """Return the offset of the file's clock from `time.perf_counter`."""
        return 0.0 if self._clock == "perf" else time.time() - time.perf_counter()

    def _points(self) -> list[LogPoint]:
        try:
            points = list(self._parse())
        except csv.Error as error:
            raise SensorFailed(f"{self._path} cannot be read as CSV: {describe_error(error)}") from error
        if len(points) < 2:
            raise SensorFailed(f"{self._path}: expected at least 2 readings, got {len(points)}")
        return points

    def _parse(self) -> Iterator[LogPoint]:
        lines = read_text(self._path).splitlines(keepends=True)
        rows = csv.reader(lines if not lines or lines[-1].endswith("\n") else lines[:-1])
        header = [name.strip() for name in next(rows, [])]
        column = "joules" if "joules" in header else "watts"
        if not {"time_s", column} <= set(header):
            raise SensorFailed(f"{self._path}: expected columns time_s and watts or joules, got {header}")
        last: LogPoint | None = None
        watts = 0.0
        for row in filter(None, rows):
            where = f"{self._path}, line {rows.line_num}"
            time_s = _cell(row, header.index("time_s"), f"{where}: time_s")
            value = _cell(row, header.index(column), f"{where}: {column}")
            if last is not None and time_s <= last.time_s:
                raise SensorFailed(f"{where}: time goes from {last.time_s} to {time_s}, not forwards")
            if column == "watts":
                joules = 0.0 if last is None else last.joules + (value + watts) / 2 * (time_s - last.time_s)
                watts = value
            elif last is not None and value < last.joules:
                raise SensorFailed(f"{where}: the counter goes backwards, from {last.joules} to {value} J")
            else:
                joules = value
            last = LogPoint(rows.line_num, time_s, finite(joules, f"{where}: joules until here"))
            yield last


def _cell(row: list[str], column: int, name: str) -> float:
    text = row[column].strip() if column < len(row) else ""
    try:
        number = float(text)
    except ValueError:
        raise SensorFailed(f"{name}: expected a number, got {text!r}") from None
    return finite(number, name)

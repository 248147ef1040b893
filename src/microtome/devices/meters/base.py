"""The interface of energy meters, and reading numbers from files of sensors."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

from microtome.errors import BadFile, SensorFailed, describe_error
from microtome.files.reading import read_bytes

Kind = Literal["counter", "power", "log"]

#: The maximum size of a file: a reading per second for three months.
_MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True)
class MeterReading:
    """A reading of a sensor.

    Attributes:
        time_s: The time of `time.perf_counter`.
        joules: The energy since the meter was opened; None if the sensor measures power.
        watts: The current power; None if the sensor counts energy.
    """

    time_s: float
    joules: float | None = None
    watts: float | None = None


@dataclass(frozen=True)
class Missing:
    """A meter that is not available.

    Attributes:
        name: Its name, as in `Meter.name`.
        reason: Why it is not available.
        fix: A remedy.
    """

    name: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}; {self.fix}"


class Meter(ABC):
    """An open sensor.

    Attributes:
        name: The type of sensor: "nvml", "rapl" and so on.
        kind: "counter": joules, which never decrease. "power": watts, to be sampled and integrated. "log": written by
            another program and read afterwards.
        what: A description of what the sensor covers. Two may cover the same device, so their readings must not be
            added.
        every_s: The maximum time between readings for a correct result; None if two readings suffice.
    """

    name: ClassVar[str]
    kind: Kind
    what: str
    every_s: float | None = None

    @abstractmethod
    def read(self) -> MeterReading:
        """Read the sensor.

        Raises:
            SensorFailed: It cannot be read, or the reading is impossible.
        """

    def close(self) -> None:
        """Release the resources of the meter."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.name}: {self.what}>"


#: The meters of a source, and those that are missing.
Found = tuple[list[Meter], list[Missing]]


class Log(Meter):
    """A log that another program writes, and that covers past times."""

    kind = "log"

    @abstractmethod
    def between(self, start_s: float, end_s: float) -> float:
        """Return the joules between two times of `time.perf_counter`.

        Raises:
            SensorFailed: The log does not cover them, or cannot be read.
        """


def read_text(path: Path) -> str:
    """Read a text file; raise `SensorFailed` on an error."""
    try:
        return read_bytes(path, _MAX_FILE_BYTES).decode().replace("\r\n", "\n").replace("\r", "\n")
    except BadFile as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise SensorFailed(f"{path} does not exist") from error.__cause__
        if isinstance(error.__cause__, PermissionError):
            raise SensorFailed(f"{path} cannot be read: permission denied") from error.__cause__
        raise SensorFailed(str(error)) from error
    except UnicodeDecodeError as error:
        raise SensorFailed(f"{path} cannot be read: {describe_error(error)}") from error


def read_line(path: Path) -> str:
    """Read a text file without surrounding whitespace."""
    return read_text(path).strip()


def read_integer(path: Path, *, signed: bool = False) -> int:
    """Read an integer from a file, unsigned by default."""
    text = read_line(path)
    # int() would also take 1_000 and digits of other alphabets.
    if not re.fullmatch("-?[0-9]{1,40}" if signed else "[0-9]{1,40}", text):
        raise SensorFailed(f"{path}: expected an {'' if signed else 'unsigned '}integer, got {text[:40]!r}")
    return int(text)


def finite(number: float, name: str) -> float:
    """Return a number, after checking that it is finite and not negative."""
    if not math.isfinite(number) or number < 0:
        raise SensorFailed(f"expected {name} to be finite and at least 0, got {number}")
    return number


def interpolate(points: Sequence[tuple[float, float]], time_s: float) -> float:
    """Interpolate the value at a time, from at least two points of time and value in order."""
    index = min(max(bisect_left(points, time_s, key=lambda point: point[0]), 1), len(points) - 1)
    (t0, v0), (t1, v1) = points[index - 1], points[index]
    return v0 if t1 == t0 else v0 + (v1 - v0) * (time_s - t0) / (t1 - t0)

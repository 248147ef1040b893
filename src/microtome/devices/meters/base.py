"""What every sensor of energy has in common."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, Self

from microtome.errors import BadFile, SensorFailed, said
from microtome.files.reading import read_bytes

Kind = Literal["counter", "power", "log"]

#: The largest file that is read: a reading a second for three months.
_LIMIT = 256 << 20


@dataclass(frozen=True)
class MeterReading:
    """What a sensor said.

    Attributes:
        time_s: When, on the clock of `time.perf_counter`.
        joules: Counted since the source was opened; None where the sensor gives power.
        watts: Drawn now; None where the sensor counts energy.
    """

    time_s: float
    joules: float | None = None
    watts: float | None = None


@dataclass(frozen=True)
class Missing:
    """A source that is not there.

    Attributes:
        name: Which one, as in `Meter.name`.
        reason: Why it is not there.
        fix: What would help.
    """

    name: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}; {self.fix}"


class Meter(ABC):
    """One sensor, open.

    Attributes:
        name: The kind of sensor: "nvml", "rapl" and so on.
        kind: "counter": joules, never less than before. "power": watts, to be sampled and summed up. "log": written by
            somebody else and read afterwards.
        what: What the sensor sees, for people. Two sources may see the same thing, so they are not to be added up.
        every_s: How often it must be read for a right answer; None where two readings are enough.
    """

    name: ClassVar[str]
    kind: Kind
    what: str
    every_s: float | None = None

    @abstractmethod
    def read(self) -> MeterReading:
        """What the sensor says now.

        Raises:
            SensorFailed: It cannot be read, or says what cannot be.
        """

    def close(self) -> None:
        """Gives back what the source holds."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.name}: {self.what}>"


class Log(Meter):
    """A record that somebody else writes; it can be asked about any time that it covers."""

    kind = "log"

    @abstractmethod
    def between(self, start_s: float, end_s: float) -> float:
        """The joules between two times of `time.perf_counter`.

        Raises:
            SensorFailed: The log does not cover them, or cannot be read.
        """


def read_text(path: Path) -> str:
    """What a file says, without the end of its line."""
    return read_raw(path).strip()


def read_raw(path: Path) -> str:
    """The text of a file; what goes wrong is a sensor that failed."""
    try:
        return read_bytes(path, _LIMIT).decode().replace("\r\n", "\n").replace("\r", "\n")
    except BadFile as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise SensorFailed(f"{path} is not there") from error.__cause__
        if isinstance(error.__cause__, PermissionError):
            raise SensorFailed(f"{path} may not be read: permission denied") from error.__cause__
        raise SensorFailed(str(error)) from error
    except UnicodeDecodeError as error:
        raise SensorFailed(f"{path} cannot be read: {said(error)}") from error


def read_whole(path: Path, *, signed: bool = False) -> int:
    """The whole number that a file holds, zero or above where it has no sign."""
    text = read_text(path)
    # int() would also take 1_000 and digits of other alphabets.
    if not re.fullmatch("-?[0-9]{1,40}" if signed else "[0-9]{1,40}", text):
        raise SensorFailed(f"{path} says {text[:40]!r}, which is no {'' if signed else 'unsigned '}whole number")
    return int(text)


def finite(number: float, of: str) -> float:
    """The number, if it is one that a sensor may say."""
    if not math.isfinite(number) or number < 0:
        raise SensorFailed(f"{of} is {number}, which cannot be")
    return number

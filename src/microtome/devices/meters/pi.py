"""The power chip (PMIC) of a Raspberry Pi 5, through `vcgencmd pmic_read_adc`.

It says a current and a voltage for each rail that it feeds. The 5 V input has a voltage only, so what does not go
through the chip, such as USB devices, a fan or what hangs on the 5 V pins, is not seen, nor are the chip's own losses.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable

from microtome.devices.meters.base import Meter, MeterReading, Missing, finite
from microtome.errors import SensorFailed, said

COMMAND = ("vcgencmd", "pmic_read_adc")
LINE = re.compile(r"(\w+)_([AV])\s+(?:current|volt)\(\d+\)=(\S+)([AV])")


def ask() -> str:
    """What the command says."""
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=2, check=False)
    except FileNotFoundError as error:
        raise SensorFailed("there is no command vcgencmd: this is no Raspberry Pi") from error
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        raise SensorFailed(f"vcgencmd cannot be run: {said(error)}") from error
    if done.returncode:
        text = (done.stderr or done.stdout).strip()
        raise SensorFailed(f"vcgencmd ended with {done.returncode}: {text[:200]}")
    return done.stdout


class Pi(Meter):
    """The rails that the power chip of a Raspberry Pi 5 feeds."""

    name = "pi"
    kind = "power"
    what = "Raspberry Pi 5, the rails of its PMIC; without what does not go through it (USB, fan, 5 V pins, its losses)"
    # Each reading starts a process: more often would be felt by what is measured.
    every_s = 0.2

    def __init__(self, ask: Callable[[], str] = ask) -> None:
        self._ask = ask
        self.read()

    def read(self) -> MeterReading:
        watts = total_watts(self._ask())
        return MeterReading(time.perf_counter(), watts=watts)


def find(ask: Callable[[], str] = ask) -> tuple[list[Meter], list[Missing]]:
    """The source of this machine, or why there is none."""
    try:
        return [Pi(ask)], []
    except SensorFailed as error:
        if isinstance(error.__cause__, FileNotFoundError):
            fix = "on a Raspberry Pi 5, install its tools (apt install raspi-utils)"
        else:
            fix = "it needs a Raspberry Pi 5, a user in the group video (usermod -aG video) and recent firmware"
        return [], [Missing(Pi.name, str(error), fix)]


def total_watts(text: str) -> float:
    """The power of all rails in an answer of the chip.

    >>> round(total_watts("VDD_CORE_A current(7)=2.0A\\nVDD_CORE_V volt(15)=0.75V\\nEXT5V_V volt(24)=5.1V"), 3)
    1.5
    """
    found: dict[str, dict[str, float]] = {"A": {}, "V": {}}
    for line in filter(None, map(str.strip, text.splitlines())):
        match = LINE.fullmatch(line)
        if match is None or match[2] != match[4]:
            raise SensorFailed(f"the power chip says {line[:80]!r}, which is no current and no voltage")
        found[match[2]][match[1]] = _number(match[3], line)
    currents, volts = found["A"], found["V"]
    if not currents:
        raise SensorFailed("the power chip says no current")
    alone = sorted(currents.keys() - volts.keys())
    if alone:
        raise SensorFailed(f"the power chip says a current but no voltage for {', '.join(alone)}")
    return sum(ampere * volts[rail] for rail, ampere in currents.items())


def _number(text: str, line: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise SensorFailed(f"the power chip says {line[:80]!r}, which is no number") from None
    return finite(number, f"{line[:80]!r} of the power chip")

"""Read the power chip (PMIC) of a Raspberry Pi 5, through `vcgencmd pmic_read_adc`.

It measures the current and voltage of each rail that it feeds. The 5 V input has a voltage only, so devices that bypass
the chip, such as USB devices, a fan or the 5 V pins, are not covered, nor are the chip's own losses.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable

from microtome.devices.meters.base import Found, Meter, MeterReading, Missing, finite
from microtome.errors import SensorFailed, describe_error

COMMAND = ("vcgencmd", "pmic_read_adc")
LINE = re.compile(r"(\w+)_([AV])\s+(?:current|volt)\(\d+\)=(\S+)([AV])")


def run_command() -> str:
    """Run the command and return its output."""
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=2, check=False)
    except FileNotFoundError as error:
        raise SensorFailed("there is no command vcgencmd: this is no Raspberry Pi") from error
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        raise SensorFailed(f"vcgencmd cannot be run: {describe_error(error)}") from error
    if done.returncode:
        text = (done.stderr or done.stdout).strip()
        raise SensorFailed(f"vcgencmd ended with {done.returncode}: {text[:200]}")
    return done.stdout


class Pi(Meter):
    """The rails that the power chip of a Raspberry Pi 5 feeds."""

    name = "pi"
    kind = "power"
    what = "Raspberry Pi 5, the rails of its PMIC; without what does not go through it (USB, fan, 5 V pins, its losses)"
    # Each reading starts a process, which would disturb the measurement if done more often.
    every_s = 0.2

    def __init__(self, run_command: Callable[[], str] = run_command) -> None:
        self._run_command = run_command
        self.read()

    def read(self) -> MeterReading:
        watts = total_watts(self._run_command())
        return MeterReading(time.perf_counter(), watts=watts)


def find(run_command: Callable[[], str] = run_command) -> Found:
    """Return the meter of this machine, or the reason why there is none."""
    try:
        return [Pi(run_command)], []
    except SensorFailed as error:
        if isinstance(error.__cause__, FileNotFoundError):
            fix = "on a Raspberry Pi 5, install its tools (apt install raspi-utils)"
        else:
            fix = "it needs a Raspberry Pi 5, a user in the group video (usermod -aG video) and recent firmware"
        return [], [Missing(Pi.name, str(error), fix)]


def total_watts(text: str) -> float:
    """Return the power of all rails in the output of the command.

    >>> round(total_watts("VDD_CORE_A current(7)=2.0A\\nVDD_CORE_V volt(15)=0.75V\\nEXT5V_V volt(24)=5.1V"), 3)
    1.5
    """
    readings: dict[str, dict[str, float]] = {"A": {}, "V": {}}
    for line in filter(None, map(str.strip, text.splitlines())):
        match = LINE.fullmatch(line)
        if match is None or match[2] != match[4]:
            raise SensorFailed(f"expected a current or a voltage from the power chip, got {line[:80]!r}")
        readings[match[2]][match[1]] = _number(match[3], line)
    currents, volts = readings["A"], readings["V"]
    if not currents:
        raise SensorFailed("expected a current from the power chip, got none")
    alone = sorted(currents.keys() - volts.keys())
    if alone:
        raise SensorFailed(f"expected a voltage for each current from the power chip, got none for {', '.join(alone)}")
    return sum(ampere * volts[rail] for rail, ampere in currents.items())


def _number(text: str, line: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise SensorFailed(f"expected a number from the power chip, got {line[:80]!r}") from None
    return finite(number, f"{line[:80]!r} of the power chip")

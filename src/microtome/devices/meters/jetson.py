"""Read the power rails of NVIDIA Jetson boards: INA3221 sensors, through Linux's hwmon.

Each chip has up to three channels: a label, millivolts and milliamperes. Rails overlap: VDD_IN feeds all others. If it
exists, it alone is read; otherwise the rails of a known board that do not overlap are summed. An unknown board gives no
reading, since it is unknown which of its rails feed which.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from microtome.devices.meters.base import Found, Meter, MeterReading, Missing, finite, read_integer, read_line
from microtome.errors import SensorFailed

ROOT = Path("/sys/bus/i2c/drivers/ina3221")

#: Rails that feed the whole module.
TOTAL = ("VDD_IN", "POM_5V_IN")
#: Rails of a board that together feed the module, without overlap.
BOARDS = {
    # VDDQ_VDD2_1V8AO, its fourth, is fed by VIN_SYS_5V0.
    "AGX Orin": ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    "AGX Xavier": ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),
}


@dataclass(frozen=True)
class Rail:
    """One channel of one chip."""

    label: str
    millivolts: Path
    milliamperes: Path

    def watts(self) -> float:
        # An idle rail may read some milliamperes below zero: the chip measures both directions.
        return read_integer(self.millivolts) * read_integer(self.milliamperes, signed=True) / 1e6


class Jetson(Meter):
    """The module of a Jetson board: the sum of rails that do not overlap."""

    name = "jetson"
    kind = "power"
    every_s = 0.05

    def __init__(self, rails: list[Rail]) -> None:
        self._rails = rails
        self.what = "Jetson module, rails " + " + ".join(rail.label for rail in rails)
        self.read()

    def read(self) -> MeterReading:
        watts = finite(sum(rail.watts() for rail in self._rails), f"the power of the {self.what}")
        return MeterReading(time.perf_counter(), watts=watts)


def find(root: Path | None = None) -> Found:
    """Return the meter of this machine, or the reason why there is none."""
    root = root or ROOT
    try:
        rails = list_rails(root)
        if not rails:
            fix = "on a Jetson, a kernel with the driver ina3221 (JetPack 5 or newer) is needed"
            return [], [Missing(Jetson.name, f"{root} holds no sensor: this is no Jetson, or an older one", fix)]
        chosen = choose(rails)
        if not chosen:
            reason = f"which of the rails {', '.join(sorted(rails))} feed which is not known"
            return [], [
                Missing(Jetson.name, reason, "report the board and its rails, or use an external meter's CSV file")
            ]
        return [Jetson(chosen)], []
    except SensorFailed as error:
        fix = "run as root" if isinstance(error.__cause__, PermissionError) else "see whether `tegrastats` shows power"
        return [], [Missing(Jetson.name, str(error), fix)]


def list_rails(root: Path) -> dict[str, Rail]:
    """Return the channels with a label, by label; NC is not connected."""
    rails: dict[str, Rail] = {}
    for chip in sorted(root.glob("*/hwmon/hwmon*")):
        # Channels from 4 on are voltages over the shunts and their sum, not rails.
        for number in (1, 2, 3):
            file = chip / f"in{number}_label"
            if not file.exists():
                continue
            label = read_line(file)
            if label in ("", "NC"):
                continue
            if label in rails:
                raise SensorFailed(f"two rails are named {label}: {rails[label].millivolts.parent} and {chip}")
            rails[label] = Rail(label, chip / f"in{number}_input", chip / f"curr{number}_input")
    return rails


def choose(rails: dict[str, Rail]) -> list[Rail]:
    """Choose rails that together feed the module without overlap; empty if unknown."""
    for label in TOTAL:
        if label in rails:
            return [rails[label]]
    for labels in BOARDS.values():
        if all(label in rails for label in labels):
            return [rails[label] for label in labels]
    return []

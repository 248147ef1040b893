"""Fake meters of energy, and the threads that read them."""

from __future__ import annotations

import threading
import time

from microtome.devices.meters import Meter, MeterReading
from microtome.errors import SensorFailed


class Steady(Meter):
    """Reads ten watts at any time."""

    name = "steady"
    kind = "power"
    what = "ten watts"
    every_s = 0.005

    def read(self) -> MeterReading:
        return MeterReading(time.perf_counter(), watts=10.0)


class Breaks(Steady):
    """Fails from the fiftieth reading on, by an error or by an impossible reading."""

    def __init__(self, watts: float | None) -> None:
        self.watts = watts
        self.readings = 0

    def read(self) -> MeterReading:
        self.readings += 1
        if self.readings < 50:
            return super().read()
        if self.watts is None:
            raise SensorFailed("the cable came off")
        return MeterReading(time.perf_counter(), watts=self.watts)


def no_threads_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("microtome")]

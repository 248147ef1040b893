"""Sample the load of the machine in a background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple, Self, TypeVar

import psutil
import torch

from microtome.devices.base import Driver, backend_of
from microtome.errors import SensorFailed, describe_error

#: The sampling period. The system counts CPU times in hundredths of a second, so a shorter one would be noise.
EVERY_S = 0.05

T = TypeVar("T")

#: The fields of `Sample` and, in this order, of `Load`.
QUANTITIES = ("cpu", "gpu", "memory", "gpu_memory", "watts")


class Sample(NamedTuple):
    """The readings at the end of an interval: fractions from 0 to 1, and watts; None if not readable."""

    begin_s: float
    end_s: float
    cpu: float | None
    gpu: float | None
    memory: float | None
    gpu_memory: float | None
    watts: float | None


class LoadSampler:
    """Samples at a fixed rate during a `with` block.

    Args:
        device: The accelerator to sample, if any.
        watts: Reads the power drawn, if there is no accelerator and a sensor exists.

    Attributes:
        samples: The samples so far.
        rss_peak_bytes: The peak resident memory of the process.
        missing: The reason why a quantity is not read, by name.
    """

    def __init__(self, device: torch.device | None = None, watts: Callable[[], float] | None = None) -> None:
        self.samples: list[Sample] = []
        self.missing: dict[str, str] = {}
        self._process = psutil.Process()
        self.rss_peak_bytes = self._process.memory_info().rss
        self._driver: Driver | None = None
        self._watts = watts
        if device is None:
            self.missing |= dict.fromkeys(("gpu", "gpu_memory"), "the model does not run on a GPU")
        else:
            try:
                self._driver = backend_of(device).driver(device)
                self._watts = self._driver.watts
            except SensorFailed as error:
                self.missing |= dict.fromkeys(("gpu", "gpu_memory", "watts"), str(error))
        if self._watts is None:
            self.missing.setdefault("watts", "no sensor; `microtome doctor` says what would help")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="microtome-load", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        self._update_rss()
        if self._driver is not None:
            self._driver.close()

    def _run(self) -> None:
        psutil.cpu_percent()  # begins the first interval
        last = perf_counter()
        while not self._stop.wait(EVERY_S):
            self._update_rss()
            cpu, memory = psutil.cpu_percent() / 100, psutil.virtual_memory().percent / 100
            used = None if self._driver is None else self._read(self._driver.utilization, "gpu", "gpu_memory")
            gpu, gpu_memory = used or (None, None)
            watts = self._read(self._watts, "watts")
            now = perf_counter()
            self.samples.append(Sample(last, now, cpu, gpu, memory, gpu_memory, watts))
            last = now

    def _update_rss(self) -> None:
        self.rss_peak_bytes = max(self.rss_peak_bytes, self._process.memory_info().rss)

    def _read(self, read: Callable[[], T] | None, *names: str) -> T | None:
        """Read a quantity; the first failure ends its readings and becomes the reason."""
        if read is None or self.missing.keys() & names:
            return None
        try:
            return read()
        except Exception as error:  # noqa: BLE001  in a thread it would be lost; drivers raise all kinds
            self.missing |= dict.fromkeys(names, describe_error(error))
            return None

"""How busy the machine is, sampled by a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import psutil

from microtome.devices.nvidia import Gpu
from microtome.errors import SensorFailed, said

#: The time between two samples. CPU times are counted in hundredths of a second, so more often would be noise.
EVERY_S = 0.05

T = TypeVar("T")

QUANTITIES = ("cpu", "gpu", "memory", "gpu_memory", "watts")


class Sample(NamedTuple):
    """What was read at the end of an interval; parts from 0 to 1, watts; None where it cannot be read."""

    begin_s: float
    end_s: float
    cpu: float | None
    gpu: float | None
    memory: float | None
    gpu_memory: float | None
    watts: float | None


class LoadSampler:
    """Samples while the block runs, at a fixed rate; the thread ends with the block.

    Args:
        device: The CUDA device to look at; None where there is none.
        watts: Reads the power drawn, where there is no such device; None where nothing can.

    Attributes:
        samples: Those so far.
        rss_peak_bytes: The most that the process held of the machine's memory.
        missing: Why a quantity is not read, by its name.
    """

    def __init__(self, device: int | None = None, watts: Callable[[], float] | None = None) -> None:
        self.samples: list[Sample] = []
        self.missing: dict[str, str] = {}
        self._process = psutil.Process()
        self.rss_peak_bytes = self._process.memory_info().rss
        self._gpu: Gpu | None = None
        self._watts = watts
        if device is None:
            self.missing |= dict.fromkeys(("gpu", "gpu_memory"), "the model does not run on a GPU")
        else:
            self._open(device)
        if self._watts is None:
            self.missing.setdefault("watts", "no sensor; `microtome doctor` says what would help")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="microtome-load", daemon=True)

    def _open(self, device: int) -> None:
        try:
            self._gpu = Gpu(device)
            self._watts = self._gpu.watts
        except SensorFailed as error:
            self.missing |= dict.fromkeys(("gpu", "gpu_memory", "watts"), str(error))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._note_rss()
        if self._gpu is not None:
            self._gpu.close()

    def _run(self) -> None:
        psutil.cpu_percent()  # from now on
        last = perf_counter()
        while not self._stop.wait(EVERY_S):
            self._note_rss()
            cpu, memory = psutil.cpu_percent() / 100, psutil.virtual_memory().percent / 100
            used = None if self._gpu is None else self._read(self._gpu.utilisation, "gpu", "gpu_memory")
            gpu, gpu_memory = used or (None, None)
            watts = self._read(self._watts, "watts")
            now = perf_counter()
            self.samples.append(Sample(last, now, cpu, gpu, memory, gpu_memory, watts))
            last = now

    def _note_rss(self) -> None:
        self.rss_peak_bytes = max(self.rss_peak_bytes, self._process.memory_info().rss)

    def _read(self, read: Callable[[], T] | None, *names: str) -> T | None:
        """What it says; the first failure is kept and ends it."""
        if read is None or self.missing.keys() & names:
            return None
        try:
            return read()
        except Exception as error:  # noqa: BLE001  in a thread it would be lost; drivers raise all kinds
            self.missing |= dict.fromkeys(names, said(error))
            return None

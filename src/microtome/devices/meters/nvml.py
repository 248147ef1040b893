"""Read NVIDIA GPUs through NVML: the energy counter, or the power draw if a GPU has no counter.

The counter is updated periodically (100 ms on an H200), and a reading takes milliseconds: only much longer blocks can
be measured. The power draw of newer GPUs is a mean over the last second.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from microtome.devices.meters.base import Found, Meter, MeterReading, Missing, finite
from microtome.errors import SensorFailed, describe_error


class Nvml(Meter):
    """One GPU.

    Attributes:
        index: The GPU's index in NVML, which ignores CUDA_VISIBLE_DEVICES.
        uuid: The same in NVML and CUDA.
    """

    name = "nvml"

    def __init__(self, pynvml: Any, index: int) -> None:
        self._pynvml = pynvml
        self._broken = ""
        self._first_mj = self._last_mj = 0.0
        self.index = index
        pynvml.nvmlInit()  # reference-counted by NVML: one for each meter, released by close
        self._open = True
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            self.uuid = _decode(pynvml.nvmlDeviceGetUUID(self._handle))
            self.what = f"GPU {index} {_decode(pynvml.nvmlDeviceGetName(self._handle))}"
            self._detect_kind()
        except BaseException:
            self.close()
            raise

    def read(self) -> MeterReading:
        if self.kind == "power":
            return MeterReading(time.perf_counter(), watts=self._query("nvmlDeviceGetPowerUsage") / 1000)
        if self._broken:
            raise SensorFailed(self._broken)
        now_mj = self._query("nvmlDeviceGetTotalEnergyConsumption")
        if now_mj < self._last_mj:
            # Permanently: the energy since the last reading is lost.
            self._broken = f"the energy counter of {self.what} went backwards, from {self._last_mj} to {now_mj} mJ"
            raise SensorFailed(self._broken)
        self._last_mj = now_mj
        return MeterReading(time.perf_counter(), joules=(now_mj - self._first_mj) / 1000)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._pynvml.nvmlShutdown()

    def _detect_kind(self) -> None:
        try:
            self._first_mj = self._last_mj = self._query("nvmlDeviceGetTotalEnergyConsumption")
            self.kind = "counter"
        except SensorFailed:
            self._query("nvmlDeviceGetPowerUsage")
            self.kind, self.every_s = "power", 0.05

    def _query(self, function: str) -> float:
        if not self._open:
            raise SensorFailed(f"{self.what} has been closed")
        try:
            answer = getattr(self._pynvml, function)(self._handle)
        except self._pynvml.NVMLError as error:
            raise SensorFailed(f"{function} of {self.what}: {describe_error(error)}") from error
        if not isinstance(answer, int):
            raise SensorFailed(f"{function} of {self.what}: expected a number, got {answer!r}")
        return finite(answer, f"{function} of {self.what}")


def find() -> Found:
    """Return a meter for each GPU, and the reasons why others have none."""
    try:
        pynvml: Any = import_module("pynvml")
    except ImportError as error:
        fix = "with an NVIDIA GPU, pip install 'microtome[nvidia]'"
        return [], [Missing(Nvml.name, f"the package nvidia-ml-py is not installed ({describe_error(error)})", fix)]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        fix = "it needs an NVIDIA GPU and its driver; see whether `nvidia-smi` works"
        return [], [Missing(Nvml.name, f"NVML does not start: {describe_error(error)}", fix)]
    try:
        return _gpus(pynvml)
    finally:
        pynvml.nvmlShutdown()


def _gpus(pynvml: Any) -> Found:
    meters: list[Meter] = []
    missing: list[Missing] = []
    try:
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        reason = f"NVML cannot count the GPUs: {describe_error(error)}"
        return [], [Missing(Nvml.name, reason, "see whether `nvidia-smi` works")]
    for index in range(count):
        try:
            meters.append(Nvml(pynvml, index))
        except (SensorFailed, pynvml.NVMLError) as error:
            reason = str(error) if isinstance(error, SensorFailed) else f"GPU {index}: {describe_error(error)}"
            missing.append(Missing(Nvml.name, reason, "see what `nvidia-smi -q -d POWER` says"))
    if not meters and not missing:
        missing.append(Missing(Nvml.name, "NVML sees no GPU", "see whether `nvidia-smi` lists one"))
    return meters, missing


def _decode(text: str | bytes) -> str:  # older versions of pynvml return bytes
    return text.decode(errors="replace") if isinstance(text, bytes) else text

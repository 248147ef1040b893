"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable

import psutil
import torch

from microtome.devices.nvidia import Gpu
from microtome.errors import SensorFailed


def environment(devices: Iterable[int] = ()) -> dict[str, str]:
    """The machine and the software, in words.

    Args:
        devices: The CUDA devices that were used; of the first, clocks and what holds them back are said as of now.
    """
    found = {
        "cpu": _cpu(),
        **_cpu_clock(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    gpus = list(devices)
    if gpus:
        found |= {"gpu": ", ".join(map(torch.cuda.get_device_name, gpus)), "cuda": str(torch.version.cuda)}
        try:
            with Gpu(gpus[0]) as gpu:
                found |= gpu.state()
        except SensorFailed as error:
            found["gpu_state"] = f"not known: {error}"
    return found


def _cpu_clock() -> dict[str, str]:
    """The mean clock of the cores now, where the system tells it."""
    try:
        clock = psutil.cpu_freq()
    except (OSError, NotImplementedError, RuntimeError):
        clock = None
    if clock is None or not clock.current:
        return {}
    return {"cpu_clock": f"{clock.current:.0f}{f' of {clock.max:.0f}' if clock.max else ''} MHz"}


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()

"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable

import torch

from microtome.errors import SensorFailed
from microtome.measure.gpu import Gpu


def environment(devices: Iterable[int] = ()) -> dict[str, str]:
    """The machine and the software, in words.

    Args:
        devices: The CUDA devices that were used; of the first, clocks and what holds them back are said as of now.
    """
    found = {
        "cpu": _cpu(),
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


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()

"""Describe the machine and the software that a measurement was made on."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

import psutil
import torch

from microtome.devices.base import backend_of


def environment(devices: Sequence[torch.device] = ()) -> dict[str, str]:
    """Describe the machine, the software and the accelerators in use; the state of the first is as of now."""
    return {
        "cpu": _cpu(),
        **_cpu_clock(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **(backend_of(devices[0]).environment(devices) if devices else {}),
    }


def _cpu_clock() -> dict[str, str]:
    """Return the current mean clock of the cores, if the system exposes it."""
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

"""What a measurement was made on."""

from __future__ import annotations

import os
import platform

import torch


def environment() -> dict[str, str]:
    """The machine and the software, in words."""
    return {
        "cpu": _cpu(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()

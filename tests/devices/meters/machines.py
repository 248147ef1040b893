"""Fake machines: files of sensors, output of commands, and logs of meters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from microtome.devices.meters import (
    Meter,
    Missing,
)

RANGE_UJ = 262_143_328_850

#: The output of `vcgencmd pmic_read_adc`.
PMIC = """\
 3V7_WL_SW_A current(0)=0.10000000A
   3V3_SYS_A current(1)=0.20000000A
  VDD_CORE_A current(7)=2.00000000A
 3V7_WL_SW_V volt(8)=3.70000000V
   3V3_SYS_V volt(9)=3.30000000V
  VDD_CORE_V volt(15)=0.75000000V
     EXT5V_V volt(24)=5.10000000V
      BATT_V volt(25)=0.00000000V
"""


def write_tree(root: Path, files: dict[str, object]) -> Path:
    """Write small files, as the kernel shows them."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def domain(folder: str, name: str, energy_uj: object, range_uj: int = RANGE_UJ) -> dict[str, object]:
    return {f"{folder}/name": name, f"{folder}/energy_uj": energy_uj, f"{folder}/max_energy_range_uj": range_uj}


def server(root: Path) -> Path:
    """Two packages with all their parts, the platform around them, and a second interface to the first."""
    return write_tree(
        root,
        {
            "intel-rapl/enabled": 1,
            **domain("intel-rapl:0", "package-0", 1_000_000),
            **domain("intel-rapl:0:0", "core", 100),
            **domain("intel-rapl:0:1", "uncore", 100),
            **domain("intel-rapl:0:2", "dram", 50_000),
            **domain("intel-rapl:1", "package-1", 2_000_000),
            **domain("intel-rapl:1:0", "dram", 60_000),
            **domain("intel-rapl:2", "psys", 9_000_000),
            **domain("intel-rapl-mmio:0", "package-0", 1_000_000),
        },
    )


def chip(address: str, number: int, *rails: tuple[str, object, object]) -> dict[str, object]:
    folder = f"{address}/hwmon/hwmon{number}"
    files: dict[str, object] = {f"{folder}/in7_label": "sum of shunt voltages", f"{folder}/in7_input": 99999}
    for channel, (label, millivolts, milliamperes) in enumerate(rails, start=1):
        files[f"{folder}/in{channel}_label"] = label
        files[f"{folder}/in{channel}_input"] = millivolts
        files[f"{folder}/curr{channel}_input"] = milliamperes
    return files


def orin_nano(root: Path) -> Path:
    rails = ("VDD_IN", 5000, 1200), ("VDD_CPU_GPU_CV", 5000, 400), ("VDD_SOC", 5000, 300)
    return write_tree(root, chip("1-0040", 3, *rails))


def agx_orin(root: Path) -> Path:
    first = chip("1-0040", 3, ("VDD_GPU_SOC", 20_000, 150), ("VDD_CPU_CV", 20_000, 50), ("VIN_SYS_5V0", 5000, 800))
    second = chip("1-0041", 4, ("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 5000, 80), ("NC", 0, 0))
    return write_tree(root, {**first, **second})


def table(folder: Path, *lines: str, end: str = "\n") -> Path:
    path = folder / "meter.csv"
    path.write_text("\n".join(lines) + end)
    return path


def only(found: tuple[list[Meter], list[Missing]]) -> Meter:
    sources, missing = found
    assert missing == []
    assert len(sources) == 1
    return sources[0]


def absent(found: tuple[list[Meter], list[Missing]]) -> Missing:
    sources, missing = found
    assert sources == []
    assert len(missing) == 1
    return missing[0]


def deny(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Deny access to a file, as to a user who is not root: chmod would not stop tests that run as root."""
    honest = os.stat

    def stat(path: Any, **options: Any) -> Any:
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return honest(path, **options)

    monkeypatch.setattr(os, "stat", stat)

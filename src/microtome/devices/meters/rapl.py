"""Read the energy counters of Intel and AMD processors, through Linux's powercap.

Domains form a tree of folders: `intel-rapl:0` is a package or the whole platform (psys), `intel-rapl:0:1` a part of it.
They overlap: a package includes core and uncore, and psys includes everything; dram is outside the package. Each
package and each dram is summed once, or psys if there is no package. `intel-rapl-mmio:0` is another interface to a
package and is ignored.
"""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

from microtome.devices.meters.base import Found, Meter, MeterReading, Missing, read_integer, read_line
from microtome.errors import SensorFailed

ROOT = Path("/sys/class/powercap")

#: More than any package or memory draws: a larger step is a counter that jumped or was reset.
MAX_WATTS = 10_000.0
#: The counters are updated about every millisecond; the tolerance for a step.
SLACK_S = 0.1

ALTERNATIVE = "another source of energy is needed: an external meter's CSV file works everywhere"


class Domain:
    """A counter with unwrapped overflows.

    Its range is not an integer number of microjoules, so each overflow is exact to one step of the counter (61 uJ).
    """

    def __init__(self, folder: Path, now_s: float) -> None:
        self.name = read_line(folder / "name")
        self.range_uj = read_integer(folder / "max_energy_range_uj")
        self._file = folder / "energy_uj"
        self._last_uj = self._raw()
        self._last_s = now_s
        self._broken = ""
        self.total_uj = 0

    def update(self, now_s: float) -> int:
        """Return the microjoules since the domain was opened."""
        if self._broken:
            raise SensorFailed(self._broken)
        raw = self._raw()
        step = raw - self._last_uj
        if step < 0:
            step += self.range_uj
        if step > MAX_WATTS * 1e6 * (now_s - self._last_s + SLACK_S):
            # Permanently: the energy since the last reading is lost, and later the step would look possible.
            change = "went backwards" if raw < self._last_uj else "jumped"
            self._broken = (
                f"{self._file} {change} from {self._last_uj} to {raw} within {now_s - self._last_s:.3g} s,"
                f" more than {MAX_WATTS / 1000:g} kW could do"
            )
            raise SensorFailed(self._broken)
        self._last_uj, self._last_s = raw, now_s
        self.total_uj += step
        return self.total_uj

    def _raw(self) -> int:
        raw = read_integer(self._file)
        if raw > self.range_uj:
            raise SensorFailed(f"{self._file}: expected at most {self.range_uj}, got {raw}")
        return raw


class Rapl(Meter):
    """The processor packages and their memory, as one counter."""

    name = "rapl"
    kind = "counter"
    # The smallest range, 65 kJ, lasts 65 s at 1 kW. A missed overflow would lose energy unnoticed.
    every_s = 10.0

    def __init__(self, folders: list[Path]) -> None:
        now_s = time.perf_counter()
        self._domains = [Domain(folder, now_s) for folder in folders]
        self._lock = threading.Lock()
        self.what = "CPU " + " + ".join(domain.name for domain in self._domains)

    def read(self) -> MeterReading:
        with self._lock:
            now_s = time.perf_counter()
            total_uj = sum(domain.update(now_s) for domain in self._domains)
        return MeterReading(now_s, joules=total_uj / 1e6)


def find(root: Path | None = None) -> Found:
    """Return the meter of this machine, or the reason why there is none."""
    root = root or ROOT
    try:
        folders = sorted(root.iterdir())
    except FileNotFoundError:
        reason = f"{root} does not exist: the kernel has no powercap, or this is a virtual machine or not Linux"
        return [], [Missing(Rapl.name, reason, ALTERNATIVE)]
    except OSError as error:
        return [], [Missing(Rapl.name, f"{root} cannot be listed: {error.strerror}", ALTERNATIVE)]
    try:
        chosen = choose(folders)
        if not chosen:
            fix = f"load the module intel_rapl_msr (modprobe intel_rapl_msr), or {ALTERNATIVE}"
            return [], [Missing(Rapl.name, f"{root} holds no package and no psys", fix)]
        return [Rapl(chosen)], []
    except SensorFailed as error:
        return [], [Missing(Rapl.name, str(error), _fix(error, root))]


def choose(folders: list[Path]) -> list[Path]:
    """Choose domains that do not overlap."""
    tops = {folder.name: folder for folder in folders if re.fullmatch(r"intel-rapl:\d+", folder.name)}
    names = {key: read_line(folder / "name") for key, folder in tops.items()}
    packages = [key for key, name in names.items() if name.startswith("package")]
    if not packages:
        return [tops[key] for key, name in names.items() if name == "psys"][:1]
    parts = [folder for folder in folders if re.fullmatch(r"intel-rapl:\d+:\d+", folder.name)]
    memory = [part for part in parts if part.name.rpartition(":")[0] in packages and read_line(part / "name") == "dram"]
    return [tops[key] for key in packages] + memory


def _fix(error: SensorFailed, root: Path) -> str:
    if isinstance(error.__cause__, PermissionError):
        return (
            f"run as root, or make it readable (chmod a+r {root}/intel-rapl:*/energy_uj), considering that it is"
            " restricted to root because it reveals the computations of others (CVE-2020-8694)"
        )
    return ALTERNATIVE

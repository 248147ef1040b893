"""The time that `import microtome` adds to `import torch`."""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.report import Target

SCRIPT = "import torch, time; start = time.perf_counter(); import microtome; print(time.perf_counter() - start)"


def run() -> list[Target]:
    def once() -> float:
        return float(subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout)

    once()  # reads and compiles the files
    added = statistics.median(once() for _ in range(7)) * 1e3
    return [Target("import microtome after import torch, ms", added, 60, {})]

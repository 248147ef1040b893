"""The time that microtome adds to `import torch`, and that of command lines that do not need torch."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.report import Target

SCRIPT = """
import torch, time
start = time.perf_counter()
from microtome import Inputs, Session, load, plan, profile, split, trace, track
print(time.perf_counter() - start)
"""

COMPLETION = {"_MICROTOME_COMPLETE": "bash_complete", "COMP_WORDS": "microtome profile torchv", "COMP_CWORD": "2"}


def run() -> list[Target]:
    def added() -> float:
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
        return float(done.stdout)

    return [
        Target("import functions of microtome after import torch, ms", _median_ms(added), 60, {}),
        Target("microtome --version, ms", _median_ms(lambda: _command("--version")), 250, {}),
        Target("microtome --help, ms", _median_ms(lambda: _command("--help")), 250, {}),
        Target("shell completion of a model, ms", _median_ms(lambda: _command(**COMPLETION)), 250, {}),
    ]


def _command(*words: str, **environment: str) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-m", "microtome", *words]
    subprocess.run(command, env=os.environ | environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def _median_ms(once: Callable[[], float]) -> float:
    once()  # reads and compiles the files
    return statistics.median(once() for _ in range(7)) * 1e3

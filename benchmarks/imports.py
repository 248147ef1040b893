"""The time that microtome adds to `import torch`, and that of command lines that do not need torch."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.report import Target

IMPORT = "import microtome"
FUNCTIONS = "from microtome import Inputs, Session, load, plan, profile, split, trace, track"
SCRIPT = "import torch, time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"

FLOOR = "these need some 50 modules of microtome, of which none takes a tenth of the time"
COMPLETION = {"_MICROTOME_COMPLETE": "bash_complete", "COMP_WORDS": "microtome profile torchv", "COMP_CWORD": "2"}


def run() -> list[Target]:
    return [
        Target("import microtome after import torch, ms", _median_ms(lambda: _import(IMPORT)), 20),
        Target(
            "import functions of microtome after import torch, ms",
            _median_ms(lambda: _import(FUNCTIONS)),
            60,
            floor=FLOOR,
        ),
        Target("microtome --version, ms", _median_ms(lambda: _command("--version")), 250),
        Target("microtome --help, ms", _median_ms(lambda: _command("--help")), 250),
        Target("shell completion of a model, ms", _median_ms(lambda: _command(**COMPLETION)), 250),
    ]


def _import(statement: str) -> float:
    command = [sys.executable, "-c", SCRIPT.format(statement)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _command(*words: str, **environment: str) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-m", "microtome", *words]
    subprocess.run(command, env=os.environ | environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def _median_ms(once: Callable[[], float]) -> float:
    once()  # reads and compiles the files
    return statistics.median(once() for _ in range(7)) * 1e3

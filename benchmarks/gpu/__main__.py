"""Run the benchmarks that need a CUDA device, all or by name: `python -m benchmarks.gpu [gpu-speed …] [--save]`."""

from __future__ import annotations

import sys

from benchmarks import report
from benchmarks.gpu import energy, memory, speed, times

SUITES = {"gpu-times": times.run, "gpu-memory": memory.run, "gpu-energy": energy.run, "gpu-speed": speed.run}


def main() -> int:
    missed = False
    print(report.machine())
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or list(SUITES)
    for name in names:
        targets = SUITES[name]()
        text = report.markdown(targets)
        print(f"\n{text}", flush=True)
        if "--save" in sys.argv:
            print("\nwritten to", report.save(name, text, "make bench-gpu SAVE=1"))
        missed = missed or not all(target.met for target in targets)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

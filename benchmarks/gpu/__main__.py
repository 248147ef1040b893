"""Run every benchmark that needs a CUDA device: `python -m benchmarks.gpu [--save]`."""

from __future__ import annotations

import sys

from benchmarks import report
from benchmarks.gpu import energy, memory, times

SUITES = {"gpu-times": times.run, "gpu-memory": memory.run, "gpu-energy": energy.run}


def main() -> int:
    missed = False
    print(report.machine())
    for name, run in SUITES.items():
        targets = run()
        text = report.markdown(targets)
        print(f"\n{text}", flush=True)
        if "--save" in sys.argv:
            print("\nwritten to", report.save(name, text, "make bench-gpu SAVE=1"))
        missed = missed or not all(target.met for target in targets)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

"""Run every benchmark: `python -m benchmarks [--save]`. Exits with 1 if a target is missed."""

from __future__ import annotations

import sys

from benchmarks import imports, report, tracker


def main() -> int:
    targets = [*tracker.run(), *imports.run()]
    text = report.markdown(targets)
    print(report.machine(), text, sep="\n\n")
    if "--save" in sys.argv:
        print("\nwritten to", report.save("tracker", text))
    return int(not all(target.met for target in targets))


if __name__ == "__main__":
    sys.exit(main())

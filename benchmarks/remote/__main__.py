"""Run the benchmarks of remote: `python -m benchmarks.remote [--save] [SUITE ...]`, with suites of `SUITES`."""

from __future__ import annotations

import sys

from benchmarks import report
from benchmarks.remote import added, batching, chain, pipeline, planned, rates
from benchmarks.remote.network import two_hosts

SUITES = {
    "rates": rates.limited,
    "loopback": rates.unlimited,
    "pipeline": pipeline.run,
    "planned": planned.run,
    "added": added.run,
    "chain": chain.run,
    "batching": batching.run,
}


def main() -> int:
    asked = [word for word in sys.argv[1:] if word in SUITES]
    print(report.machine(), flush=True)
    texts, met = [], True
    with two_hosts() as network:
        for name in asked or SUITES:
            targets = SUITES[name](network)
            met = met and all(target.met for target in targets)
            texts.append(report.markdown(targets))
            print(f"\n{texts[-1]}", flush=True)
    if "--save" in sys.argv:
        print("\nwritten to", report.save("remote", "\n\n".join(texts), "make bench-remote SAVE=1"))
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())

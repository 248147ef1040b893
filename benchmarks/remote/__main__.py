"""Run the benchmarks of remote: `python -m benchmarks.remote [--save] [SUITE ...]`, with suites of `SUITES`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks import report
from benchmarks.remote import added, batching, chain, pipeline, planned, rates
from benchmarks.remote.network import Network, two_hosts
from benchmarks.report import Target

Suite = Callable[[Network], list[Target]]

SUITES: dict[str, Suite] = {
    "rates": rates.limited,
    "loopback": rates.unlimited,
    "pipeline": pipeline.run,
    "planned": planned.run,
    "added": added.run,
    "chain": chain.run,
    "batching": batching.run,
}


def main(words: Sequence[str], suites: Mapping[str, Suite] = SUITES) -> int:
    met = True
    print(report.machine(), flush=True)
    with two_hosts() as network:
        for name in [word for word in words if word in suites] or suites:
            targets = suites[name](network)
            met = met and all(target.met for target in targets)
            text = report.markdown(targets)
            print(f"\n{text}", flush=True)
            if "--save" in words:
                made_by = f"python -m benchmarks.remote {name} --save"
                print("\nwritten to", report.save(f"remote-{name}", text, made_by), flush=True)
    return int(not met)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

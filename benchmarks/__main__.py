"""Run all or the named benchmarks: `python -m benchmarks [--save] [NAME …]`. Exits with 1 if a target is missed."""

from __future__ import annotations

import sys

from benchmarks import (
    boundary,
    capture,
    compiled,
    generate,
    growth,
    imports,
    plan,
    profile,
    ray_serve,
    report,
    split,
    times,
    trace,
    tracker,
    training,
)

SUITES = {
    "tracker": [tracker.run, imports.run],
    "trace": [trace.run],
    "profile": [profile.run],
    "times": [times.run],
    "capture": [capture.run],
    "split": [split.run],
    "compiled": [compiled.run],
    "growth": [growth.run],
    "generate": [generate.run],
    "training": [training.run],
    "boundary": [boundary.run],
    "plan": [plan.run],
    "ray-serve": [ray_serve.run],
}


def main() -> int:
    missed = False
    print(report.machine())
    for name in [word for word in sys.argv[1:] if word in SUITES] or SUITES:
        targets = [target for run in SUITES[name] for target in run()]
        text = report.markdown(targets)
        print(f"\n{text}")
        if "--save" in sys.argv:
            print("\nwritten to", report.save(name, text))
        missed = missed or not all(target.met for target in targets)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

"""Run every attack, longer than the tests do: `python -m tests.remote.attack [NAME ...] [--seconds 20] [--save]`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pkgutil import iter_modules

from benchmarks.report import save
from tests.remote import attack
from tests.remote.attack.harness import ALLOWANCE, BUDGET, Outcome


def attacks() -> dict[str, Callable[[float], Outcome]]:
    """The modules of this package that have a function `run`."""
    names = sorted(one.name for one in iter_modules(attack.__path__) if not one.name.startswith("__"))
    modules = {name: import_module(f"{attack.__name__}.{name}") for name in names}
    return {name: module.run for name, module in modules.items() if hasattr(module, "run")}


def table(outcomes: Sequence[Outcome]) -> str:
    lines = ["| attack | tried | held | peak MB | of that at rest | p99 s |", "|---|---|---|---|---|---|"]
    for one in outcomes:
        p99 = "" if one.p99_s is None else f"{one.p99_s:.3f}"
        lines.append(f"| {one.name} | {one.tried} | {one.held} | {one.peak_mb:.0f} | {one.rest_mb:.0f} | {p99} |")
    lines += [
        "",
        f"The budget of the server is {BUDGET / 1e6:.0f} MB: its memory may grow by that and {ALLOWANCE / 1e6:.0f} MB.",
        "Held are attempts that were refused, ended or answered correctly; the others were open at the end, in bounds.",
        "p99 is of the seconds that a well-behaved client with the token waits for an answer, over one connection or",
        "over a new one, the worse of the two; it is to be under 1 s.",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    known = attacks()
    parser.add_argument("names", nargs="*", choices=[[], *known], help="attacks; all, if none is named")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each goes on")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/attacks.md")
    given = parser.parse_args()
    logging.getLogger("microtome.remote").setLevel(logging.ERROR)
    outcomes, failed = [], False
    for name in given.names or known:
        outcome = known[name](given.seconds)
        outcomes.append(outcome)
        sys.stdout.write(f"{outcome}\n")
        try:
            outcome.check()
            assert outcome.is_prompt, f"{name}: expected a p99 under 1 s, got {outcome.p99_s:.3f} s"
        except AssertionError as error:
            failed = True
            sys.stdout.write(f"FAILED: {error}\n")
    sys.stdout.write(f"\n{table(outcomes)}\n")
    if given.save:
        sys.stdout.write(f"\nwritten to {save('attacks', table(outcomes), 'python -m tests.remote.attack --save')}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

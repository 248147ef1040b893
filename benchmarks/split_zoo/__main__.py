"""Cut every model and write down what came of it."""

from __future__ import annotations

import sys
import time

import torch

from benchmarks.report import save
from benchmarks.split_zoo.models import build, entries
from benchmarks.split_zoo.proof import Tally, prove, table


def main(wanted: list[str]) -> int:
    torch.set_num_threads(1)  # two that wait for each other are slower on small models
    tallies: dict[str, list[Tally]] = {}
    missing: list[str] = []
    for entry in entries():
        if wanted and not any(word in str(entry) for word in wanted):
            continue
        began = time.perf_counter()
        try:
            model, inputs = build(entry)
        except Exception as error:  # noqa: BLE001
            missing.append(f"{entry}: {type(error).__name__}: {error}"[:300])
            print("MISSING", missing[-1], flush=True)
            continue
        try:
            tally = prove(str(entry), model, inputs, entry.most)
        except Exception as error:  # noqa: BLE001
            missing.append(f"{entry}: {type(error).__name__}: {error}"[:300])
            print("FAILED", missing[-1], flush=True)
            continue
        tallies.setdefault(entry.family, []).append(tally)
        took = time.perf_counter() - began
        print(
            f"{entry}: {tally.exact} of {tally.tried} exact, {tally.listed} listed, {tally.unlisted.total()} refused, "
            f"{len(tally.late)} late, {len(tally.failed)} errors, {len(tally.wrong)} wrong, {took:.1f} s",
            flush=True,
        )
        for kind in ("wrong", "failed", "late"):
            for at, why in list(getattr(tally, kind).items())[:2]:
                print(f"    {kind} {at}: {why[:300]}", flush=True)
        for why, count in tally.unlisted.most_common(2):
            print(f"    {count} refused: {why[:250]}", flush=True)
    text = "\n".join(table(tallies))
    print(text)
    print(f"{len(missing)} models could not be made or run")
    if "--save" in sys.argv:
        print(save("split-zoo", text))
    return int(any(one.wrong or one.failed for several in tallies.values() for one in several))


if __name__ == "__main__":
    sys.exit(main([word for word in sys.argv[1:] if not word.startswith("--")]))

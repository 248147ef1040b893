"""Cut every model, and report the results."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version

from benchmarks.report import save
from benchmarks.split_zoo.models import entries
from benchmarks.split_zoo.proof import Tally, table
from benchmarks.split_zoo.trial import run

_PACKAGES = ("torchvision", "timm", "transformers", "vit-pytorch")


def report(tallies: dict[str, list[Tally]], sees: set[str]) -> Iterator[str]:
    """Return the lines of the table, and the refused cuts with their reasons."""
    yield from table(tallies)
    every = [one for several in tallies.values() for one in several]
    images = [one for one in every if one.name in sees]
    refused, listed = sum(one.refused for one in images), sum(one.listed for one in images)
    yield ""
    share = 100 * refused / (listed or 1)
    told = f"{len(images)}, of whose {listed} places {refused} are refused: {share:.2f} %."
    yield f"Models of images, those of transformers left out: {told}"
    tried = "Every cut of models with up to 100, every fifth of larger ones"
    yield f"{tried}, at most 25 of each model of transformers and 8 of clips."
    yield "Each with two batch sizes, through bytes; random weights; small images."
    yield f"{', '.join(f'{name} {version(name)}' for name in _PACKAGES)}."
    reasons: Counter[str] = Counter()
    for one in every:
        for why, count in (*one.unlisted.items(), *((why, 1) for why in one.late.values())):
            reasons[f"{one.name}: {why}"] += count
    if reasons:
        yield ""
        yield "Refused:"
        yield ""
        yield from (f"- {count} of {why[:240]}" for why, count in reasons.most_common())


def main(wanted: list[str]) -> int:
    chosen = [entry for entry in entries() if not wanted or any(word in str(entry) for word in wanted)]
    tallies: dict[str, list[Tally]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:
        for family, tally, text in pool.map(run, chosen):
            print(text, flush=True)
            if tally is not None:
                tallies.setdefault(family, []).append(tally)
    text = "\n".join(report(tallies, {str(entry) for entry in chosen if entry.sees}))
    print(text)
    if "--save" in sys.argv:
        print("\nwritten to", save("split-zoo", text, "make zoo SAVE=1"))
    return int(any(one.wrong or one.failed for several in tallies.values() for one in several))


if __name__ == "__main__":
    sys.exit(main([word for word in sys.argv[1:] if not word.startswith("--")]))

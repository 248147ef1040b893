"""Compare counts of torchvision models with the published ones: `python -m benchmarks.zoo [--save] [NAME …]`."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from typing import NamedTuple

import torch

from benchmarks.published import FOUND, table
from benchmarks.report import save


class Comparison(NamedTuple):
    """Published and counted figures of a set of weights.

    Attributes:
        objects: The number of objects that a detector finds, if it was chosen to match; None otherwise.
    """

    name: str
    published: tuple[int, float]
    counted: tuple[int, float | None]
    agrees: bool
    objects: int | None

    def row(self) -> str:
        (params, macs), (own_params, own_macs) = self.published, self.counted
        own = "None" if own_macs is None else f"{own_macs:.3f}"
        return f"| {self.name} | {params:,} | {own_params:,} | {macs:.3f} | {own} | {'yes' if self.agrees else 'NO'} |"


def count(index: int) -> Comparison:
    torch.set_num_threads(1)
    entry = table()[index]
    profile = entry.profile()
    flops = profile.total.flops
    counted = profile.total.params or 0, None if flops is None else flops / 1e9
    agrees = flops is not None and entry.agrees(profile)
    return Comparison(str(entry), (entry.params, entry.giga_macs), counted, agrees, FOUND.get(str(entry.weights)))


def report(found: Iterable[Comparison]) -> Iterator[str]:
    several = sorted(found)
    exact = sum(one.counted[1] is not None and round(one.counted[1], 3) == one.published[1] for one in several)
    agree = sum(one.agrees for one in several)
    yield f"Of {len(several)} sets of weights {agree} agree: parameters exactly, GMACs within 0.5 % or 0.001;"
    yield f"{exact} to the last digit that is published. torchvision {version('torchvision')}, random weights."
    yield ""
    if chosen := [one for one in several if one.objects is not None]:
        each = " and ".join(f"{one.objects} in {one.name}" for one in chosen)
        yield "A detector costs what it finds in noise, which the table, made with trained weights, does not say."
        yield f"Here detectors find nothing, but {each}: numbers chosen so that they agree."
        yield f"Without those {len(chosen)}, {sum(one.agrees for one in several if one.objects is None)} agree."
        yield ""
    yield "| weights | parameters, published | counted | GMACs, published | counted | agree |"
    yield "|---|--:|--:|--:|--:|---|"
    yield from (one.row() for one in several)


def main(wanted: list[str]) -> int:
    chosen = [at for at, entry in enumerate(table()) if not wanted or any(word in str(entry) for word in wanted)]
    found = []
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for one in pool.map(count, chosen):
            found.append(one)
            print(one.row(), flush=True)
    text = "\n".join(report(found))
    print(f"\n{text.partition('|')[0]}")
    if "--save" in sys.argv:
        print("written to", save("zoo", text, "make zoo SAVE=1"))
    return int(not all(one.agrees for one in found))


if __name__ == "__main__":
    sys.exit(main([word for word in sys.argv[1:] if not word.startswith("--")]))

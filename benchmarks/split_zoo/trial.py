"""Build and cut one model."""

from __future__ import annotations

import logging
import time

import torch

from benchmarks.split_zoo.models import Entry, build
from benchmarks.split_zoo.proof import Tally, prove


def run(entry: Entry) -> tuple[str, Tally | None, str]:
    """Return the family of a model, the results of its cuts, and a description of them."""
    torch.set_num_threads(1)  # more threads are slower on small models
    logging.disable(logging.WARNING)
    began = time.perf_counter()
    try:
        model, inputs = build(entry)
        tally = prove(str(entry), model, inputs, entry.most)
    except Exception as error:  # noqa: BLE001
        return entry.family, None, f"{entry}: NOT RUN, {type(error).__name__}: {error}"[:300]
    lines = [
        f"{entry}: {tally.exact} of {tally.tried} bit-equal, {tally.listed} listed, {tally.unlisted.total()} refused, "
        f"{len(tally.late)} refused by mt.split, {len(tally.failed)} errors, {len(tally.wrong)} wrong, "
        f"{time.perf_counter() - began:.1f} s"
    ]
    for kind in ("wrong", "failed", "late"):
        lines += [f"    {kind} {at}: {why[:300]}" for at, why in list(getattr(tally, kind).items())[:3]]
    lines += [f"    {count} refused: {why[:250]}" for why, count in tally.unlisted.most_common(3)]
    return entry.family, tally, "\n".join(lines)

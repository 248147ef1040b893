"""Verify that head and tail in two processes with different hash seeds compute the model's output.

Iteration over a set of strings depends on PYTHONHASHSEED, and many models of transformers call modules in such a loop.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import microtome as mt
from benchmarks.split_zoo.models import build, entries, mixed
from microtome.errors import MicrotomeError
from microtome.split.comparison import differences
from microtome.split.splitter import Splitter

Built = tuple[nn.Module, list[Any]]

EXACT = "exact"
#: The number of cuts to try of each model of transformers.
_MOST = 5


def heads(models: Mapping[str, Callable[[], Built]], folder: Path, most: int | None) -> None:
    """Run the heads of some cuts of each model on its last input, and write their boundaries to the folder."""
    listed: dict[str, list[str]] = {}
    for number, (name, make) in enumerate(models.items()):
        listed[name] = []
        try:
            model, inputs = make()
            splitter = Splitter(model, inputs[0])
        except Exception as error:  # noqa: BLE001  of a package that cannot be imported, for example
            print(f"{name}: NOT RUN, {type(error).__name__}: {error}"[:300], flush=True)
            continue
        step = 1 if most is None else max(1, len(splitter.cuts) // most)
        for cut in splitter.cuts[step // 2 :: step]:
            file = folder / f"{number}-{len(listed[name])}"
            listed[name].append(cut.at)
            given = mt.Inputs.of(inputs[-1])
            try:
                head = splitter.at(cut, verify=most is None)[0]
                torch.manual_seed(0)
                file.write_bytes(head(*given.args, **given.kwargs).to_bytes())
            except MicrotomeError as error:
                file.with_suffix(".refused").write_text(str(error))
    (folder / "cuts.json").write_text(json.dumps(listed))


def tails(models: Mapping[str, Callable[[], Built]], folder: Path, most: int | None) -> dict[str, dict[str, str]]:
    """Run the tails of the same cuts on these boundaries; return the outcome for each model and cut."""
    listed = json.loads((folder / "cuts.json").read_text())
    found: dict[str, dict[str, str]] = {}
    for number, (name, make) in enumerate(models.items()):
        if not listed[name]:
            continue
        model, inputs = make()
        splitter = Splitter(model, inputs[0])
        given = mt.Inputs.of(inputs[-1])
        torch.manual_seed(0)
        whole = given.run(model)
        found[name] = {}
        for index, at in enumerate(listed[name]):
            file = folder / f"{number}-{index}"
            if not file.exists():
                found[name][at] = f"refused by the head: {file.with_suffix('.refused').read_text()}"
                continue
            try:
                head, tail = splitter.at(at, verify=most is None)
                torch.manual_seed(0)
                head(*given.args, **given.kwargs)  # advances the generator as in the other process
                apart = list(differences(tail(mt.Boundary.from_bytes(file.read_bytes())), whole))
                found[name][at] = f"wrong: {apart[0].path} {apart[0].description}" if apart else EXACT
            except MicrotomeError as error:
                found[name][at] = f"refused: {error}"
    return found


def run_side(models: Mapping[str, Callable[[], Built]], role: str, folder: str, most: int | None = None) -> None:
    """Run one of the two processes."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if role == "heads":
            heads(models, Path(folder), most)
        else:
            (Path(folder) / "found.json").write_text(json.dumps(tails(models, Path(folder), most)))


def in_two_processes(module: str, seeds: tuple[int, int], *words: str) -> dict[str, dict[str, str]]:
    """Run heads and tails by `python -m module ROLE FOLDER …`, each with its own hash seed."""
    with tempfile.TemporaryDirectory() as folder:
        for role, seed in zip(("heads", "tails"), seeds, strict=True):
            environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
            subprocess.run([sys.executable, "-m", module, role, folder, *words], env=environment, check=True)
        result: dict[str, dict[str, str]] = json.loads((Path(folder) / "found.json").read_text())
        return result


def _chosen(words: list[str]) -> dict[str, Callable[[], Built]]:
    """Return the selected models of transformers, with layers of all their kinds."""

    def maker(entry: Any) -> Callable[[], Built]:
        def make() -> Built:
            with mixed():
                return build(entry)

        return make

    named = {str(entry): entry for entry in entries() if entry.family == "transformers"}
    return {name: maker(one) for name, one in named.items() if not words or name.partition(":")[2] in words}


def main(words: list[str]) -> int:
    wrong = 0
    for seeds in ((0, 1), (1, 0)):
        found = in_two_processes("benchmarks.split_zoo.seeds", seeds, *words)
        every = [(f"{name} at {at}", what) for name, cuts in found.items() for at, what in cuts.items()]
        refused = [f"{where}: {what}" for where, what in every if what.startswith("refused")]
        bad = [f"{where}: {what}" for where, what in every if what.startswith("wrong")]
        exact = sum(what == EXACT for _, what in every)
        print(f"hash seeds {seeds}: {len(found)} models, {len(every)} cuts, {exact} exact, {len(bad)} wrong")
        print("\n".join([*bad, *refused]))
        wrong += len(bad)
    return int(bool(wrong))


if __name__ == "__main__":
    if sys.argv[1:2] in (["heads"], ["tails"]):
        run_side(_chosen(sys.argv[3:]), sys.argv[1], sys.argv[2], _MOST)
    else:
        sys.exit(main(sys.argv[1:]))

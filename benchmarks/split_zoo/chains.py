"""Verify that three processes, a client and two servers with other hash seeds, compute the model's output together.

`python -m benchmarks.split_zoo.chains [--save] [--every N] [NAMES]`
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

import microtome as mt
from benchmarks.report import save
from benchmarks.split_zoo.models import Entry, build, entries
from microtome.errors import MicrotomeError
from microtome.split.comparison import differences

#: Of the models, every 6th is tried; of each, so many pairs of cuts.
_EVERY, _PAIRS = 6, 3


class _Server:
    """A process that serves one model after the other."""

    def __init__(self, hash_seed: int) -> None:
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", __spec__.name, "serve"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def serve(self, name: str) -> None:
        """Begin to build and serve a model, in place of the last one."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()

    @property
    def address(self) -> str:
        """The address, once the model is served."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line.startswith("served at "):
            raise RuntimeError(line or "the server ended")
        return line.removeprefix("served at ")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def serve() -> None:
    """Serve the models that stdin names."""
    named = {str(entry): entry for entry in entries()}
    with ExitStack() as last:
        for line in sys.stdin:
            last.close()
            with _quiet():
                try:
                    model, inputs = build(named[line.strip()])
                    server = last.enter_context(mt.serve(model.eval(), inputs[0], listen="127.0.0.1:0"))
                except Exception as error:  # noqa: BLE001  of a package that cannot be imported, for example
                    print(f"{type(error).__name__}: {error}".replace("\n", " ")[:300], flush=True)
                    continue
            print(f"served at {server.address}", flush=True)


def prove(entry: Entry, servers: Sequence[_Server]) -> Iterator[tuple[str, str]]:
    """Yield each pair of cuts, and `"exact"`, `"refused: …"` or `"wrong: …"`."""
    for server in servers:
        server.serve(str(entry))
    model, inputs = build(entry)
    model.eval()
    wholes = [mt.Inputs.of(one).run(model) for one in inputs]
    addresses = [server.address for server in servers]
    cuts = [cut.at for cut in mt.cuts(model, inputs[0]) if cut.refused is None]
    pairs = list(itertools.combinations(cuts, 2))
    for pair in random.Random(str(entry)).sample(pairs, min(_PAIRS, len(pairs))):
        # Two servers, and this process for the head; one, and this process for the head and the last stage.
        for used in (addresses, addresses[:1]):
            yield f"{' → '.join(pair)} over {len(used)}", _compare(model, inputs, wholes, pair, used)


def _compare(
    model: nn.Module, inputs: list[Any], wholes: list[Any], cuts: Sequence[str], servers: Sequence[str]
) -> str:
    try:
        with mt.connect(model, inputs[0], servers=servers, at=cuts, codec="raw", fallback=None) as remote:
            for one, whole in zip(inputs, wholes, strict=True):
                given = mt.Inputs.of(one)
                output = remote(*given.args, **given.kwargs)
                for difference in differences(output, whole):
                    return f"wrong: {difference.path} {difference.description}"
    except MicrotomeError as error:
        return f"refused: {error}"
    return "exact"


@contextmanager
def _quiet() -> Iterator[None]:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main(words: list[str]) -> int:
    every = int(words[words.index("--every") + 1]) if "--every" in words else _EVERY
    names = [word for word in words if not word.startswith("--") and not word.isdigit()]
    listed = list(entries())
    chosen = [one for one in listed if str(one) in names] if names else listed[::every]
    outcomes: Counter[str] = Counter()
    lines = []
    servers = [_Server(hash_seed) for hash_seed in (1, 2)]
    try:
        with _quiet():
            for entry in chosen:
                try:
                    found = list(prove(entry, servers))
                except Exception as error:  # noqa: BLE001  of a model that does not run here
                    found = [("", f"not run: {type(error).__name__}: {error}"[:300])]
                outcomes.update(outcome.partition(":")[0] for _, outcome in found)
                bad = [f"- {entry} at {at}: {outcome[:300]}" for at, outcome in found if outcome != "exact"]
                lines += bad
                print(f"{entry}: {dict(Counter(outcome.partition(':')[0] for _, outcome in found))}", *bad, flush=True)
    finally:
        for server in servers:
            server.stop()
    sample = "by name" if names else f"every {every}th of {len(listed)}"
    counts = ", ".join(f"{count} {name}" for name, count in outcomes.items())
    text = f"{len(chosen)} models ({sample}), {_PAIRS} pairs of cuts and two inputs each: {counts}"
    text = "\n".join([f"{text}.", "", *lines])
    print(text)
    if "--save" in words:
        made_by = " ".join(["python -m benchmarks.split_zoo.chains", *words])
        print("written to", save("chains", text, made_by))
    return int(outcomes["wrong"] > 0)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        sys.exit(main(sys.argv[1:]))

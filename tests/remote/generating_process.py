"""The sides of a split language model as processes, and servers that are killed in the middle of an answer.

`python -m tests.remote.generating_process kills 50` kills a server at 50 random tokens.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import torch

import microtome as mt
from microtome.remote.server import serve
from tests.split.language_models import VOCABULARY, build

IDS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).index_fill(1, torch.tensor([0, 1]), 0)


def _write_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run_tail(name: str, folder: str) -> None:
    """Serve the last stage until killed."""
    tail = mt.load_stage(lambda: build(name)[0], folder, "tail")
    with serve(tail, listen="127.0.0.1:0") as server:
        _write_line(server.address)
        server.wait()


def run_whole(name: str, address: str) -> None:
    """Serve the whole model until killed."""
    with serve(build(name)[0], {"input_ids": IDS}, listen=address) as server:
        _write_line(server.address)
        server.wait()


def run_head(name: str, folder: str, address: str) -> None:
    """Generate with the first stage, and print the tokens."""
    head = mt.load_stage(lambda: build(name)[0], folder, "head")
    assert any(parameter.is_meta for parameter in head.model.parameters())
    with mt.connect(head, None, address) as remote:
        torch.manual_seed(5)
        answer = remote.generate(IDS, attention_mask=MASK, max_new_tokens=20, do_sample=False, num_beams=2)
    _write_line(json.dumps(answer.tolist()))


class _Server:
    """A process that serves the whole model."""

    def __init__(self) -> None:
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Start it, on the port that it had if it had one."""
        command = [sys.executable, "-m", "tests.remote.generating_process", "whole", "llama", self.address]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class _Killer:
    """A logits processor that kills a server before a token; another one may take its place."""

    def __init__(self, server: _Server, after: int, *, restarts: bool) -> None:
        self._server, self._left, self._restarts = server, after, restarts

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            self._server.kill()
            if self._restarts:
                self._server.start()
        return scores


@torch.no_grad()
def run_kills(count: int, seed: int = 0) -> dict[str, int]:
    """Kill the server at random tokens of answers; every second time another one takes its place."""
    model, at = build("llama")
    chance = random.Random(seed)
    results = {"right": 0, "wrong": 0}
    server = _Server()
    try:
        for number in range(count):
            options = {"attention_mask": MASK, "max_new_tokens": 20}
            options |= chance.choice([{"do_sample": False}, {"do_sample": True}, {"do_sample": False, "num_beams": 2}])
            torch.manual_seed(number)
            expected = model.generate(IDS, **options)
            restarts = number % 2 == 1
            fallback = None if restarts else "local"
            with mt.connect(model, {"input_ids": IDS}, server.address, at=at, fallback=fallback) as remote:
                killer = _Killer(server, chance.randrange(1, 20), restarts=restarts)
                torch.manual_seed(number)
                answer = remote.generate(IDS, logits_processor=[killer], **options)
            results["right" if answer.equal(expected) else "wrong"] += 1
            if not restarts:
                server.start()
    finally:
        server.kill()
    return results


if __name__ == "__main__":
    side, *arguments = sys.argv[1:]
    if side == "kills":
        sys.stdout.write(f"{run_kills(int(arguments[0]))}\n")
    elif side == "head":
        run_head(*arguments)
    elif side == "tail":
        run_tail(*arguments)
    else:
        run_whole(*arguments)

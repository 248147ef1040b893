"""Throughput of a server that computes batches, compared with one that computes each request alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

import microtome as mt
from benchmarks.remote.models import build
from benchmarks.remote.network import LOOPBACK, Network
from benchmarks.remote.processes import job, microtome
from benchmarks.report import Target
from benchmarks.timing import take_turns

#: 64 requests at once: those of two clients, since a server reads 32 of a stream.
CLIENTS, IN_FLIGHT = 2, 32
AT, INPUTS = "first", "1x1024"
WIDE = "benchmarks.remote.batching:Wide"


class Wide(nn.Sequential):
    """A tail of 16 million weights, whose reading from memory takes the time of a request: a batch reads them once."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        tail = nn.Sequential(*(layer for _ in range(16) for layer in (nn.ReLU(), nn.Linear(1024, 1024))))
        super().__init__(OrderedDict(first=nn.Linear(1024, 1024), tail=tail))
        for layer in tail:
            if isinstance(layer, nn.Linear):  # by default, inputs fade from layer to layer until rounding counts
                nn.init.kaiming_normal_(layer.weight)
        self.eval()


class Clients:
    """Clients of one server, each of which keeps its share of the requests in flight.

    Args:
        build: Makes the model and its example for each client.
        items: The inputs of a client's requests.
    """

    def __init__(
        self, stack: ExitStack, address: str, build: Callable[[], tuple[Any, Any]], at: str, items: list[Tensor]
    ) -> None:
        self._pool = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        self._remotes = []
        for _ in range(CLIENTS):
            remote = mt.connect(*build(), address, at=at, codec="raw", fallback=None)
            self._remotes.append(stack.enter_context(remote))
        self._items = items

    def send_all(self) -> None:
        futures = [self._pool.submit(self._send, remote) for remote in self._remotes]
        for future in futures:
            future.result()

    def _send(self, remote: Any) -> None:
        with torch.no_grad():
            assert len(list(remote.stream(self._items, window=len(self._items)))) == len(self._items)


def measure(servers: dict[str, str], rounds: int) -> dict[str, float]:
    """Return the seconds of all requests at each server."""
    found = build(WIDE, INPUTS)
    items = [torch.randn(1, 1024) for _ in range(IN_FLIGHT)]
    with ExitStack() as stack:
        clients = {
            name: Clients(stack, address, lambda: (found.model, found.inputs), AT, items)
            for name, address in servers.items()
        }
        return take_turns({name: one.send_all for name, one in clients.items()}, rounds, of=min)


def run(_: Network) -> list[Target]:
    with microtome(LOOPBACK, WIDE, INPUTS) as alone, microtome(LOOPBACK, WIDE, INPUTS, "--batch", "32") as batched:
        given = {"servers": {"alone": alone, "batched": batched}, "rounds": 12}
        took = job(LOOPBACK, "benchmarks.remote.batching:measure", given)
    rates = {name: CLIENTS * IN_FLIGHT / seconds for name, seconds in took.items()}
    note = (
        f"16 linear layers of 1024 after the first, {CLIENTS * IN_FLIGHT} requests at once: {rates['alone']:.0f} in a "
        f"second, in batches of up to 32 {rates['batched']:.0f}"
    )
    name = "64 requests at once: time in batches / one by one"
    return [Target(name, took["batched"] / took["alone"], 0.5, note=note)]

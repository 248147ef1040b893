"""Many requests of many clients over lines that break, each answer compared: `python -m tests.remote.soak`.

The server is a process of its own, and its memory is read as it goes: after a first tenth of the requests to warm up,
and at the end.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

import microtome as mt
from microtome import zoo
from microtome.errors import RemoteError
from microtome.remote.client import Remote
from tests.remote.process import ServerProcess
from tests.remote.proxy import Proxy

CUTS = ("", "stem", "layer1.0.conv1", "layer1", "layer2.0", "layer2", "pool", "fc")


@dataclass(frozen=True)
class Soaked:
    """What came of it.

    Attributes:
        wrong: Answers that are not the model's.
        lost: Requests without an answer.
        repeated: Requests that were sent more than once.
        warm_bytes: What the server takes after the first tenth of the requests, and `end_bytes` at the end.
    """

    requests: int
    right: int
    wrong: int
    lost: int
    repeated: int
    disconnects: int
    reconnects: int
    warm_bytes: int
    end_bytes: int
    seconds: float

    @property
    def growth(self) -> float:
        return self.end_bytes / self.warm_bytes - 1

    def __str__(self) -> str:
        return (
            f"{self.requests} requests in {self.seconds:.0f} s: {self.right} right, {self.wrong} wrong, {self.lost} "
            f"lost; {self.disconnects} disconnects, {self.reconnects} reconnects, {self.repeated} requests sent again; "
            f"the server's memory {self.warm_bytes / 1e6:.1f} MB warm, {self.end_bytes / 1e6:.1f} MB at the end: "
            f"{100 * self.growth:+.2f} %"
        )


class _Client:
    """One client with a line of its own."""

    def __init__(self, server: str, number: int) -> None:
        self.proxy = Proxy(server)
        model, x = zoo.build("tiny-resnet")
        self.remote: Remote = mt.connect(
            model, x, self.proxy.address, at=CUTS[number % len(CUTS)], codec=("raw", "zstd")[number % 2], fallback=None
        )
        self.right = self.wrong = self.lost = self.repeated = 0

    def ask(self, given: list[Tensor], expected: list[Tensor], count: int, seed: int) -> None:
        """Half of them one by one, half as a stream."""
        order = random.Random(seed).choices(range(len(given)), k=count)
        for begin in range(0, count, 40):
            for index in order[begin : begin + 20]:
                try:
                    self._compare(self.remote(given[index]), expected[index])
                except RemoteError as error:
                    self._lose(1, error)
            several = order[begin + 20 : begin + 40]
            came = 0
            try:
                for index, got in zip(several, self.remote.stream(given[at] for at in several), strict=True):
                    came += 1
                    self._compare(got, expected[index])
            except RemoteError as error:
                self._lose(len(several) - came, error)
            self.repeated += sum(sent.attempts > 1 for sent in self.remote.requests)
            self.remote.requests.clear()

    def _compare(self, got: Tensor, expected: Tensor) -> None:
        if got.equal(expected):
            self.right += 1
        else:
            self.wrong += 1

    def _lose(self, count: int, error: RemoteError) -> None:
        self.lost += count
        sys.stderr.write(f"{error.kind}: {error}\n")

    def close(self) -> None:
        self.remote.close()
        self.proxy.close()


class _Breaker:
    """Cuts the line of one client after the other, at random moments."""

    def __init__(self, clients: list[_Client], pause_s: float, seed: int) -> None:
        self.cuts = 0
        self._ended = threading.Event()
        self._clients, self._pause_s, self._random = clients, pause_s, random.Random(seed)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._random.uniform(0, 2 * self._pause_s)):
            self._random.choice(self._clients).proxy.cut()
            self.cuts += 1

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


@torch.no_grad()
def soak(requests: int, clients: int, pause_s: float = 0.2, seed: int = 0) -> Soaked:
    """Have clients ask, and cut their lines every `pause_s` seconds on average."""
    model, _ = zoo.build("tiny-resnet")
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(1 + index % 3, 3, 32, 32, generator=generator) for index in range(60)]
    expected = [model(x) for x in given]
    began = time.perf_counter()
    with ServerProcess("zoo:tiny-resnet", "--log-level", "error") as server:
        asking = [_Client(server.address, number) for number in range(clients)]
        breaker = _Breaker(asking, pause_s, seed)
        each = requests // clients
        try:
            _ask_all(asking, given, expected, each // 10, seed)
            warm = _settled(server)
            _ask_all(asking, given, expected, each - each // 10, seed + 1)
            end = _settled(server)
            if not server.is_alive:
                raise AssertionError(f"the server ended: {server.stderr}")
        finally:
            breaker.stop()
            for client in asking:
                client.close()
    return Soaked(
        each * clients,
        sum(one.right for one in asking),
        sum(one.wrong for one in asking),
        sum(one.lost for one in asking),
        sum(one.repeated for one in asking),
        breaker.cuts,
        sum(one.remote._chain.pools[0].connections[0].reconnects for one in asking),
        warm,
        end,
        time.perf_counter() - began,
    )


def _ask_all(clients: list[_Client], given: list[Tensor], expected: list[Tensor], count: int, seed: int) -> None:
    with ThreadPoolExecutor(len(clients)) as threads:
        done = [
            threads.submit(client.ask, given, expected, count, 1000 * seed + number)
            for number, client in enumerate(clients)
        ]
    for one in done:
        one.result()


def _settled(server: ServerProcess) -> int:
    """The memory of the server: the middle of a few looks at it."""
    looks = []
    for _ in range(5):
        looks.append(server.rss)
        time.sleep(0.1)
    return int(median(looks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between disconnects, on average")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.getLogger("microtome.remote").setLevel(logging.ERROR)
    found = soak(given.requests, given.clients, given.pause, given.seed)
    sys.stdout.write(f"{found}\n")
    if found.wrong or found.lost or found.right != found.requests or found.growth > 0.05:
        sys.exit(1)


if __name__ == "__main__":
    main()

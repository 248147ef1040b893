"""Run an attack on a real server in a process of its own, with a well-behaved client beside it, and measure both.

Each module of this package with a function `run(seconds) -> Outcome` is a row of the table; `python -m
tests.remote.attack` finds it. One that attacks a server has a function `attack(target: Target) -> Tally` too, which
`attack_server` calls in a third process, so that it does not slow the well-behaved client down; it returns soon after
`target.is_over()`. One that attacks something else uses `run_limited`.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import microtome as mt
from microtome import zoo
from microtome.errors import RemoteError
from tests.remote.process import ServerProcess

TOKEN = "a token of the tests"
#: Bytes of a request that the server accepts, and its budget for all it holds of peers: four times that.
MAX_MESSAGE = 32_000_000
BUDGET = 4 * MAX_MESSAGE
#: What the server may take beyond its budget and its size at rest, and the address space after which it is killed.
ALLOWANCE, RUNAWAY = 300_000_000, 4_000_000_000
#: The line that the process of an attack writes when it begins.
BEGUN = "begun"
#: Seconds that the process of an attack may take beyond its time.
_SPARE_S = 60.0


@dataclass
class Target:
    """A server under attack.

    Attributes:
        token: The server's, for attacks by somebody who has one.
        seconds: How long the attack goes on, from when it first asks whether it is over.
        extra: What else the attack needs to know: JSON values.
    """

    address: str
    token: str
    seconds: float
    extra: Sequence[Any] = ()
    _began: float | None = None

    @property
    def host(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    def is_over(self) -> bool:
        if self._began is None:
            self._began = time.monotonic()
        return time.monotonic() - self._began >= self.seconds


@dataclass
class Tally:
    """Attempts of an attack, and how many of them the other side refused, ended or answered correctly."""

    tried: int = 0
    held: int = 0


@dataclass(frozen=True)
class Outcome:
    """One row of the table.

    Attributes:
        peak_mb: The largest resident size of the process under attack, and `rest_mb` its size before.
        budget_mb: What it may hold for its peers.
        p99_s: Of what a well-behaved client waited for an answer; None: there is none beside this attack.
        answers: Correct answers that it got.
        faults: What went wrong for it, or for the process under attack.
    """

    name: str
    tried: int
    held: int
    peak_mb: float
    rest_mb: float = 0.0
    budget_mb: float = 0.0
    p99_s: float | None = None
    answers: int = 0
    faults: tuple[str, ...] = ()

    @property
    def grew_mb(self) -> float:
        return self.peak_mb - self.rest_mb

    def check(self) -> None:
        """Raise unless memory stayed in its bounds and every answer was correct. Times are left to `is_prompt`."""
        assert not self.faults, f"{self.name}: {self.faults[:5]}"
        assert self.tried > 0, f"{self.name}: nothing was tried"
        most = self.budget_mb + ALLOWANCE / 1e6
        assert self.grew_mb <= most, f"{self.name}: expected at most {most:.0f} MB more, got {self.grew_mb:.0f} MB"
        assert self.p99_s is None or self.answers > 0, f"{self.name}: the well-behaved client got no answer"

    @property
    def is_prompt(self) -> bool:
        """Whether the well-behaved client waited for less than a second."""
        return self.p99_s is None or self.p99_s < 1.0


# -- a server under attack ---------------------------------------------------------------------------------------------


def attack_server(
    name: str, seconds: float, *options: str, descriptors: int | None = None, extra: Sequence[Any] = ()
) -> Outcome:
    """Attack a server with `tests.remote.attack.NAME`.

    Args:
        options: Further ones of `microtome serve`.
        descriptors: The limit of open files of the server; None: that of this process.
        extra: JSON values for the attack.
    """
    with _serving(options, descriptors) as server:
        rest = reset_peak(server.pid)
        server.limit_memory(BUDGET + RUNAWAY)
        client = _WellBehaved(server.address)
        process = _start(f"tests.remote.attack.{name}:attack", server.address, TOKEN, seconds, extra)
        _wait_for_start(process)
        faults = client.ask_while(lambda: process.poll() is None, seconds + _SPARE_S)
        result = _finish(process, timeout=5.0)
        if not server.is_alive:
            faults.append(f"the server ended: {server.stderr[-2000:]}")
        peak = peak_of(server.pid) if server.is_alive else float("inf")
        client.close()
        tally = Tally(**result) if isinstance(result, dict) else Tally()
        if isinstance(result, str):
            faults.append(result)
    return Outcome(
        name,
        tally.tried,
        tally.held,
        peak / 1e6,
        rest / 1e6,
        BUDGET / 1e6,
        client.p99_s,
        len(client.waits) + len(client.connect_waits),
        tuple(faults),
    )


@contextmanager
def _serving(options: tuple[str, ...], descriptors: int | None) -> Iterator[ServerProcess]:
    with tempfile.NamedTemporaryFile("w", suffix=".token") as file:
        file.write(TOKEN)
        file.flush()
        usual = "--token-file", file.name, "--max-message", str(MAX_MESSAGE), "--log-level", "error"
        with ServerProcess("zoo:tiny-resnet", *usual, *options, descriptors=descriptors) as server:
            yield server


class _WellBehaved:
    """A client with the token that asks again and again, over one connection and over new ones, and compares answers.

    Attributes:
        waits: Seconds to each answer, and `connect_waits` those to the first one of a new connection.
    """

    def __init__(self, address: str) -> None:
        torch.set_num_threads(1)
        self.address = address
        self.waits: list[float] = []
        self.connect_waits: list[float] = []
        self._faults: list[str] = []
        model, x = zoo.build("tiny-resnet")
        self._x = x
        self._head = mt.split(model, x, at="layer1")[0]
        with torch.no_grad():
            self._expected = model(x)
        self._remote = self._connected()
        self._ask(self._remote)  # the server makes its tail for the cut

    def _connected(self) -> Any:
        return mt.connect(self._head, None, self.address, at="layer1", codec="raw", fallback=None, token=TOKEN)

    @torch.no_grad()
    def _ask(self, remote: Any) -> None:
        if not remote(self._x).equal(self._expected):
            self._faults.append("a wrong answer")

    def _ask_again(self) -> None:
        self._ask(self._remote)

    def _connect_again(self) -> None:
        with self._connected() as another:
            self._ask(another)

    def ask_while(self, goes_on: Callable[[], bool], most_s: float) -> list[str]:
        """Ask until the attack is over; what went wrong."""
        ends = time.monotonic() + most_s
        is_over = threading.Event()
        with ThreadPoolExecutor(2) as threads:
            threads.submit(self._repeat, self._ask_again, self.waits, 0.01, is_over)
            threads.submit(self._repeat, self._connect_again, self.connect_waits, 0.1, is_over)
            while goes_on() and time.monotonic() < ends:
                time.sleep(0.02)
            is_over.set()
        return self._faults

    def _repeat(self, ask: Callable[[], None], waits: list[float], pause_s: float, is_over: threading.Event) -> None:
        while not is_over.wait(pause_s) and len(self._faults) < 100:
            start = time.perf_counter()
            try:
                ask()
            except RemoteError as error:
                self._faults.append(str(error)[:500])
            waits.append(time.perf_counter() - start)

    @property
    def p99_s(self) -> float:
        """The worse one of requests and of new connections; of fewer than 100, the longest."""
        several = [sorted(waits) for waits in (self.waits, self.connect_waits) if waits]
        return max((waits[math.ceil(0.99 * len(waits)) - 1] for waits in several), default=math.inf)

    def close(self) -> None:
        self._remote.close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


# -- memory, and processes ---------------------------------------------------------------------------------------------


def peak_of(pid: int) -> int:
    """The largest resident size that a process had, in bytes, since `reset_peak` or its start."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def reset_peak(pid: int) -> int:
    """Begin to look for the peak of a process's memory anew; what it takes now, in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return psutil.Process(pid).memory_info().rss


@dataclass(frozen=True)
class Limited:
    """What a function returned in a process of its own; or, where it failed or was killed, a `fault`."""

    result: Any
    fault: str | None
    peak_mb: float
    rest_mb: float


def run_limited(function: str, *args: Any, most: int = RUNAWAY, timeout: float = 120.0) -> Limited:
    """Call `"module:function"` with JSON values in a process of its own, which may take so much more memory.

    For what is attacked but no server: a client, a reader of files. The function returns a JSON value; `peak_mb` is the
    largest resident size of the process while it ran, and `rest_mb` that after imports and before the call.
    """
    process = _start(function, *args, most=most)
    ends = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < ends:
        time.sleep(0.01)
    result = _finish(process, timeout=1.0, whole=True)
    if isinstance(result, str):
        return Limited(None, result, float("nan"), float("nan"))
    return Limited(result["result"], None, result["peak"] / 1e6, result["rest"] / 1e6)


def _start(function: str, *args: Any, most: int | None = None) -> subprocess.Popen[str]:
    given = json.dumps([function, args, most])
    return subprocess.Popen(
        [sys.executable, "-m", "tests.remote.attack.child", given],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _wait_for_start(process: subprocess.Popen[str]) -> None:
    """Return once imports are done, which take the processor from everybody."""
    assert process.stdout is not None
    while (line := process.stdout.readline()) and line.strip() != BEGUN:
        pass


def _finish(process: subprocess.Popen[str], timeout: float, *, whole: bool = False) -> Any:
    """What the process returned; a text: why it did not."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return f"the process did not end in time: {output[-2000:]}"
    lines = output.strip().splitlines()
    if process.returncode or not lines:
        return f"the process ended with {process.returncode}: {output[-2000:]}"
    found = json.loads(lines[-1])
    return found if whole else found["result"]

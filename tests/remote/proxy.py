"""A way between client and server that can be made bad: cut, stopped, slow, late or damaging."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

_CHUNK = 16 << 10


@dataclass
class Weather:
    """What happens to bytes of one direction of one connection.

    Attributes:
        cut_after: Bytes that pass before the connection is cut; None: it is not.
        pass_on: Whether bytes pass; otherwise they wait in the proxy.
        bytes_per_s: At most.
        delay_s: How long each piece waits.
        corrupt: What is made of a piece, told from which byte on it is.
    """

    cut_after: int | None = None
    pass_on: threading.Event = field(default_factory=threading.Event)
    bytes_per_s: float | None = None
    delay_s: float = 0.0
    corrupt: Callable[[int, bytes], bytes] | None = None
    passed: int = 0

    def __post_init__(self) -> None:
        self.pass_on.set()


class Pair:
    """A connection through the proxy."""

    def __init__(self, client: socket.socket, server: socket.socket, up: Weather, down: Weather) -> None:
        self._sockets = client, server
        self.up, self.down = up, down
        self.ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._pump, args=ends, name="proxy", daemon=True)
            for ends in ((client, server, up), (server, client, down))
        ]
        for thread in self._threads:
            thread.start()

    def cut(self) -> None:
        """End both connections at once, as a broken line does."""
        self.ended.set()
        for weather in (self.up, self.down):
            weather.pass_on.set()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()

    def _pump(self, source: socket.socket, target: socket.socket, weather: Weather) -> None:
        try:
            while data := source.recv(_CHUNK):
                weather.pass_on.wait()
                if self.ended.is_set() or not self._pass(data, target, weather):
                    break
        except OSError:
            pass
        self.cut()

    def _pass(self, data: bytes, target: socket.socket, weather: Weather) -> bool:
        """Send a piece on; False: the line broke in it."""
        broke = weather.cut_after is not None and weather.passed + len(data) >= weather.cut_after
        if broke:
            assert weather.cut_after is not None
            data = data[: max(weather.cut_after - weather.passed, 0)]
        if weather.corrupt is not None:
            data = weather.corrupt(weather.passed, data)
        wait_s = weather.delay_s + (len(data) / weather.bytes_per_s if weather.bytes_per_s else 0.0)
        if wait_s and self.ended.wait(wait_s):
            return False
        target.sendall(data)
        weather.passed += len(data)
        return not broke


class Proxy:
    """Listens on loopback, and connects on to a server for each that connects.

    Attributes:
        address: Where it listens.
        weather: Makes what holds for the two directions of the n-th connection, up and down; None: fair.
        pairs: The connections so far.
    """

    def __init__(self, server: str, weather: Callable[[int], tuple[Weather, Weather]] | None = None) -> None:
        self.server = server
        self.weather = weather
        self.pairs: list[Pair] = []
        self._made = 0
        self._lock = threading.Lock()
        self._closed = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="proxy-accept", daemon=True)
        self._thread.start()

    @property
    def made(self) -> int:
        """How many connections there were."""
        return self._made

    def cut(self) -> None:
        """Cut all that is connected now."""
        with self._lock:
            gone, self.pairs = self.pairs, []
        for pair in gone:
            pair.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                server = _connected(self.server)
            except OSError:
                client.close()
                continue
            with self._lock:
                if self._closed:
                    client.close()
                    server.close()
                    return
                up, down = self.weather(self._made) if self.weather else (Weather(), Weather())
                self._made += 1
                self.pairs = [pair for pair in self.pairs if not _is_over(pair)]
                self.pairs.append(Pair(client, server, up, down))

    def close(self) -> None:
        with self._lock:
            self._closed = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=5)
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _is_over(pair: Pair) -> bool:
    """Whether it has ended; what it held is let go then."""
    if pair.ended.is_set():
        pair.close()
    return pair.ended.is_set()


def until(holds: Callable[[], bool], timeout: float = 300.0) -> None:
    """Poll until a condition holds."""
    ends = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > ends:
            raise TimeoutError(f"waited {timeout:g} s")
        time.sleep(0.005)

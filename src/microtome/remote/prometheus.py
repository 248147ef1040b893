"""The Prometheus metrics of a server, and the HTTP server that exposes them."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from microtome.devices.meters.discovery import pick
from microtome.errors import BadQuery, SensorFailed

_SECONDS_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
#: Limits of the HTTP server: connections at once (the oldest is closed for a new one), seconds of one, request bytes.
_MAX_CONNECTIONS, _TIMEOUT_S, _MAX_REQUEST_BYTES = 64, 5.0, 8 << 10


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "microtome_requests", "Requests that were answered, by cut.", ["cut"], registry=registry
        )
        self.errors = Counter("microtome_errors", "Requests that failed, by kind.", ["kind"], registry=registry)
        self.refused = Counter(
            "microtome_refused_streams", "Streams and calls that were closed, by reason.", ["reason"], registry=registry
        )
        self.bytes = Counter("microtome_bytes", "Bytes of requests and replies.", ["direction"], registry=registry)
        self.seconds = Histogram(
            "microtome_seconds", "Seconds by phase.", ["phase"], buckets=_SECONDS_BUCKETS, registry=registry
        )
        self.queue = Gauge("microtome_queue", "Requests that wait or are being computed.", registry=registry)
        self.streams = Gauge("microtome_streams", "Open streams.", registry=registry)
        self.batches = Histogram(
            "microtome_batch", "Requests computed together.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=registry
        )
        self.sessions = Gauge("microtome_sessions", "Open sessions.", registry=registry)
        self.state_bytes = Gauge("microtome_state_bytes", "Bytes of the states of all sessions.", registry=registry)
        self.ended_sessions = Counter(
            "microtome_ended_sessions", "Sessions that ended, by reason.", ["reason"], registry=registry
        )

    def count_joules(self, devices: Sequence[torch.device]) -> None:
        """Add a gauge of the energy since now, if this machine has an energy counter.

        Args:
            devices: The accelerators that the model runs on; none for the CPU.
        """
        try:
            meter = pick(None, devices)
        except SensorFailed:
            return
        if meter.kind == "counter":

            def joules() -> float:
                value = meter.read().joules
                return math.nan if value is None else value

            text = f"Joules since the server began, of {meter.what}."
            Gauge("microtome_joules", text, registry=self.registry).set_function(joules)

    def listen(self, address: str) -> MetricsServer:
        """Expose the metrics at an address such as `:9090`."""
        host, _, port = address.rpartition(":")
        try:
            return MetricsServer(host or "127.0.0.1", int(port), self.registry)
        except (ValueError, OverflowError) as error:
            raise BadQuery(f"expected an address for metrics such as :9090, got {address!r}") from error
        except OSError as error:
            raise BadQuery(f"cannot serve metrics at {address!r}: {error.strerror}") from error


class MetricsServer:
    """Serve the metrics over HTTP until `close`, in one thread for any number of connections.

    Attributes:
        port: The port it listens on.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        if not 0 <= port < 1 << 16:
            raise OverflowError(f"expected a port from 0 to 65535, got {port}")
        self._registry = registry
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host.strip("[]"), port), family=family, backlog=_MAX_CONNECTIONS)
        self.port: int = self._socket.getsockname()[1]
        self._open: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="microtome-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close open connections without waiting for their peers."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, sock=self._socket, limit=_MAX_REQUEST_BYTES)
        # Neither `async with` nor `serve_forever`: from Python 3.12 on both wait for the peers to disconnect.
        await self._closing.wait()
        # Finish accepting first: asyncio leaves a connection open if the server is closed while it is accepted.
        with suppress(NotImplementedError):  # on Windows
            self._loop.remove_reader(self._socket)
        while asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._open:
                task.cancel()
            await asyncio.sleep(0)
        server.close()
        await asyncio.sleep(0)  # transports close in the next iteration of the loop

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        self._open[task] = None
        try:
            with suppress(TimeoutError, OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await asyncio.wait_for(self._exchange(reader, writer), _TIMEOUT_S)
        except asyncio.CancelledError:  # evicted for a newer connection
            pass
        finally:
            self._open.pop(task, None)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        is_get = request.startswith((b"GET ", b"HEAD "))
        body = generate_latest(self._registry) if is_get else b"expected GET\n"
        status = "200 OK" if is_get else "405 Method Not Allowed"
        head = f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE_LATEST}\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + (b"" if request.startswith(b"HEAD") else body))
        await writer.drain()
        writer.write_eof()
        await reader.read(1)  # until the peer has read it all, or the timeout

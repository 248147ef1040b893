"""Show metrics to Prometheus over HTTP, in one thread whatever connects."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress

from microtome.remote.optional_packages import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

#: Connections at once, of which the oldest is closed for another; seconds that one may take; bytes of a request.
_CONNECTIONS, _SECONDS, _REQUEST_BYTES = 64, 5.0, 8 << 10


class MetricsServer:
    """A server of one page, until `close`.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Listen.

        Raises:
            OSError: If that is not possible.
            OverflowError: If the port is no port.
        """
        if not 0 <= port < 1 << 16:
            raise OverflowError(f"expected a port from 0 to 65535, got {port}")
        self._registry = registry
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host.strip("[]"), port), family=family, backlog=_CONNECTIONS)
        self.port: int = self._socket.getsockname()[1]
        self._open: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="microtome-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close the connections that are open without waiting for their peers."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, sock=self._socket, limit=_REQUEST_BYTES)
        # Neither `async with` nor `serve_forever`: from Python 3.12 on both wait for the peers to disconnect.
        await self._closing.wait()
        # What is being accepted comes first: asyncio leaves such a connection open if the server is closed meanwhile.
        with suppress(NotImplementedError):  # on Windows
            self._loop.remove_reader(self._socket)
        while asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._open:
                task.cancel()
            await asyncio.sleep(0)
        server.close()
        await asyncio.sleep(0)  # transports close in the next turn

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= _CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        self._open[task] = None
        try:
            with suppress(TimeoutError, OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await asyncio.wait_for(self._exchange(reader, writer), _SECONDS)
        except asyncio.CancelledError:  # another took its place
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
        await reader.read(1)  # until it is read there, or too late

"""Baselines: a gRPC stream and a plain socket that receive bytes and send a short reply."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc

_SIZES = struct.Struct("<QQ")
_METHOD = "/bare.Bare/Stream"
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
#: About as long as a reply of microtome.
_REPLY = bytes(300)


# -- plain sockets -----------------------------------------------------------------------------------------------------


class Plain:
    """A socket that sends a number of bytes and receives another."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, data: bytes, back: int) -> None:
        self._socket.sendall(_SIZES.pack(len(data), back))
        self._socket.sendall(data)
        _take(self._socket, back)

    def close(self) -> None:
        self._socket.close()


def _take(connection: socket.socket, nbytes: int) -> None:
    room = bytearray(min(max(nbytes, 1), 1 << 20))
    while nbytes:
        got = connection.recv_into(room, min(nbytes, len(room)))
        if not got:
            raise EOFError
        nbytes -= got


def _serve_plain(listening: socket.socket) -> None:
    while True:
        connection, _ = listening.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    try:
        while True:
            sizes = connection.recv(_SIZES.size, socket.MSG_WAITALL)
            if len(sizes) < _SIZES.size:
                return
            there, back = _SIZES.unpack(sizes)
            _take(connection, there)
            connection.sendall(bytes(back))
    except (EOFError, ConnectionError):
        return


# -- gRPC --------------------------------------------------------------------------------------------------------------


class Bare:
    """A gRPC stream of raw bytes, with `window` messages in flight."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, _OPTIONS)
        self._stream = self._channel.stream_stream(_METHOD)
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._replies: Iterator[bytes] | None = None

    def exchange(self, data: bytes) -> None:
        """Send one message, and wait for its reply."""
        if self._replies is None:
            self._replies = self._stream(iter(self._outgoing.get, None))
        self._outgoing.put(data)
        next(self._replies)

    def send(self, items: Iterable[bytes], window: int) -> int:
        room = threading.Semaphore(window)

        def paced() -> Iterator[bytes]:
            for item in items:
                room.acquire()
                yield item

        answered = 0
        for _ in self._stream(paced()):
            room.release()
            answered += 1
        return answered

    def close(self) -> None:
        self._outgoing.put(None)
        self._channel.close()


async def _stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for _ in requests:
        yield _REPLY


async def main(host: str) -> None:
    listening = socket.create_server((host, 0))
    threading.Thread(target=_serve_plain, args=(listening,), daemon=True).start()
    server = grpc.aio.server(options=_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(_stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bare", {"Stream": handler}),))
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    print(f"{host}:{port} {host}:{listening.getsockname()[1]}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

"""As much of HTTP/2 as an attacker needs: calls that never end, messages that never do, windows that stay shut."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Self

from microtome.remote import protocol

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM = ACK = 1
END_HEADERS = 4
_INITIAL_WINDOW, _MAX_FRAME = 4, 16384


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + body


def prefixed(payload: bytes, *, compressed: bool = False, announced: int | None = None) -> bytes:
    """A message of gRPC; `announced`: the length that it claims to have."""
    length = len(payload) if announced is None else announced
    return struct.pack(">?I", compressed, length) + payload


class Line:
    """One connection.

    Attributes:
        ended: Streams that the server has ended.
        received: Bytes of data that came.
        is_open: Whether the server has not closed it.
    """

    def __init__(self, host: tuple[str, int], *, window: int = 65535) -> None:
        """Connect; the server may send `window` bytes on each stream, and no more after these."""
        self.ended: set[int] = set()
        self.received = 0
        self.is_open = True
        self._next = 1
        self._changed = threading.Condition()
        self._windows: dict[int, int] = {0: 65535}
        self._initial = 65535
        self._socket = socket.create_connection(host, timeout=10)
        self._socket.settimeout(None)
        settings = struct.pack(">HI", _INITIAL_WINDOW, window)
        self._send(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30)))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def call(self, method: str, token: str | None = None, headers: tuple[tuple[str, str], ...] = ()) -> int:
        """Begin a call; the number of its stream."""
        with self._changed:
            stream, self._next = self._next, self._next + 2
            self._windows[stream] = self._initial
        path = method if method.startswith("/") else f"/{protocol.SERVICE}/{method}"
        pairs = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        pairs += [("te", "trailers"), ("content-type", "application/grpc"), *headers]
        if token is not None:
            pairs.append(("authorization", f"Bearer {token}"))
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in pairs)
        self._send(frame(HEADERS, END_HEADERS, stream, block))
        return stream

    def send(self, stream: int, data: bytes, *, end: bool = False, timeout: float = 5.0) -> int:
        """Send as much as the server lets through, until it lets nothing through for so long; how much that was."""
        sent = 0
        while sent < len(data):
            with self._changed:
                if not self._changed.wait_for(lambda: self._room(stream) > 0 or self._is_over(stream), timeout):
                    return sent
                if self._is_over(stream):
                    return sent
                size = min(self._room(stream), _MAX_FRAME, len(data) - sent)
                self._windows[0] -= size
                self._windows[stream] -= size
            is_last = end and sent + size == len(data)
            if not self._send(frame(DATA, END_STREAM if is_last else 0, stream, data[sent : sent + size])):
                return sent
            sent += size
        return sent

    def count_open(self) -> int:
        """Calls that the server has not ended."""
        return (self._next - 1) // 2 - len(self.ended) if self.is_open else 0

    def count_ended(self) -> int:
        """Calls that the server has ended, by themselves or with the connection."""
        return len(self.ended) if self.is_open else (self._next - 1) // 2

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _room(self, stream: int) -> int:
        return min(self._windows[0], self._windows[stream])

    def _is_over(self, stream: int) -> bool:
        return not self.is_open or stream in self.ended

    def _send(self, data: bytes) -> bool:
        try:
            self._socket.sendall(data)
        except OSError:
            return False
        return True

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as file:
                while len(head := file.read(9)) == 9:
                    length = int.from_bytes(head[:3], "big")
                    body = file.read(length)
                    with self._changed:
                        self._take(head[3], head[4], int.from_bytes(head[5:], "big"), body)
                        self._changed.notify_all()
        except OSError:
            pass
        with self._changed:
            self.is_open = False
            self._changed.notify_all()

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(body), 6):
                name, value = struct.unpack_from(">HI", body, at)
                if name == _INITIAL_WINDOW:
                    for known in self._windows:
                        self._windows[known] += value - self._initial if known else 0
                    self._initial = value
            self._send(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._send(frame(PING, ACK, 0, body))
        elif kind == WINDOW_UPDATE:
            self._windows[stream] = self._windows.get(stream, self._initial) + int.from_bytes(body, "big")
        elif kind == DATA:
            self.received += len(body)
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.ended.add(stream)


def _text(text: str) -> bytes:
    """A text of HPACK, without Huffman codes."""
    data = text.encode()
    if len(data) < 127:
        return bytes((len(data),)) + data
    out, left = bytearray((127,)), len(data) - 127
    while left > 127:
        out.append(left & 127 | 128)
        left >>= 7
    return bytes(out) + bytes((left,)) + data

"""The metrics server closes without waiting for its peers."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest

from microtome.remote import prometheus
from microtome.remote.prometheus import Metrics


@pytest.fixture
def waiting_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `Server.wait_closed` wait for connections, as it does from Python 3.12 on, and these last an hour."""
    monkeypatch.setattr(prometheus, "_TIMEOUT_S", 3600.0)
    if sys.version_info < (3, 12):

        async def wait_closed(server: Any) -> None:
            if server._waiters is not None:
                waiter = server._loop.create_future()
                server._waiters.append(waiter)
                await waiter

        monkeypatch.setattr(asyncio.base_events.Server, "wait_closed", wait_closed)


@pytest.mark.usefixtures("waiting_for_peers")
@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\n", b"GET /metrics HTTP/1.1\r\n\r\n"])
def test_closing_waits_for_no_peer(sent: bytes) -> None:
    shown = Metrics().listen("127.0.0.1:0")
    with socket.create_connection(("127.0.0.1", shown.port)) as line:
        line.sendall(sent)
        if sent.endswith(b"\r\n\r\n"):
            assert line.recv(12) == b"HTTP/1.1 200"
        closing = threading.Thread(target=shown.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        line.settimeout(30)
        with suppress(ConnectionResetError):  # where what it sent was not read
            while line.recv(1 << 16):  # its end is told, after what was answered
                pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", shown.port))


def test_one_that_is_closed_at_once_leaves_no_socket() -> None:
    shown = Metrics().listen("127.0.0.1:0")
    shown.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", shown.port))


def test_connections_that_are_being_accepted_when_it_is_closed_are_closed_too() -> None:
    for _ in range(20):
        shown = Metrics().listen("127.0.0.1:0")
        lines = [socket.create_connection(("127.0.0.1", shown.port), timeout=30) for _ in range(3)]
        shown.close()
        for line in lines:
            with line, suppress(ConnectionResetError):
                assert line.recv(1) == b""

"""Connections are counted as often as they can become too many, and no more often."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from microtome.remote import peers
from microtome.remote.peers import Peers


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that are listed."""
    found: list[str] = []
    real = os.listdir

    def listdir(path: str) -> list[str]:
        found.append(path)
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    return found


@pytest.fixture
def limit() -> Iterator[None]:
    """Let this process open 512 files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_with_much_room_files_are_listed_once_a_second(listed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_max_descriptors", lambda: 1 << 20)
    found = Peers()
    for tick in range(500):  # ten seconds
        assert found.trim(1000.0 + 0.02 * tick) == 0
    assert 1 < len(listed) <= 10


@pytest.mark.usefixtures("limit")
def test_with_little_room_files_are_listed_as_often_as_that_can_be_used_up(listed: list[str]) -> None:
    found = Peers()
    assert found.trim(1000.0) == 0
    soon = 512 * peers._TRIM_SHARE / peers._MAX_RATE  # if not one file were open
    assert found.trim(1000.0 + soon) == 0
    assert len(listed) == 2


@pytest.mark.usefixtures("limit")
def test_connections_that_came_since_the_last_count_are_closed() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as server:
        found = Peers()
        found.port = server.getsockname()[1]
        assert found.trim(1000.0) == 0
        first, lines = None, []
        while len(os.listdir("/proc/self/fd")) < 0.9 * 512:
            client = socket.create_connection(("127.0.0.1", found.port))
            lines.append(server.accept()[0])
            if first is None:
                first = client
            else:
                client.close()  # the other end stays
        assert first is not None
        try:
            assert found.trim(1001.0) > 0
            assert first.recv(1) == b""  # the oldest was closed
        finally:
            for one in (first, *lines):
                one.close()

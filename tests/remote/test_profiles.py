"""The profile of a server's device, of a length that the model's calls explain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

import microtome as mt
from microtome.errors import RemoteError
from microtome.remote import protocol
from microtome.remote.connection import Connection
from microtome.remote.protocol import DEFAULT_REPLY_BYTES
from microtome.remote.server import Server
from microtome.remote.server_probe import fetch_profile
from microtome.remote.service import MAX_ECHO_BYTES
from microtome.remote.watchdog import SLOW_BYTES_PER_S
from tests.remote.attack.http2 import Line, prefixed
from tests.remote.proxy import until
from tests.remote.small import small
from tests.remote.test_bounds import check_later, host


@pytest.fixture
def server() -> Iterator[Server]:
    with mt.serve(*small(), listen="127.0.0.1:0") as started:
        yield started


def lengthened(server: Server, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Pad the profile of a server to a number of bytes, with spaces after the JSON document."""
    text = mt.profile(*small()).to_json().ljust(nbytes)
    monkeypatch.setattr(server.served, "profile", lambda: text)


def test_a_profile_longer_than_a_channel_takes_is_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    lengthened(server, monkeypatch, DEFAULT_REPLY_BYTES + (1 << 20))
    with closing(Connection(server.address)) as connection:
        found = fetch_profile(connection, 2200, timeout=60.0)
    assert found.total.macs == mt.profile(*small()).total.macs
    assert server._service is not None
    until(lambda: server._service.profiles.reserved == 0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("calls", "nbytes", "message"),
    [
        (10, 1 << 20, "expected a profile of at most 224 KiB for the 10 calls of the model, got 1.00 MiB"),
        (
            10,
            DEFAULT_REPLY_BYTES + 100,
            "answers Profile with more than 32.0 MiB .*expected a profile of at most 224 KiB",
        ),
        (
            2100,
            DEFAULT_REPLY_BYTES + (4 << 20),
            "answers Profile with more than 32.9 MiB .*expected a profile of at most 32.9 MiB",
        ),
    ],
)
def test_a_profile_longer_than_the_calls_explain_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch, calls: int, nbytes: int, message: str
) -> None:
    lengthened(server, monkeypatch, nbytes)
    with closing(Connection(server.address)) as connection, pytest.raises(RemoteError, match=message) as caught:
        fetch_profile(connection, calls, timeout=60.0)
    assert caught.value.kind == "TOO_LARGE"


@contextmanager
def writing_profile(server: Server) -> Iterator[Line]:
    """Ask for a profile on a connection that does not receive it."""
    with Line(host(server), window=0) as line:
        line.send(line.call("Profile"), prefixed(b""), end=True)
        assert server._service is not None
        until(lambda: any(call.write_in_progress for call in server._service.calls))  # type: ignore[union-attr]
        yield line


def test_a_client_that_receives_its_profile_slowly_is_not_disconnected_for_an_echo(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengthened(server, monkeypatch, 6 << 20)
    assert server._service is not None
    echo = prefixed(protocol.EchoRequest(reply_bytes=MAX_ECHO_BYTES).SerializeToString())
    with writing_profile(server) as slow, Line(host(server), window=0) as other:
        other.send(other.call("Echo"), echo, end=True)
        until(lambda: server._service.echoes.reserved == MAX_ECHO_BYTES)  # type: ignore[union-attr]
        check_later(server, 1.0)
        assert slow.is_open
        with closing(Connection(server.address)) as connection:  # another echo waits: its peer disconnects nobody else
            assert connection.call("Echo", protocol.EchoRequest(reply_bytes=MAX_ECHO_BYTES), timeout=60.0)
        until(lambda: not other.is_open)
        assert slow.is_open


def test_a_client_that_does_not_receive_its_profile_is_disconnected_while_another_waits(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = 6 << 20
    lengthened(server, monkeypatch, nbytes)
    assert server._service is not None
    with writing_profile(server) as slow, Line(host(server), window=0) as other:
        other.send(other.call("Profile"), prefixed(b""), end=True)
        until(lambda: server._service.profiles.is_contended)  # type: ignore[union-attr]
        check_later(server, 1.0)
        assert slow.is_open
        check_later(server, nbytes / SLOW_BYTES_PER_S + 1.0)
        until(lambda: not slow.is_open)
        until(lambda: any(call.write_in_progress for call in server._service.calls))  # type: ignore[union-attr]
        assert other.is_open

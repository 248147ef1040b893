"""The errors of gRPC as a client raises them: the cause and what to do, without gRPC's words around it."""

from __future__ import annotations

import grpc
import pytest

from microtome.remote.error_kinds import from_rpc
from microtome.remote.security import Security
from microtome.results.metrics import on_command_line

NO_CONNECTION = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:7070: "


class Failed(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, details: str) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return self._details


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        (
            "errors resolving host:7070: [field:hostname error: Domain name not found]",
            "the name of the host was not found",
        ),
        (
            "DNS resolution failed for host:7070: C-ares status is not ARES_SUCCESS",
            "the name of the host was not found",
        ),
        (
            f"{NO_CONNECTION}Failed to connect to remote host: Connection refused",
            "connection refused: nothing listens there. ",
        ),
        (f"{NO_CONNECTION}connect: No route to host (113)", "connect: No route to host (113)"),
        (
            f"{NO_CONNECTION}Socket closed",
            "it closes the connection during the handshake. If it uses TLS, add --ca or ",
        ),
        (
            f"{NO_CONNECTION}Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 79)",
            "another program listens there, which does not use gRPC. Is the port right?",
        ),
        ("Socket closed", "Socket closed"),  # of a connection that was open
        ("Tls handshake failed: WRONG_VERSION_NUMBER", "Tls handshake failed: WRONG_VERSION_NUMBER"),  # not with TLS
    ],
)
def test_a_server_that_cannot_be_reached_is_named_with_the_cause(details: str, reason: str) -> None:
    with on_command_line():
        error = from_rpc(Failed(details), "host:7070", Security(), "")
    assert error.kind == "UNREACHABLE"
    assert str(error).startswith(f"host:7070 cannot be reached: {reason}")

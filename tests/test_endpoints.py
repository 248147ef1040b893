"""Addresses of servers: what is accepted, and what the error suggests."""

from __future__ import annotations

import pytest

from microtome.endpoints import explain_endpoint


@pytest.mark.parametrize(
    "address", ["host:7070", "127.0.0.1:0", "[::1]:7070", "unix:/x", "unix-abstract:x", "dns:host:1"]
)
def test_a_host_with_a_port_is_an_address(address: str) -> None:
    assert explain_endpoint(address) == ""


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("host", ": add the port, such as host:7070"),
        ("7070", ": did you mean 127.0.0.1:7070?"),
        ("7070:host", ": did you mean host:7070?"),
        ("host:65536", ": a port is less than 65536, and not negative"),
        ("host:-1", ": a port is less than 65536, and not negative"),
        ("ipv4:1.2.3.4:65536", ": a port is less than 65536, and not negative"),
        ("http://host:7070", ": leave out 'http://', as in host:7070"),
        ("https://host/", ": leave out 'https://'"),
        (7070, ": did you mean 127.0.0.1:7070?"),
        (65536, ": a port is less than 65536, and not negative"),
        ("host:moon", ""),
        (":7070", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_what_is_no_address_is_explained(address: object, hint: str) -> None:
    assert explain_endpoint(address) == f"expected the address of a server such as host:7070, got {address!r}{hint}"

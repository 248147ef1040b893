"""Addresses of servers, `HOST:PORT`: validated by the command line before torch is imported, and by clients."""

from __future__ import annotations

import reprlib

#: Prefixes of addresses that gRPC parses itself.
SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")


def explain_endpoint(address: object) -> str:
    """Why this is no address of a server, and what to write; empty if it is one.

    >>> explain_endpoint("cloud:7070"), explain_endpoint("unix:/run/model")
    ('', '')
    >>> explain_endpoint("cloud")
    "expected the address of a server such as host:7070, got 'cloud': add the port, such as cloud:7070"
    """
    expected = f"expected the address of a server such as host:7070, got {reprlib.repr(address)}"
    if not isinstance(address, str):
        return expected
    host, colon, port = address.rpartition(":")
    if address.startswith(SCHEMES) or (host and port.isdecimal() and int(port) < 1 << 16):
        return ""
    if not colon and address:
        hint = (
            f": did you mean 127.0.0.1:{address}?" if address.isdecimal() else f": add the port, such as {address}:7070"
        )
    elif host.isdecimal() and port and not port.isdecimal():
        hint = f": did you mean {port}:{host}?"
    else:
        hint = ": a port is less than 65536" if port.isdecimal() and host else ""
    return expected + hint

"""Addresses of servers, `HOST:PORT`: validated by the command line before torch is imported, by servers and clients."""

from __future__ import annotations

import re
import reprlib

#: Prefixes of addresses that gRPC parses itself.
SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")
_URL = re.compile(r"([a-z][a-z0-9+.-]*://)([^/]*)", re.IGNORECASE)


def explain_endpoint(address: object, expected: str = "the address of a server such as host:7070") -> str:
    """Why this is no address of a server, and what to write; empty if it is one.

    >>> explain_endpoint("cloud:7070"), explain_endpoint("unix:/run/model")
    ('', '')
    >>> explain_endpoint("cloud")
    "expected the address of a server such as host:7070, got 'cloud': add the port, such as cloud:7070"
    """
    text = str(address) if type(address) in (str, int) else ""
    if isinstance(address, str) and _is_endpoint(address):
        return ""
    return f"expected {expected}, got {reprlib.repr(address)}{_hint(text)}"


def _is_endpoint(address: str) -> bool:
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host, _, port = address.rpartition(":")
    if address.startswith(SCHEMES):  # the port may be left out
        return not port.isdecimal() or _is_port(port)
    return bool(host) and _is_port(port) and "://" not in address


def _is_port(text: str) -> bool:
    return text.isdecimal() and int(text) < 1 << 16


def _hint(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if (url := _URL.match(address)) is not None:
        return f": leave out {url[1]!r}" + (f", as in {url[2]}" if _is_endpoint(url[2]) else "")
    if _is_port(address):
        return f": did you mean 127.0.0.1:{address}?"
    if not colon and address and not address.isdecimal():
        return f": add the port, such as {address}:7070"
    if host.isdecimal() and port and not port.isdecimal():
        return f": did you mean {port}:{host}?"
    return (
        ": a port is less than 65536, and not negative" if port.lstrip("-").isdecimal() and (host or not colon) else ""
    )

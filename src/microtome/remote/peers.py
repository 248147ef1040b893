"""The sockets of a server's connections: close one whose peer reads nothing, and the oldest when there are too many.

gRPC does neither: a call whose reply is not read cannot be ended, and the number of connections is unbounded.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any
from urllib.parse import unquote

if sys.platform != "win32":
    import resource

_FD_FOLDER = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
#: The share of the file descriptors above which connections are closed, and the share of that which remains open.
_TRIM_SHARE, _KEEP_SHARE = 0.75, 0.6
#: The most new connections per second, and the most seconds between two counts of descriptors: the connections that can
#: arrive between two counts must not use up the descriptors that were left.
_MAX_RATE, _MAX_INTERVAL_S = 20_000.0, 1.0
#: The number of trusted peers above which those that are gone are removed.
_MIN_TRUSTED = 1024

Address = tuple[str, int]


class Peers:
    """The connections to one port.

    Attributes:
        port: The TCP port that the server listens on; None: it listens elsewhere, and nothing is closed.
    """

    def __init__(self) -> None:
        self.port: int | None = None
        self._trusted: set[str] = set()
        self._max_trusted = _MIN_TRUSTED
        self._first_seen: dict[Address, int] = {}
        self._counter = count()
        self._next_count_at = 0.0

    def trust(self, peer: str) -> None:
        """Close the connection of this peer last: a call of it has authenticated."""
        self._trusted.add(peer)
        if len(self._trusted) > self._max_trusted:
            self._remove_gone()
            self._max_trusted = max(_MIN_TRUSTED, 2 * len(self._trusted))

    def disconnect(self, peer: str) -> None:
        """Close the connection of a peer, as `context.peer()` names it."""
        target = _parse(peer)
        for address, fd in self._connections():
            if address == target:
                self._shut_down(address, fd)

    def trim(self, now: float) -> int:
        """Close the oldest connections if there are too many, trusted ones last, and return how many.

        Counting descriptors lists a folder, so it is done less often the more of them are left.

        Args:
            now: A time of `monotonic`.
        """
        if now < self._next_count_at:
            return 0
        limit = int(_max_descriptors() * _TRIM_SHARE)
        try:
            left = limit - len(os.listdir(_FD_FOLDER))
            if left >= 0:
                self._next_count_at = now + min(left / _MAX_RATE, _MAX_INTERVAL_S)
                return 0
        except OSError as error:
            if error.errno != errno.EMFILE:  # which means that there are too many
                return 0
        connections = self._remove_gone()
        trusted = {_parse(peer) for peer in self._trusted}
        for address in connections:
            self._first_seen.setdefault(address, next(self._counter))
        oldest = sorted(connections, key=lambda address: (address in trusted, self._first_seen[address]))
        surplus = oldest[: max(len(oldest) - int(limit * _KEEP_SHARE), 0)]
        for address in surplus:
            self._shut_down(address, connections[address])
        return len(surplus)

    def _remove_gone(self) -> dict[Address, int]:
        """Forget peers that are gone; return the descriptors of the others."""
        connections = dict(self._connections())
        self._trusted = {peer for peer in self._trusted if _parse(peer) in connections}
        self._first_seen = {address: order for address, order in self._first_seen.items() if address in connections}
        return connections

    def _connections(self) -> Iterator[tuple[Address, int]]:
        """Yield the peers of the port with their descriptors, without opening one: there may be none left."""
        if self.port is not None:
            for fd in _descriptors():
                address = self._peer_of(fd)
                if address is not None:
                    yield address, fd

    def _peer_of(self, fd: int) -> Address | None:
        """Return the peer of a descriptor that is a connection to the port."""
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                return None
            connection = socket.socket(fileno=fd)
        except OSError:  # closed meanwhile
            return None
        try:
            is_inet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_inet and connection.getsockname()[1] == self.port:
                return _normalize(connection.getpeername())
        except (OSError, ValueError):  # a listening socket, or closed meanwhile
            pass
        finally:
            connection.detach()
        return None

    def _shut_down(self, address: Address, fd: int) -> None:
        """Shut a connection down, if the descriptor still belongs to it; gRPC closes the descriptor."""
        if self._peer_of(fd) == address:
            connection = socket.socket(fileno=fd)
            try:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()


def raise_descriptor_limit() -> None:
    """Raise the limit of file descriptors of this process to the hard limit."""
    if sys.platform != "win32":
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _max_descriptors() -> int:
    if sys.platform == "win32":
        return 1 << 20
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def _descriptors() -> Iterable[int]:
    """The open file descriptors, and perhaps others."""
    try:
        return [int(name) for name in os.listdir(_FD_FOLDER)]
    except OSError:
        return range(_max_descriptors())


def _parse(peer: str) -> Address | None:
    """Return host and port of a peer such as `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _normalize((host.strip("[]"), int(port)))


def _normalize(name: Any) -> Address:
    """Return host and port, with an IPv4-mapped IPv6 address as IPv4."""
    host = ipaddress.ip_address(str(name[0]).partition("%")[0])
    mapped = getattr(host, "ipv4_mapped", None)
    return str(mapped or host), int(name[1])

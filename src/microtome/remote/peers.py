"""The sockets of a server's connections: to close one whose peer takes nothing, and old ones when there are too many.

gRPC has no way to do either: a call whose reply is not taken cannot be ended, and connections are not counted.
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
from typing import Any
from urllib.parse import unquote

if sys.platform != "win32":
    import resource

#: Where a process finds its open files.
_FILES = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
#: The share of the files that may be open, from which on connections are closed, and the share of these that are kept.
_SHARE, _KEPT = 0.75, 0.6
#: Connections that come in a second at most, and the most seconds between two counts of the files: as many as can have
#: come since the last one must not fill the room that was left.
_PER_S, _COUNT_S = 20_000.0, 1.0
#: From so many trusted peers on, those that are gone are forgotten.
_FEW = 1024


class Peers:
    """Connections to one port.

    Attributes:
        port: Where the server listens; None: not on TCP, and nothing is closed.
    """

    def __init__(self) -> None:
        self.port: int | None = None
        self._trusted: set[str] = set()
        self._seen: dict[tuple[str, int], int] = {}
        self._count = 0
        self._most_trusted = _FEW
        self._count_at = 0.0

    def trust(self, peer: str) -> None:
        """A call of this peer had the token: its connection is closed last."""
        self._trusted.add(peer)
        if len(self._trusted) > self._most_trusted:
            self._forget()
            self._most_trusted = max(_FEW, 2 * len(self._trusted))

    def disconnect(self, peer: str) -> None:
        """Close the connection of a peer, as `context.peer()` names it."""
        wanted = _parse(peer)
        for address, number in self._connections():
            if address == wanted:
                self._shut(address, number)

    def trim(self, now: float) -> int:
        """Close the oldest connections if there are too many, trusted ones last; how many were closed.

        Counting the files lists a folder of them, so it is done the less often the more room there is.

        Args:
            now: As `monotonic` says it.
        """
        if now < self._count_at:
            return 0
        most = int(_limit() * _SHARE)
        try:
            room = most - len(os.listdir(_FILES))
            if room >= 0:
                self._count_at = now + min(room / _PER_S, _COUNT_S)
                return 0
        except OSError as error:
            if error.errno != errno.EMFILE:  # which says that there are too many
                return 0
        found = self._forget()
        trusted = {_parse(peer) for peer in self._trusted}
        for address in found:
            self._seen.setdefault(address, self._next())
        oldest = sorted(found, key=lambda address: (address in trusted, self._seen[address]))
        surplus = oldest[: max(len(oldest) - int(most * _KEPT), 0)]
        for address in surplus:
            self._shut(address, found[address])
        return len(surplus)

    def _forget(self) -> dict[tuple[str, int], int]:
        """Forget those that are gone; what is there, with the numbers of its files."""
        found = dict(self._connections())
        self._trusted = {peer for peer in self._trusted if _parse(peer) in found}
        self._seen = {address: order for address, order in self._seen.items() if address in found}
        return found

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _connections(self) -> Iterator[tuple[tuple[str, int], int]]:
        """The peers of the port, each with the number of its file. It opens no file: there may be none left."""
        if self.port is not None:
            for number in _numbers():
                address = self._peer_of(number)
                if address is not None:
                    yield address, number

    def _peer_of(self, number: int) -> tuple[str, int] | None:
        """The peer of a file that is a connection to the port."""
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                return None
            line = socket.socket(fileno=number)
        except OSError:  # it was closed
            return None
        try:
            if line.family in (socket.AF_INET, socket.AF_INET6) and line.getsockname()[1] == self.port:
                return _address(line.getpeername())
        except (OSError, ValueError):  # it listens, or was closed
            pass
        finally:
            line.detach()
        return None

    def _shut(self, address: tuple[str, int], number: int) -> None:
        """Shut a connection down, if the file is it still; gRPC closes the file."""
        if self._peer_of(number) == address:
            line = socket.socket(fileno=number)
            try:
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
            finally:
                line.detach()


def raise_open_files() -> None:
    """Let this process open as many files as it may."""
    if sys.platform != "win32":
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _limit() -> int:
    """Return the limit of open files of this process."""
    if sys.platform == "win32":
        return 1 << 20
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def _numbers() -> Iterable[int]:
    """The numbers of the files that are open, and perhaps others."""
    try:
        return [int(name) for name in os.listdir(_FILES)]
    except OSError:
        return range(_limit())


def _parse(peer: str) -> tuple[str, int] | None:
    """Host and port of a peer such as `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _address((host.strip("[]"), int(port)))


def _address(name: Any) -> tuple[str, int]:
    """Host and port, an IPv4 address in IPv6 as IPv4."""
    host = ipaddress.ip_address(str(name[0]).partition("%")[0])
    mapped = getattr(host, "ipv4_mapped", None)
    return str(mapped or host), int(name[1])

"""Several servers of one stage, used in turn; one that fails or is late is left out until it is back or answers."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from time import monotonic

from microtome.errors import RemoteError
from microtome.remote.connection import Connection
from microtome.remote.error_kinds import TRANSIENT
from microtome.remote.message import Message

log = logging.getLogger("microtome.remote")

#: Checks a server before it has requests; sets its `hello`, or raises RemoteError.
Check = Callable[[Connection], object]

#: Kinds of errors after which another server may answer.
_ANOTHER_MAY_ANSWER = frozenset({"UNREACHABLE", "DRAINING", "OUT_OF_MEMORY"})


class ServerPool:
    """The connections to the servers of one stage.

    Attributes:
        connections: A connection to each of them.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.connections = tuple(connections)
        self._turns = count(random.randrange(len(self.connections)))  # clients begin with different servers

    def open(self, check: Check) -> list[str]:
        """Check the servers; leave out those that cannot be reached if others can, and return why.

        Raises:
            RemoteError: A server is not accepted, or none can be reached.
        """
        left_out: dict[Connection, RemoteError] = {}
        for connection in self.connections:
            if connection.hello is None and connection.down_reason is None:
                try:
                    check(connection)
                except RemoteError as error:
                    if error.kind not in TRANSIENT:
                        raise
                    left_out[connection] = error
        if not self.ready:
            raise next(iter(left_out.values()), RemoteError(self.down_reason or "", "UNREACHABLE"))
        for connection, reason in left_out.items():
            connection.down_reason = str(reason)
            log.warning("left out until it is back: %s", reason, extra={"server": connection.address})
        return [str(reason) for reason in left_out.values()]

    def watch(self, check: Check) -> None:
        """Check each of several servers again when it is back, before it has requests."""
        for connection in self.connections if len(self.connections) > 1 else ():
            connection.watch(check)

    @property
    def ready(self) -> list[Connection]:
        """The servers that have been checked, so that they may have requests."""
        return [connection for connection in self.connections if connection.hello is not None]

    @property
    def address(self) -> str:
        return ", ".join(connection.address for connection in self.connections)

    @property
    def down_reason(self) -> str | None:
        """Why none of the servers can be reached; None: one can."""
        reasons = [connection.down_reason for connection in self.connections]
        return None if None in reasons else reasons[0]

    def is_idle(self) -> bool:
        """Whether no message waits for a reply."""
        return all(connection.is_idle() for connection in self.connections)

    def next(self, *, exclude: Connection | None = None) -> Connection:
        """Return the server whose turn it is: of those that are up and not late; if there is none, of those up, or all.

        Args:
            exclude: A server that has just failed.
        """
        others = [connection for connection in self.ready if connection is not exclude] or self.ready
        up = [connection for connection in others if connection.down_reason is None]
        in_time = [connection for connection in up if not connection.is_late()] if len(up) > 1 else up
        candidates = in_time or up or others
        return candidates[next(self._turns) % len(candidates)]

    def submit(self, message: Message) -> None:
        """Send a message to the next server, and to others if that fails.

        Each is asked once, also after `retry_until`, since a server that hangs is noticed late; before, again.
        """
        connection = self.next()
        if len(self.connections) > 1:
            message.failover = partial(self._fail_over, message, [connection], message.retry_until)
            message.retry_until = 0.0  # another server is asked, not the same one again
        message.connection = connection
        connection.submit(message)

    def _fail_over(self, message: Message, failed: list[Connection], until: float, error: RemoteError) -> bool:
        """Send a message to another server after an error; return False if it must be reported."""
        if error.kind not in _ANOTHER_MAY_ANSWER:
            return False
        connection = self.next(exclude=failed[-1])
        if monotonic() > until:
            others = [one for one in self.ready if one not in failed and one.down_reason is None]
            if not others:
                return False
            connection = others[0]
        message.failover = partial(self._fail_over, message, [*failed, connection], until)
        message.connection = connection
        try:
            connection.submit(message)
        except RemoteError:  # it was closed
            return False
        return True

    def cancel(self, message: Message) -> None:
        """Stop waiting for a reply."""
        message.failover = None
        for connection in self.connections:
            connection.cancel(message)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

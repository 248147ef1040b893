"""The sessions of a server: bounded in number, in bytes and in time, and each the property of one stream."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple

from microtome.errors import MicrotomeError
from microtome.remote.error_kinds import NoSession
from microtome.remote.logs import MAX_ID_CHARS
from microtome.remote.prometheus import Metrics
from microtome.remote.step_codec import DeltaCodec
from microtome.remote.tail_session import TailSession
from microtome.split.stage import Stage
from microtome.units import seconds, size

log = logging.getLogger("microtome.remote")


class StateTooLarge(MicrotomeError, MemoryError):
    """The state of a session is larger than the server may keep."""


class SessionLimits(NamedTuple):
    """Limits of sessions.

    Attributes:
        number: The most sessions at once; 0: none.
        nbytes: The most bytes of all their states.
        idle_s: Seconds without a step after which one ends.
    """

    number: int = 64
    nbytes: int = 1 << 30
    idle_s: float = 600.0


class ServedSession:
    """A session of a client.

    Attributes:
        key: The stream that it belongs to, and its id.
        num_steps: The number of steps so far.
        stage: The last stage of the split that the last step used.
    """

    def __init__(self, key: tuple[object, str]) -> None:
        self.key = key
        self.tail = TailSession()
        self.received, self.sent = DeltaCodec(), DeltaCodec()
        self.stage: Stage | None = None
        self.num_steps = 0
        self.nbytes = 0
        self.is_busy = False
        self.last_used = 0.0


class SessionStore:
    """The sessions of a server. Thread-safe. The least recently used one ends when there are too many."""

    def __init__(self, limits: SessionLimits, metrics: Metrics, clock: Callable[[], float] = monotonic) -> None:
        self.limits = limits
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[tuple[object, str], ServedSession] = {}  # the least recently used first
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return self._nbytes

    @contextmanager
    def step(self, owner: object, session_id: str, number: int) -> Iterator[ServedSession]:
        """Run a step of a session in the block; an error ends it.

        Args:
            owner: The stream of the request.
            number: 0 begins a session.

        Raises:
            NoSession: There is no such session of this stream, or it is at another step.
            StateTooLarge: Its state is larger than the server may keep.
        """
        session = self._begin((owner, session_id)) if number == 0 else self._find((owner, session_id), number)
        try:
            yield session
            session.num_steps += 1
            self._put_back(session)
        except BaseException:
            with self._lock:
                self._remove(session, "failed")
            raise

    def end(self, owner: object, session_id: str) -> None:
        """End a session, if there still is one."""
        with self._lock:
            session = self._sessions.get((owner, session_id))
            if session is not None:
                self._remove(session, "ended")

    def end_all(self, owner: object) -> None:
        """End the sessions of a stream that has ended."""
        with self._lock:
            for session in [one for one in self._sessions.values() if one.key[0] is owner]:
                self._remove(session, "disconnected")

    def expire(self) -> None:
        """End the sessions that had no step for a while."""
        with self._lock:
            now = self._clock()
            for session in list(self._sessions.values()):
                if not session.is_busy and now - session.last_used > self.limits.idle_s:
                    self._remove(session, "expired")

    def _begin(self, key: tuple[object, str]) -> ServedSession:
        if not self.limits.number:
            raise NoSession("this server keeps no sessions: start it with --sessions")
        with self._lock:
            if key in self._sessions:
                raise NoSession(f"the session {key[1]!r:.80} has begun already: use another id for another one")
            while len(self._sessions) >= self.limits.number:
                if not self._evict():
                    raise StateTooLarge(f"all {self.limits.number} sessions are computing: try again later")
            session = self._sessions[key] = ServedSession(key)
            session.is_busy = True
            self._update()
        return session

    def _find(self, key: tuple[object, str], number: int) -> ServedSession:
        with self._lock:
            session = self._sessions.get(key)
            if session is None:
                idle = seconds(self.limits.idle_s)
                raise NoSession(
                    f"the session {key[1]!r:.80} has ended: its stream broke, there were more than "
                    f"{self.limits.number} sessions or {size(self.limits.nbytes)} of state, or it was idle for {idle}"
                )
            if session.is_busy or number != session.num_steps:
                expected = session.num_steps + session.is_busy
                self._remove(session, "failed")
                raise NoSession(f"expected step {expected} of the session, got {number}: begin it again")
            session.is_busy = True
            return session

    def _put_back(self, session: ServedSession) -> None:
        nbytes = session.tail.nbytes + session.received.nbytes + session.sent.nbytes
        with self._lock:
            if self._sessions.pop(session.key, None) is None:  # the stream ended meanwhile
                return
            self._sessions[session.key] = session  # now the most recently used one
            session.last_used = self._clock()
            self._nbytes += nbytes - session.nbytes
            session.nbytes = nbytes
            while self._nbytes > self.limits.nbytes and self._evict():
                pass
            if self._nbytes > self.limits.nbytes:
                raise StateTooLarge(
                    f"the state of the session takes {size(nbytes)}, and the server keeps {size(self.limits.nbytes)} "
                    "for all: raise --state-memory there, or generate less"
                )
            session.is_busy = False
            self._update()

    def _evict(self) -> bool:
        """End the least recently used session; False: all are computing."""
        session = next((one for one in self._sessions.values() if not one.is_busy), None)
        if session is not None:
            self._remove(session, "evicted")
        return session is not None

    def _remove(self, session: ServedSession, reason: str) -> None:
        if self._sessions.pop(session.key, None) is None:
            return
        self._nbytes -= session.nbytes
        self._metrics.ended_sessions.labels(reason).inc()
        self._update()
        extra = {"session": session.key[1][:MAX_ID_CHARS], "reason": reason, "steps": session.num_steps}
        log.info("session ended", extra=extra)

    def _update(self) -> None:
        self._metrics.sessions.set(len(self._sessions))
        self._metrics.state_bytes.set(self._nbytes)

"""What a session keeps for each thread: the run that is open there, and the runs whose graphs still live."""

from __future__ import annotations

import threading
import weakref
from collections import deque

from microtome.engine.calls import Call, Run


class Thread:
    """One thread's share of a session.

    Attributes:
        run: The run now open in the thread, or None.
        in_backward: The calls whose backward the probes were told is open in the thread, outermost first.
    """

    __slots__ = ("__weakref__", "_recent", "_runs", "in_backward", "run")

    def __init__(self) -> None:
        self.run: Run | None = None
        self.in_backward: tuple[Call, ...] = ()
        # A run lives as long as a node that it tagged. The latest live on, for nodes that no module returned.
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self._recent: deque[Run] = deque(maxlen=16)

    @property
    def has_run(self) -> bool:
        return self.run is not None or bool(self._recent)

    def end(self, run: Run) -> None:
        self.run = run.outer
        self._runs.add(run)
        self._recent.append(run)

    def owner(self, number: int) -> Call | None:
        """The call that made the node with this number in this thread."""
        runs = list(self._runs)
        run = self.run
        while run is not None:
            runs.append(run)
            run = run.outer
        return next((run.owner(number) for run in runs if run.made(number)), None)


class Threads:
    """The threads that have run a module of the session; each is forgotten when it ends."""

    def __init__(self) -> None:
        self.local = threading.local()
        self._all: weakref.WeakSet[Thread] = weakref.WeakSet()

    def here(self) -> Thread:
        """This thread's share."""
        try:
            state: Thread = self.local.state
        except AttributeError:
            state = self.local.state = Thread()
            self._all.add(state)
        return state

    def owner(self, number: int) -> Call | None:
        """The call that made the node with this number, where it can be told from the number alone."""
        here = threading.get_ident()
        if any(thread.ident == here for thread in threading.enumerate()):
            return self.here().owner(number)
        # One of autograd's own threads runs the nodes of all others: certain only if a single thread can have made it.
        makers = [thread for thread in self._all if thread.has_run]
        return makers[0].owner(number) if len(makers) == 1 else None

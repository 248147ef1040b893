"""What a session keeps for each thread: the run that is open there, and the runs whose graphs still live."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator

from microtome.engine.calls import Call, Run


class Thread:
    """One thread's share of a session.

    Attributes:
        run: The run now open in the thread, or None.
        tags: Whether runs of the thread tag the autograd nodes they make; see `Owners`.
        in_backward: The calls whose backward the probes were told is open in the thread, outermost first.
    """

    __slots__ = ("__weakref__", "_recent", "_runs", "in_backward", "run", "tags")

    def __init__(self, *, tags: bool) -> None:
        self.run: Run | None = None
        self.tags = tags
        self.in_backward: tuple[Call, ...] = ()
        # A run lives as long as a node that it tagged; the latest live on, for graphs that their output is not part of.
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self._recent: deque[Run] = deque(maxlen=16)

    def end(self, run: Run) -> None:
        self.run = run.outer
        if run.calls:
            self._runs.add(run)
            self._recent.append(run)

    def _live(self) -> Iterator[Run]:
        """The runs that may own a node, the latest first."""
        run = self.run
        while run is not None:
            yield run
            run = run.outer
        yield from sorted(self._runs, key=lambda run: run.start, reverse=True)

    def holds(self, run: Run) -> bool:
        return any(run is other for other in self._live())

    def run_that_made(self, number: int) -> Run | None:
        """The run that made the node with this number, if the node was made in this thread."""
        return next((run for run in self._live() if run.made(number)), None)

    def first_call(self, paths: list[str], run: Run | None) -> Call | None:
        """The first call of the modules at these paths: in that run, or in the latest forward that has one."""
        runs = (run, *(run for run in self._live() if run.phase == "forward"))
        return next((call for run in runs if run is not None and (call := run.first_call(paths)) is not None), None)


class Threads:
    """The threads that run modules of the session; each is forgotten when it ends."""

    def __init__(self) -> None:
        self.local = threading.local()
        #: The thread that opened the session.
        self.opener = self.local.state = Thread(tags=False)

    def here(self) -> Thread:
        """This thread's share."""
        try:
            state: Thread = self.local.state
        except AttributeError:
            state = self.local.state = Thread(tags=True)
        return state

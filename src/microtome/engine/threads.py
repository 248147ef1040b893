"""What a session keeps for each thread: the run that is open there, and the runs whose graphs still live."""

from __future__ import annotations

import itertools
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from operator import attrgetter, itemgetter

from torch import nn

from microtome.engine.calls import Call, Run
from microtome.engine.changes import Change
from microtome.engine.functions import Whole

_keys = itertools.count()
_start = itemgetter(0)


class Thread:
    """One thread's share of a session.

    Attributes:
        key: The thread's number, which its runs carry.
        tags: Whether runs of the thread tag the autograd nodes they make; see `Owners`.
        run: The run now open in the thread, or None.
        in_backward: The calls whose backward the probes were told is open in the thread, outermost first.
        told: The call that probes are being told of in a backward, or None.
        changing: In a session that feeds, a module whose arguments were fed and whose output is to be changed yet, with
            its call and the change.
        wholes: In the order they began, the runs of functions shown whole that made autograd nodes.
    """

    __slots__ = (
        "__weakref__",
        "_enough",
        "_lock",
        "_recent",
        "_runs",
        "changing",
        "in_backward",
        "key",
        "run",
        "tags",
        "told",
        "wholes",
    )

    def __init__(self, *, tags: bool) -> None:
        self.key = next(_keys)
        self.tags = tags
        self.run: Run | None = None
        self.in_backward: tuple[Call, ...] = ()
        self.told: Call | None = None
        self.changing: tuple[nn.Module, Call, Change] | None = None
        self.wholes: list[Whole] = []
        # A run lives as long as a node that it tagged; the latest live on, for graphs that their output is not part of.
        self._recent: deque[Run] = deque(maxlen=16)
        # Those that ended, by where they began. Other threads read it too.
        self._runs: list[tuple[int, weakref.ref[Run]]] = []
        self._enough = 64
        self._lock = threading.Lock()

    def end(self, run: Run) -> None:
        self.run = run.outer
        if not run.calls:
            return
        if run.phase == "forward":
            self._recent.append(run)
        with self._lock:
            if len(self._runs) > self._enough:
                self._runs = [(start, ref) for start, ref in self._runs if ref() is not None]
                self._enough = 2 * len(self._runs) + 64
            insort(self._runs, (run.start, weakref.ref(run)), key=_start)

    def run_that_made(self, number: int) -> Run | None:
        """The run that made the node with this number, if the node was made in this thread."""
        run = self.run
        if run is None or number < run.start:
            run = self._latest(number)
        # Of two runs that both began before the node, the later one ended before the other did, or lies inside it.
        while run is not None and not run.made(number):
            run = run.outer
        return run

    def whole_that_made(self, number: int) -> Whole | None:
        """The function shown whole that made the node with this number, if the node was made in this thread."""
        at = bisect_right(self.wholes, number, key=attrgetter("start")) - 1
        return self.wholes[at] if at >= 0 and number < self.wholes[at].end else None

    def _latest(self, number: int) -> Run | None:
        """Of the runs that ended and live, the last that began before the node with this number was made."""
        with self._lock:
            at = bisect_right(self._runs, number, key=_start)
            before = (self._runs[index][1]() for index in range(at - 1, -1, -1))
            return next((run for run in before if run is not None), None)

    def first_call(self, paths: list[str], run: Run | None) -> Call | None:
        """The first call of the modules at these paths: in that run, or in the latest forward."""
        with self._lock:
            latest = self.run or (self._recent[-1] if self._recent else None)
        run = run or latest
        return None if run is None or not paths else run.first_call(paths)


class Threads:
    """The threads that run modules of the session; each is forgotten when it ends."""

    def __init__(self) -> None:
        self.local = threading.local()
        #: By key.
        self.living: weakref.WeakValueDictionary[int, Thread] = weakref.WeakValueDictionary()
        self.local.state = self._new(tags=False)  # the thread that opens the session

    def here(self) -> Thread:
        """This thread's share."""
        try:
            state: Thread = self.local.state
        except AttributeError:
            state = self.local.state = self._new(tags=True)
        return state

    def _new(self, *, tags: bool) -> Thread:
        thread = Thread(tags=tags)
        self.living[thread.key] = thread
        return thread

"""Per-thread state of a session: the open run, and the runs whose graphs still live."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter, itemgetter
from typing import Any

from torch import nn

from microtome.engine.call import Call, ModuleEntry, Run
from microtome.engine.composite_ops import CompositeOp
from microtome.engine.interventions import CallInterventions
from microtome.engine.thread_stacks import is_in_module_call
from microtome.engine.torch_internals import current_graph_task

_keys = itertools.count()
_start = itemgetter(0)


class Thread:
    """One thread's share of a session.

    Attributes:
        key: The thread's number, which its runs carry.
        tags: Whether runs of the thread tag the autograd nodes they make; see `Owners`.
        run: The run now open in the thread, or None.
        in_backward: The calls whose backward the probes were told is open in the thread, outermost first.
        notified_call: The call that probes are being told of in a backward, or None.
        pending_change: In a session that replaces inputs, the module whose output is still to be replaced, its call
            and the interventions.
        composites: In the order they began, the runs of functions shown whole that made autograd nodes.
    """

    __slots__ = (
        "__weakref__",
        "_lock",
        "_prune_at",
        "_recent",
        "_runs",
        "composites",
        "in_backward",
        "key",
        "notified_call",
        "pending_change",
        "run",
        "tags",
    )

    def __init__(self, *, tags: bool) -> None:
        self.key = next(_keys)
        self.tags = tags
        self.run: Run | None = None
        self.in_backward: tuple[Call, ...] = ()
        self.notified_call: Call | None = None
        self.pending_change: tuple[nn.Module, Call, CallInterventions] | None = None
        self.composites: list[CompositeOp] = []
        # A run lives as long as a node that it tagged; the latest live on, for graphs that their output is not part of.
        self._recent: deque[Run] = deque(maxlen=16)
        # Those that ended, by where they began. Other threads read it too.
        self._runs: list[tuple[int, weakref.ref[Run]]] = []
        self._prune_at = 64
        self._lock = threading.Lock()

    def end(self, run: Run) -> None:
        self.run = run.outer
        if not run.calls:
            return
        if run.phase == "forward":
            self._recent.append(run)
        with self._lock:
            if len(self._runs) > self._prune_at:
                self._runs = [(start, ref) for start, ref in self._runs if ref() is not None]
                self._prune_at = 2 * len(self._runs) + 64
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

    def composite_that_made(self, number: int) -> CompositeOp | None:
        """The function shown whole that made the node with this number, if the node was made in this thread."""
        at = bisect_right(self.composites, number, key=attrgetter("start")) - 1
        return self.composites[at] if at >= 0 and number < self.composites[at].end else None

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
    """The threads that run modules of the session; each is forgotten when it ends.

    Args:
        everywhere: Whether the session is for all threads, or for the one that opens it and those that join it.
    """

    def __init__(self, *, everywhere: bool = True) -> None:
        self._everywhere = everywhere
        self.local = threading.local()
        #: By key.
        self.alive: weakref.WeakValueDictionary[int, Thread] = weakref.WeakValueDictionary()
        #: Of the thread that opens the session.
        self.opener = self.local.state = self._new(tags=False)
        # How many backwards run that it called.
        self._backwards = 0

    def current(self) -> Thread:
        """This thread's share."""
        try:
            state: Thread = self.local.state
        except AttributeError:
            state = self._new(tags=True)
            if self._everywhere:
                self.local.state = state
        return state

    def _new(self, *, tags: bool) -> Thread:
        thread = Thread(tags=tags)
        self.alive[thread.key] = thread
        return thread

    # -- sessions that are for one thread ------------------------------------------------------------------------------

    def is_worker_call(self, entry: ModuleEntry) -> bool:
        """Whether a call of this module, in another thread than the opener's, is part of what the opener runs.

        A call of a module below the one that the opener runs at the moment is: a forward that has workers call its
        submodules, as DataParallel's does, waits for them. Unless it is inside a call that the other thread made before
        the session was opened. And so is a recomputation in a backward that the opener called.
        """
        if getattr(self.local, "is_excluded", False):
            return False
        if current_graph_task() != -1:
            return self._backwards > 0
        run = self.opener.run
        calls = [] if run is None else run.open[-1:]
        return any(call._entry.contains(entry) for call in calls) and not is_in_module_call(sys._getframe())

    @contextmanager
    def join(self) -> Iterator[None]:
        """Have this thread be one of the session's while a call of it runs."""
        self.local.state = self._new(tags=True)
        try:
            yield
        finally:
            del self.local.state

    @contextmanager
    def exclude_thread(self) -> Iterator[None]:
        """Have this thread be none of the session's while a call of it runs, with all calls inside."""
        before, self.local.is_excluded = getattr(self.local, "is_excluded", False), True
        try:
            yield
        finally:
            self.local.is_excluded = before

    def watch_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs a backward, and for whom: autograd has threads of its own, which do not tell."""

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            thread = getattr(self.local, "state", None)
            if thread is None:
                with self.exclude_thread():
                    return run(*args, **kwargs)
            if thread is not self.opener:
                return run(*args, **kwargs)
            self._backwards += 1
            try:
                return run(*args, **kwargs)
            finally:
                self._backwards -= 1

        return run_backward

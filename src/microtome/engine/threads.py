"""Per-thread state of a session: the open run, and the runs whose graphs are still alive."""

from __future__ import annotations

import sys
import threading
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from operator import attrgetter, itemgetter
from typing import Any

from torch import nn

from microtome.engine.call import Call, ModuleEntry, Run
from microtome.engine.composite_ops import CompositeOp
from microtome.engine.interventions import CallInterventions
from microtome.engine.thread_stacks import is_in_module_call
from microtome.engine.torch_internals import current_graph_task

_keys = count()
_start = itemgetter(0)


class Thread:
    """The state of a session in one thread.

    Attributes:
        key: A number that identifies the thread in its runs.
        tags: Whether runs of the thread tag the autograd nodes they create; see `AutogradOwners`.
        run: The run open in the thread, or None.
        in_backward: The calls whose backward is open in the thread as probes were notified, outermost first.
        notified_call: The call whose backward probes are being notified of, or None.
        pending_intervention: In a session that replaces inputs: a module whose output is yet to be replaced, its call,
            and the interventions.
        composites: The runs of composite operators that created autograd nodes, in order.
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
        "pending_intervention",
        "run",
        "tags",
    )

    def __init__(self, *, tags: bool) -> None:
        self.key = next(_keys)
        self.tags = tags
        self.run: Run | None = None
        self.in_backward: tuple[Call, ...] = ()
        self.notified_call: Call | None = None
        self.pending_intervention: tuple[nn.Module, Call, CallInterventions] | None = None
        self.composites: list[CompositeOp] = []
        # Tagged nodes keep their run alive; this keeps the latest, for graphs that their output is not part of.
        self._recent: deque[Run] = deque(maxlen=16)
        # Runs that ended, sorted by their first sequence number. Other threads read it too.
        self._runs: list[tuple[int, weakref.ref[Run]]] = []
        self._prune_at = 64
        self._lock = threading.Lock()

    @property
    def is_unused(self) -> bool:
        """Whether no run is open, and none is kept."""
        is_open = self.run is not None or self.notified_call is not None or self.pending_intervention is not None
        return not (is_open or self.in_backward or self.composites or self._recent or self._runs)

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

    def run_of_node(self, number: int) -> Run | None:
        """The run that created the node with this sequence number, if the node was created in this thread."""
        run = self.run
        if run is None or number < run.start:
            run = self._latest(number)
        # If the last run that began before the node did not create it, that run is nested in the one that did.
        while run is not None and not run.created(number):
            run = run.outer
        return run

    def composite_of_node(self, number: int) -> CompositeOp | None:
        """The composite operator that created the node with this sequence number, if created in this thread."""
        index = bisect_right(self.composites, number, key=attrgetter("start")) - 1
        return self.composites[index] if index >= 0 and number < self.composites[index].end else None

    def _latest(self, number: int) -> Run | None:
        """The last run that ended, is alive, and began before the node with this sequence number was created."""
        with self._lock:
            end = bisect_right(self._runs, number, key=_start)
            before = (self._runs[index][1]() for index in range(end - 1, -1, -1))
            return next((run for run in before if run is not None), None)

    def first_call(self, paths: list[str], run: Run | None) -> Call | None:
        """The first call of the modules at these paths, in that run or in the latest forward before it that has one.

        Args:
            run: None: the latest forward.
        """
        with self._lock:
            run = run or self.run or (self._recent[-1] if self._recent else None)
            if run is None or not paths:
                return None
            end = bisect_left(self._runs, run.start, key=_start)
            before = (self._runs[index][1]() for index in range(end - 1, -1, -1))
            # A loss that is a module is a run of its own, after that of the model.
            forwards = (one for one in before if one is not None and one.phase == "forward")
            return next((call for one in chain((run,), forwards) if (call := one.first_call(paths)) is not None), None)


class Threads:
    """The threads that run modules of the session; the state of each is freed when the thread ends.

    Args:
        everywhere: Whether the session observes all threads, or only the one that opens it and those that join it.
    """

    def __init__(self, *, everywhere: bool = True) -> None:
        self._everywhere = everywhere
        self.local = threading.local()
        #: The threads that are alive, by key.
        self.alive: weakref.WeakValueDictionary[int, Thread] = weakref.WeakValueDictionary()
        #: The state of the thread that opens the session.
        self.opener = self.local.state = self._new(tags=False)
        # The number of backwards that the opener runs.
        self._backwards = 0

    @property
    def is_unused(self) -> bool:
        """Whether this is as if it were new: this thread is the opener, nothing runs, and nothing was kept."""
        is_alone = getattr(self.local, "state", None) is self.opener and len(self.alive) == 1 and not self._backwards
        return is_alone and self.opener.is_unused

    def current(self) -> Thread:
        """The state of this thread."""
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

    # -- sessions of one thread ----------------------------------------------------------------------------------------

    def is_worker_call(self, entry: ModuleEntry) -> bool:
        """Whether a call of this module in another thread is part of what the opener runs.

        It is if the module is below the one that the opener runs at the moment (a forward whose workers call its
        submodules, as that of DataParallel, waits for them), unless it is inside a call that the other thread began
        before the session was opened. It is, too, if it is a recomputation in a backward that the opener runs.
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
        """Add this thread to the session while a call of it runs."""
        self.local.state = self._new(tags=True)
        try:
            yield
        finally:
            del self.local.state

    @contextmanager
    def exclude_thread(self) -> Iterator[None]:
        """Ignore a call of this thread, with all calls inside it."""
        before, self.local.is_excluded = getattr(self.local, "is_excluded", False), True
        try:
            yield
        finally:
            self.local.is_excluded = before

    def watch_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that runs a backward, to record who runs it: autograd's own threads do not know."""

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

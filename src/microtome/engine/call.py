"""Module entries (a module and its path), calls (one run of a module), and runs (an outermost call and all inside)."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from operator import attrgetter

from torch import nn

from microtome.results.trace import Phase

_start = attrgetter("_start")
#: The end of an open call: larger than the sequence number of any node created in a forward.
_OPEN = (1 << 64) - 1


class ModuleEntry:
    """The path of a module, and a weak reference to it.

    Autograd nodes keep entries alive, and Python's garbage collector cannot traverse nodes: a strong reference would
    leak every model that stores one of its own outputs.
    """

    __slots__ = ("path", "ref")

    def __init__(self, path: str, module: nn.Module, on_delete: Callable[[object], object] | None = None) -> None:
        self.path = path
        self.ref = weakref.ref(module, on_delete)

    def contains(self, other: ModuleEntry) -> bool:
        """Whether the other module is strictly below this one."""
        return other is not self and (not self.path or other.path.startswith(self.path + "."))


class Call:
    """One run of one module. Read-only.

    Attributes:
        index: The number of earlier calls of the module in the same outermost call.
        parent: The call that contains this one, or None for an outermost call.
        phase: `"forward"`, or `"recompute"` for a forward that runs inside a backward, as checkpointing does.
    """

    __slots__ = ("_end", "_entry", "_start", "index", "parent", "phase")

    def __init__(self, entry: ModuleEntry, index: int, parent: Call | None, phase: Phase, start: int) -> None:
        self._entry = entry
        self.index = index
        self.parent = parent
        self.phase = phase
        # Autograd nodes created by the call have sequence numbers in [start, end) of the thread that ran it.
        self._start = start
        self._end = _OPEN

    @property
    def path(self) -> str:
        """The module's path in `named_modules()`; `""` for the root."""
        return self._entry.path

    @property
    def address(self) -> str:
        """The path and, from the second call on, the index: `block`, `block#1`.

        In results the first of several calls is `block#0`.
        """
        return f"{self.path}#{self.index}" if self.index else self.path

    @property
    def module(self) -> nn.Module | None:
        """The module that ran, or None if it no longer exists."""
        return self._entry.ref()

    @property
    def depth(self) -> int:
        """The number of calls that contain this one."""
        return len(self.stack) - 1

    @property
    def stack(self) -> tuple[Call, ...]:
        """The calls from the outermost to this one."""
        chain: list[Call] = []
        call: Call | None = self
        while call is not None:
            chain.append(call)
            call = call.parent
        return tuple(reversed(chain))

    @property
    def root(self) -> nn.Module | None:
        """The module of the outermost call, or None if it no longer exists."""
        call = self
        while call.parent is not None:
            call = call.parent
        return call.module

    def __repr__(self) -> str:
        return f"<Call {self.address!r} {self.phase}>"


class Run:
    """An outermost call in one thread and everything inside it.

    Attributes:
        thread: The key of its thread.
        outer: The run that this one interrupted in the same thread (a backward inside a forward), or None.
        task: The id of the autograd graph task inside which the run began; -1 outside any backward.
        base: The parent of the run's outermost call; None except for a recomputation.
        start: The sequence number of the first autograd node that the run can have created.
        open: The stack of running calls, outermost first; not empty while this is its thread's run.
        counts: The number of calls of each module.
        calls: The calls since the first autograd node was created, and those open then, in order.
    """

    __slots__ = (
        "__weakref__",
        "_firsts",
        "base",
        "calls",
        "counts",
        "open",
        "outer",
        "phase",
        "start",
        "task",
        "thread",
    )

    def __init__(self, thread: int, outer: Run | None, task: int, base: Call | None, start: int) -> None:
        self.thread = thread
        self.outer = outer
        self.task = task
        self.base = base
        self.start = start
        self.phase: Phase = "forward" if task == -1 else "recompute"
        self.open: list[Call] = []
        self.counts: dict[ModuleEntry, int] = {}
        self.calls: list[Call] = []
        self._firsts: dict[str, Call] = {}

    def created(self, number: int) -> bool:
        """Whether this run created the node with this sequence number, if created in this run's thread."""
        return bool(self.calls) and self.start <= number < self.calls[0]._end

    def first_call(self, paths: Iterable[str]) -> Call | None:
        """The first call of the modules at these paths; a module that never ran counts as its nearest ancestor."""
        if self.open or not self._firsts:
            self._firsts = {call.path: call for call in reversed(self.calls)}
        calls = [call for path in paths if (call := self._nearest(path)) is not None]
        return min(calls, key=_start, default=None)

    def _nearest(self, path: str) -> Call | None:
        while path and path not in self._firsts:
            path = path.rpartition(".")[0]
        return self._firsts.get(path)

    def call_after(self, entry: ModuleEntry, number: int) -> Call | None:
        """The first call of a module after the node with this sequence number was created."""
        later = self.calls[bisect_right(self.calls, number, key=_start) :]
        return next((call for call in later if call._entry is entry), None)

    def owner(self, number: int) -> Call | None:
        """The innermost call that was running when the node with this sequence number was created."""
        index = bisect_right(self.calls, number, key=_start) - 1
        call = self.calls[index] if index >= 0 else None
        while call is not None and call._end <= number:
            call = call.parent if call.parent is not self.base else None
        return call

"""The nouns: a site (a module and its path), a call (one run of it), a run (an outermost call and all inside it)."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from operator import attrgetter
from typing import Literal

from torch import nn

Phase = Literal["forward", "recompute", "backward"]

_start = attrgetter("_start")
#: The end of a call that is still open: larger than any number that autograd gives to a node made in a forward.
_OPEN = 1 << 64


class Site:
    """A module as a session knows it: its path, and the module itself, held weakly.

    Autograd nodes keep sites alive, and Python's collector cannot see into them: a strong reference to the module would
    leak every model that stores one of its own outputs.
    """

    __slots__ = ("path", "ref")

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.ref = weakref.ref(module)

    def contains(self, other: Site) -> bool:
        """Whether the other module lies strictly below this one."""
        return other is not self and (not self.path or other.path.startswith(self.path + "."))


class Call:
    """One run of one module. Read it; do not change it.

    Attributes:
        index: How many times the module had run before in the same outermost call.
        parent: The call that contains this one, or None for an outermost call.
        phase: `"forward"`, or `"recompute"` for a forward that runs inside a backward, as activation checkpointing
        does.
    """

    __slots__ = ("_end", "_site", "_start", "index", "parent", "phase")

    def __init__(self, site: Site, index: int, parent: Call | None, phase: Phase, start: int) -> None:
        self._site = site
        self.index = index
        self.parent = parent
        self.phase = phase
        # The autograd nodes made while the call ran have sequence numbers in [start, end) of the thread that ran it.
        self._start = start
        self._end = _OPEN

    @property
    def path(self) -> str:
        """The module's path as `named_modules()` gives it; `""` for the root."""
        return self._site.path

    @property
    def address(self) -> str:
        """The path and, from the second run on, the index: `block`, `block#1`."""
        return f"{self.path}#{self.index}" if self.index else self.path

    @property
    def module(self) -> nn.Module | None:
        """The module that ran, or None if it no longer exists."""
        return self._site.ref()

    @property
    def depth(self) -> int:
        """How many calls contain this one."""
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

    def __repr__(self) -> str:
        return f"<Call {self.address!r} {self.phase}>"


class Run:
    """An outermost call in one thread and everything inside it.

    Attributes:
        outer: The run that this one interrupted in the same thread (a backward inside a forward), or None.
        task: The autograd graph task inside which the run began; -1 outside any backward.
        base: The call that the run's outermost call hangs under; None but for a recomputation.
        start: The sequence number of the first autograd node that the run can have made.
        open: The calls now running, outermost first; never empty while it is its thread's run.
    """

    __slots__ = ("__weakref__", "_calls", "_counts", "base", "open", "outer", "phase", "start", "task")

    def __init__(self, outer: Run | None, task: int, base: Call | None, start: int) -> None:
        self.outer = outer
        self.task = task
        self.base = base
        self.start = start
        self.phase: Phase = "forward" if task == -1 else "recompute"
        self.open: list[Call] = []
        self._counts: dict[Site, int] = {}
        # Those since the first autograd node was made, and those then open, in the order they began.
        self._calls: list[Call] = []

    def count_from(self, site: Site, index: int) -> None:
        """Give the site's next call this index."""
        self._counts[site] = index

    def enter(self, site: Site, start: int) -> Call:
        counts, stack = self._counts, self.open
        index = counts.get(site, 0)
        counts[site] = index + 1
        call = Call(site, index, stack[-1] if stack else self.base, self.phase, start)
        stack.append(call)
        self._calls.append(call)
        return call

    def leave(self, call: Call, end: int) -> bool:
        """Take the call off the stack; say whether any autograd node was made in it."""
        self.open.pop()
        call._end = end
        if end == self.start:
            del self._calls[-1]  # no node yet, so nothing to look up: a loop without grad must not grow
        return end > call._start

    def made(self, number: int) -> bool:
        """Whether the node with this sequence number was made by this run, if it was made in this run's thread."""
        return bool(self._calls) and self.start <= number < self._calls[0]._end

    def index_after(self, site: Site, number: int) -> int:
        """The index of the site's first call after the node with this sequence number was made."""
        later = self._calls[bisect_right(self._calls, number, key=_start) :]
        return next((call.index for call in later if call._site is site), 0)

    def owner(self, number: int) -> Call | None:
        """The innermost call that was running when the node with this sequence number was made."""
        at = bisect_right(self._calls, number, key=_start) - 1
        call = self._calls[at] if at >= 0 else None
        while call is not None and call._end <= number:
            call = call.parent if call.parent is not self.base else None
        return call

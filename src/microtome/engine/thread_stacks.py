"""The Python stacks of all threads."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType

from torch import nn

from microtome.engine.torch_internals import CALL

_lock = threading.RLock()


def thread_stacks() -> dict[int, list[FrameType]]:
    """The frames of each thread by its id, innermost first; for this thread, from the caller's on.

    No garbage is collected meanwhile. `sys._current_frames` and `f_back` allocate, and a collection that this triggers
    may run Python code and switch threads. CPython before 3.11.9 and 3.12.3 then deadlocks on the lock that the former
    holds; in `f_back`, CPython 3.11 reads a frame that the other thread has left, and crashes.
    """
    with _lock:
        enabled = gc.isenabled()
        gc.disable()
        try:
            frames = sys._current_frames()
            frames[threading.get_ident()] = sys._getframe(1)  # this frame would refer to itself, and outlive the call
            return {thread: list(outer_frames(frame)) for thread, frame in frames.items()}
        finally:
            if enabled:
                gc.enable()


def outer_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_in_module_call(frame: FrameType) -> bool:
    """Whether a frame is inside the call of a module."""
    return any(outer.f_code is CALL for outer in outer_frames(frame))


def runs_in_other_thread(modules: Iterable[nn.Module]) -> bool:
    """Whether another thread is inside a call of one of these modules."""
    ids, here = set(map(id, modules)), threading.get_ident()
    frames = (frame for thread, stack in thread_stacks().items() if thread != here for frame in stack)
    return any(frame.f_code is CALL and id(frame.f_locals["self"]) in ids for frame in frames)

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


def thread_frames() -> dict[int, FrameType]:
    """The innermost frame of each thread, by thread id; for this thread, the caller's.

    `sys._current_frames` allocates while it holds a lock of the interpreter. If this triggers garbage collection,
    Python code may run and switch to a thread that waits for the lock: CPython before 3.11.9 and 3.12.3 deadlocks.
    """
    with _lock:
        enabled = gc.isenabled()
        gc.disable()
        try:
            frames = sys._current_frames()
        finally:
            if enabled:
                gc.enable()
    frames[threading.get_ident()] = sys._getframe(1)  # this frame would refer to itself, and outlive the call
    return frames


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
    frames = [frame for thread, top in thread_frames().items() if thread != here for frame in outer_frames(top)]
    return any(frame.f_code is CALL and id(frame.f_locals["self"]) in ids for frame in frames)

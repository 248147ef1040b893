"""Probes that pass outputs and runs of a model to a recorder."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

from microtome.engine import Call, Probe, tensors_in
from microtome.engine.composite_ops import is_meta_or_fake
from microtome.errors import BadQuery, Unsupported

if TYPE_CHECKING:
    from microtome.capture.record import ActivationRecorder


class RunNumbers(threading.local):
    """Numbers runs in the order in which they begin, and keeps the open ones of each thread.

    Args:
        counter: Shared by all threads.
    """

    def __init__(self, counter: itertools.count[int]) -> None:
        self._counter = counter
        self._open: list[int] = []

    @property
    def current(self) -> int | None:
        return self._open[-1] if self._open else None

    def begin(self) -> None:
        self._open.append(next(self._counter))

    def end(self) -> None:
        if self._open:
            self._open.pop()


class OutputProbe(Probe):
    """Adds the outputs of selected calls to a recorder."""

    def __init__(self, recorder: ActivationRecorder) -> None:
        assert recorder._targets is not None
        self._targets = recorder._targets
        self._recorder = recorder

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if call.phase == "forward":
            last_calls = self._recorder._last_calls
            last_calls[call.path] = max(call.index, last_calls.get(call.path, 0))
            if call in self._targets.calls and self._add(call, output):
                self._recorder._recorded_paths[call.path] = None

    def _add(self, call: Call, output: Any) -> bool:
        try:
            return self._recorder.add(self._targets.address(call), output)
        except BadQuery:
            if self._recorder._is_done:  # another thread has closed the recorder
                return False
            raise
        except Unsupported as error:
            error.add_note(f"in the output of {call.address!r}")
            raise


class RunProbe(Probe):
    """Begins and ends the runs of a recorder."""

    def __init__(self, recorder: ActivationRecorder) -> None:
        self._recorder = recorder

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.parent is None:
            self._recorder._begin_run()

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if call.parent is None:
            self._recorder._end_run()
            if call.phase == "forward" and not any(map(is_meta_or_fake, tensors_in(output))):
                self._recorder._count_run()

    def fail(self, call: Call, error: BaseException) -> None:
        if call.parent is None:
            self._recorder._end_run()
            self._recorder._failed = True

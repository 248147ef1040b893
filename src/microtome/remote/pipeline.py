"""Many requests one after the other, the parts of which run at once: heads, encoding, the way there, and results."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from microtome.engine.meta_run import copy_inputs
from microtome.inputs import Inputs
from microtome.remote.request import RequestJob


class RequestSteps(NamedTuple):
    """The parts of a request.

    Attributes:
        prepare: Runs the head.
        encode: Makes bytes of what crosses, and sends them off.
        finish: Waits for the reply.
        drop: Waits no longer.
    """

    prepare: Callable[[Inputs], RequestJob]
    encode: Callable[[RequestJob], RequestJob]
    finish: Callable[[RequestJob], Any]
    drop: Callable[[RequestJob], None]


def streamed(calls: RequestSteps, items: Iterator[Any], window: int) -> Iterator[Any]:
    """The results, in order; of at most so many requests on their way."""
    room = threading.Semaphore(window)
    stopped = threading.Event()
    going: deque[Future[RequestJob]] = deque()
    ready = threading.Semaphore(0)
    ended: list[BaseException | None] = []

    def heads() -> None:
        error: BaseException | None = None
        try:
            while True:
                room.acquire()
                if stopped.is_set():
                    break
                try:
                    given = copy_inputs(Inputs.of(next(items)))  # whoever gave them may write into them again
                except StopIteration:
                    break
                job = calls.prepare(given)
                if job.sent.codec == "raw":  # a copy: shorter than the way to another thread
                    encoded = Future[RequestJob]()
                    encoded.set_result(calls.encode(job))
                else:
                    encoded = encoder.submit(calls.encode, job)
                going.append(encoded)
                ready.release()
        except BaseException as raised:  # noqa: BLE001  raised again where results are taken
            error = raised
        ended.append(error)
        ready.release()

    with ThreadPoolExecutor(1, thread_name_prefix="microtome-encode") as encoder:
        thread = threading.Thread(target=heads, name="microtome-head", daemon=True)
        thread.start()
        try:
            while True:
                ready.acquire()
                if not going:
                    break
                result = calls.finish(going.popleft().result())
                room.release()
                yield result
            if ended[0] is not None:
                raise ended[0]
        finally:
            stopped.set()
            room.release()
            thread.join()
            for future in going:
                if not future.cancel() and future.exception() is None:
                    calls.drop(future.result())

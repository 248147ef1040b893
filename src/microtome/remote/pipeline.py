"""Overlap the phases of many requests: heads, encoding, transfers and tails run at the same time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from microtome.engine.meta_run import copy_inputs
from microtome.inputs import Inputs
from microtome.remote.request import RemoteRequest


def run_pipeline(
    start: Callable[[Inputs], RemoteRequest],
    send: Callable[[RemoteRequest], RemoteRequest],
    finish: Callable[[RemoteRequest], Any],
    cancel: Callable[[RemoteRequest], None],
    items: Iterator[Any],
    window: int,
) -> Iterator[Any]:
    """Start, send and finish a request for each of the items, with at most `window` in flight.

    Yields:
        The outputs, in the order of the items.
    """
    slots = threading.Semaphore(window)
    stopped = threading.Event()
    in_flight: deque[Future[RemoteRequest]] = deque()
    ready = threading.Semaphore(0)  # released for each request, and once at the end
    errors: list[BaseException] = []

    def run_heads() -> None:
        try:
            while True:
                slots.acquire()
                if stopped.is_set():
                    break
                try:
                    inputs = copy_inputs(Inputs.of(next(items)))  # the caller may overwrite its tensors
                except StopIteration:
                    break
                request = start(inputs)
                if request.route.codec == "raw":  # a copy, faster than handing over to another thread
                    sent = Future[RemoteRequest]()
                    sent.set_result(send(request))
                else:
                    sent = encoder.submit(send, request)
                in_flight.append(sent)
                ready.release()
        except BaseException as error:  # noqa: BLE001  raised again in the thread that takes the outputs
            errors.append(error)
        ready.release()

    with ThreadPoolExecutor(1, thread_name_prefix="microtome-encode") as encoder:
        thread = threading.Thread(target=run_heads, name="microtome-head", daemon=True)
        thread.start()
        try:
            while True:
                ready.acquire()
                if not in_flight:
                    break
                output = finish(in_flight.popleft().result())
                slots.release()
                yield output
            if errors:
                raise errors[0]
        finally:
            stopped.set()
            slots.release()
            thread.join()
            for future in in_flight:
                if not future.cancel() and future.exception() is None:
                    cancel(future.result())

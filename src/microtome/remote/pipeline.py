"""Overlap the phases of many requests: heads, encoding, transfers and tails run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from microtome.engine.meta_run import copy_inputs
from microtome.engine.session import keep_patched
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
    in_flight: SimpleQueue[Future[RemoteRequest] | None] = SimpleQueue()

    def run_heads() -> None:
        try:
            while slots.acquire() and not stopped.is_set():
                try:
                    inputs = copy_inputs(Inputs.of(next(items)))  # the caller may overwrite its tensors
                except StopIteration:
                    break
                request = start(inputs)
                if request.route.codec == "raw":  # a copy, faster than handing over to another thread
                    in_flight.put(_completed(send(request)))
                else:
                    in_flight.put(encoder.submit(send, request))
                del inputs, request  # keep neither alive while waiting for a slot or the next item
        except BaseException as error:  # noqa: BLE001  raised again in the thread that takes the outputs
            in_flight.put(_completed(error))
        in_flight.put(None)

    with keep_patched(), ThreadPoolExecutor(1, thread_name_prefix="microtome-encode") as encoder:
        thread = threading.Thread(target=run_heads, name="microtome-head", daemon=True)
        thread.start()
        try:
            while (sent := in_flight.get()) is not None:
                output = finish(sent.result())
                del sent  # do not keep the request alive while this generator is suspended
                slots.release()
                yield output
                del output
        finally:
            stopped.set()
            slots.release()
            thread.join()
            while not in_flight.empty():
                sent = in_flight.get()
                if sent is not None and not sent.cancel() and sent.exception() is None:
                    cancel(sent.result())


def _completed(outcome: RemoteRequest | BaseException) -> Future[RemoteRequest]:
    future: Future[RemoteRequest] = Future()
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future

"""The worker threads of a server: decode, batch and compute queued requests. Every request gets a reply or an error."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from microtome.engine.pytree import as_state
from microtome.errors import BadQuery, NoMatch
from microtome.remote import protocol
from microtome.remote.admission import ReplyBudget
from microtome.remote.error_kinds import Draining, Late, TooLarge, to_message
from microtome.remote.forwarding import Forwarder
from microtome.remote.gate import Gate
from microtome.remote.inference_backend import EncodedOutput, InferenceBackend
from microtome.remote.logs import MAX_ID_CHARS
from microtome.remote.payloads import pack_output
from microtome.remote.prometheus import Metrics
from microtome.remote.session_store import ServedSession, SessionLimits, SessionStore
from microtome.remote.stage_ref import StageRef
from microtome.remote.training.backend import TrainingBackend
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.codecs import parse_codec
from microtome.units import size

log = logging.getLogger("microtome.remote")

#: The most bytes of a boundary in one message. gRPC buffers the incomplete message of every open call out of our sight,
#: so a longer boundary arrives in parts. 4 MiB is also gRPC's default limit.
_MAX_PART_BYTES = 4 << 20
#: Bounds on the number of open calls.
_MIN_CALLS, _MAX_CALLS = 16, 256


class Limits(NamedTuple):
    """Limits of a server.

    Attributes:
        max_message: Bytes of a request.
        concurrency: Requests, or batches of them, that are computed at once.
        batch: The most requests in a batch; 1: no batching.
        batch_window_s: Seconds that the first request of a batch waits for others.
        sessions: Limits of sessions.
    """

    max_message: int
    concurrency: int
    batch: int = 1
    batch_window_s: float = 0.0
    sessions: SessionLimits = SessionLimits()

    @property
    def total_bytes(self) -> int:
        """Bytes held for clients: a quarter each for messages in transit, uploads, queued requests, and replies."""
        return 4 * self.max_message

    @property
    def part_bytes(self) -> int:
        """The most bytes of a boundary in one message."""
        return min(_MAX_PART_BYTES, self.max_message)

    @property
    def calls(self) -> int:
        """The most open calls: their incomplete messages fit in the quarter for messages in transit."""
        return min(max(self.max_message // _MAX_PART_BYTES, _MIN_CALLS), _MAX_CALLS)


class RequestObserver(Protocol):
    """Is notified of what became of a request, in the thread where that happens."""

    def forwarded(self, request: QueuedRequest) -> None:
        """Take a request that was sent to another server, whose reply will be that of the request."""

    def resolved(self, request: QueuedRequest) -> None:
        """Take a request that has a reply, or an error as one."""


class QueuedRequest:
    """A request on the server, from its arrival to its reply.

    Attributes:
        arrived: When it arrived, a time of `perf_counter`; `deadline`: when the client stops waiting.
        nbytes: The bytes that it holds while it is queued.
        data: The encoded boundary, until it is decoded; `boundary`: the decoded one, until it is computed.
        has_tensors: Whether it and its reply have messages `Tensors` in place of boundaries.
        step: The step of a session that it is; None: a single pass.
        train: The action of a training run that it is; None: inference.
        stage: The stage that it runs, once that is known; `next_hops`: the messages `Hop` of the next ones.
        owner: The stream on which it arrived.
        reply: The message with the output or an error.
        timing: Seconds of each phase.
        forwarded_bytes: The bytes that were forwarded; None: it was not.
        is_queued: Whether its bytes are reserved; belongs to the event loop.
        observer: Notified of its reply; None: nobody is.
    """

    def __init__(self, header: Any, data: memoryview, owner: object = None) -> None:
        self.id: str = header.id
        self.step: Any = header.step if header.HasField("step") else None
        self.train: Any = header.train if header.HasField("train") else None
        self._stage: Any = header.stage if header.HasField("stage") else None
        self.stage = StageRef.tail("")
        self.next_hops: list[Any] = list(header.forward)
        self.has_tensors: bool = header.format == protocol.TENSORS
        self.owner = owner
        self.codec: str = header.codec or "raw"
        self.arrived = perf_counter()
        self.deadline = self.arrived + (header.timeout_s if header.timeout_s > 0 else inf)
        self.nbytes = len(data) + header.ByteSize()
        self.data: memoryview | None = data
        self.boundary: Any = None
        self.at = ""
        self.timing: dict[str, float] = {}
        self.forwarded_bytes: int | None = None
        self.is_queued = False
        self.observer: RequestObserver | None = None
        self.reply: Future[bytes] = Future()

    def set_boundary(self, boundary: Any) -> None:
        """Take the decoded boundary in place of its bytes."""
        self.data, self.boundary, self.at = None, boundary, boundary.at
        self.stage = StageRef.tail(self.at) if self._stage is None else StageRef.from_message(self._stage)

    def cancel(self) -> bool:
        """Cancel the request unless it has begun, and return whether it is; in the queue it holds no data then."""
        is_cancelled = self.reply.cancel()
        if is_cancelled:
            self.data = None
        return is_cancelled

    def mark_forwarded(self, nbytes: int) -> None:
        self.data = self.boundary = None
        self.forwarded_bytes = nbytes
        if self.observer is not None:
            self.observer.forwarded(self)

    def resolve(self, reply: bytes) -> None:
        self.data = self.boundary = None  # before the reservation of their bytes is released
        self.reply.set_result(reply)
        if self.observer is not None:
            self.observer.resolved(self)


class WorkerPool:
    """Threads that compute requests, in batches if the limits allow it."""

    def __init__(
        self,
        served: InferenceBackend,
        limits: Limits,
        metrics: Metrics,
        replies: ReplyBudget,
        sessions: SessionStore,
        forwarder: Forwarder,
        on_failure: Callable[[str], None],
    ) -> None:
        """Start the threads; one of them calls `on_failure` when the device becomes unusable."""
        self._served = served
        self._limits = limits
        self._metrics = metrics
        self._replies = replies
        self._sessions = sessions
        self._forwarder = forwarder
        self._on_failure = on_failure
        self._failure: str | None = None
        self._gate = Gate()
        self._queue: SimpleQueue[QueuedRequest | None] = SimpleQueue()
        self._collecting = threading.Lock()  # or threads that wait at once would each get a part of a batch
        self._threads = [
            threading.Thread(target=self._run, name=f"microtome-tail-{number}", daemon=True)
            for number in range(limits.concurrency)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: QueuedRequest) -> None:
        self._queue.put(request)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Compute nothing inside the block."""
        with self._gate.exclusive():
            yield

    def close(self, timeout: float) -> None:
        """Stop the threads, and wait for requests in progress: Python aborts if it exits in the middle of one."""
        self._queue.put(None)
        self._replies.close()
        deadline = perf_counter() + timeout
        for thread in self._threads:
            thread.join(max(deadline - perf_counter(), 0.0))

    def _run(self) -> None:
        while requests := self._take_batch():
            self._replies.wait_until_not_full()
            with self._gate.shared():
                self._compute_all([one for one in requests if one.reply.set_running_or_notify_cancel()])
            del requests  # keep nothing alive while waiting
        self._queue.put(None)  # for the next thread

    def _take_batch(self) -> list[QueuedRequest]:
        """Wait for a request, and return it with those that arrive within the batch window; empty at the end."""
        with self._collecting:
            first = self._queue.get()
            return [] if first is None else [first, *self._collect()]

    def _collect(self) -> Iterator[QueuedRequest]:
        deadline = perf_counter() + self._limits.batch_window_s
        for _ in range(self._limits.batch - 1):
            try:
                request = self._queue.get(timeout=max(deadline - perf_counter(), 0.0))
            except Empty:
                return
            if request is None:
                self._queue.put(None)
                return
            yield request

    # -- a batch, in one of the threads --------------------------------------------------------------------------------

    def _compute_all(self, requests: list[QueuedRequest]) -> None:
        """Decode requests, and compute those with the same batch key together."""
        groups: dict[Any, list[QueuedRequest]] = {}
        for request in requests:
            if request.step is not None or request.train is not None:
                (self._compute_step if request.train is None else self._train)(request)
                continue
            try:
                if request.next_hops:
                    self._check_forward(request)
                boundary = self._decode(request)
                self._served.check_stage(request.stage, boundary)
                boundary = request.boundary = self._served.complete(boundary, request.stage, self._gate.upgraded)
                key = self._served.batch_key(boundary, request.stage) if len(requests) > 1 else None
            except BaseException as error:  # noqa: BLE001  the client is told, and others are served
                self._fail(request, error)
            else:
                groups.setdefault(id(request) if key is None else (request.stage, key), []).append(request)
        for group in groups.values():
            self._compute_group(group)

    def _decode(self, request: QueuedRequest, header: bytes = b"") -> Any:
        """Decode the boundary of a request; that of a step arrives without its header."""
        self._check(request)
        start = perf_counter()
        assert request.data is not None
        data = b"".join((header, request.data)) if header else request.data
        decode = self._served.decode_tensors if request.has_tensors else self._served.decode
        boundary = decode(data, self._limits.total_bytes)
        request.timing["decode_s"] = perf_counter() - start
        request.set_boundary(boundary)
        return boundary

    def _check_forward(self, request: QueuedRequest) -> None:
        """Raise if a request cannot be forwarded, before anything is computed."""
        if request.has_tensors:
            raise BadQuery("expected the format BOUNDARY of a request that is forwarded, got TENSORS")
        self._forwarder.check(request)

    def _check(self, request: QueuedRequest) -> None:
        """Raise if a request is late, too large, or names an unknown codec, before anything is computed."""
        now = perf_counter()
        request.timing["queue_s"] = now - request.arrived
        if self._failure is not None:
            raise self._device_failed()
        if now > request.deadline:
            raise Late(f"the request waited {now - request.arrived:.3f} s, and its deadline has passed")
        assert request.data is not None
        if len(request.data) > self._limits.max_message:
            raise TooLarge(f"expected at most {size(self._limits.max_message)}, got {size(len(request.data))}")
        try:
            parse_codec(request.codec)
        except NoMatch as error:  # which would be reported as a missing cut
            raise BadQuery(str(error)) from error

    def _compute_step(self, request: QueuedRequest) -> None:
        """Compute a step of a session; an error ends the session."""
        step = request.step
        try:
            if step.ends:
                self._sessions.end(request.owner, step.session)
                reply = protocol.Reply(id=request.id).SerializeToString()
            else:
                with self._sessions.step(request.owner, step.session, step.number) as session:
                    reply = self._run_step(request, session)
        except BaseException as error:  # noqa: BLE001  whatever the model raises, the client is told
            self._fail(request, error)
        else:
            self._replies.add(len(reply))
            request.resolve(reply)
            if not step.ends:
                self._count(request, 1)

    def _run_step(self, request: QueuedRequest, session: ServedSession) -> bytes:
        step = request.step
        if step.split or session.stage is None:
            split = session.received.decompress("split", step.split)
            with self._gate.upgraded():  # the model is analyzed, and cannot run meanwhile
                session.stage = self._served.tail_for(split, self._limits.max_message)
        tail = session.stage
        header = session.received.decompress("header", step.header)
        state = session.received.decompress("state", step.state)
        boundary = self._decode(request, header)
        start = perf_counter()
        result = session.tail.run(tail, state, boundary, self._sessions.limits.nbytes)
        request.timing["run_s"] = perf_counter() - start
        start = perf_counter()
        with as_state(tail.spec.state_classes):
            states, spec = session.tail.state.objects, tail.spec.output
            output = pack_output(result.output, spec, request.at, tail.fingerprint, states).to_bytes(request.codec)
        request.timing["encode_s"] = perf_counter() - start
        changes = session.sent.compress("state", result.changes)
        reply = protocol.Reply(id=request.id, timing=protocol.Timing(**request.timing, batch=1), state=changes)
        return protocol.with_payload(reply, output)

    def _train(self, request: QueuedRequest) -> None:
        """Run an action of a training run."""
        try:
            self._check(request)
            if not isinstance(self._served, TrainingBackend):
                raise BadQuery("the server does not train: start it with optimizer=")
            start = perf_counter()
            assert request.data is not None
            request.at = self._served.training.at
            output, trained = self._served.run_action(
                request.owner, request.train, request.data, request.codec, self._limits.total_bytes
            )
            request.timing["run_s"] = perf_counter() - start
            timing = protocol.Timing(**request.timing, batch=1)
            reply = protocol.with_payload(protocol.Reply(id=request.id, timing=timing, train=trained), output)
        except BaseException as error:  # noqa: BLE001  whatever the model raises, the client is told
            self._fail(request, error)
        else:
            self._resolve(request, reply, 1)

    def _compute_group(self, group: list[QueuedRequest]) -> None:
        """Compute requests of one batch key, in one or several batches."""
        counts = [1]
        if len(group) > 1:
            counts = self._served.divide([request.boundary for request in group], group[0].stage)
        for count in counts:
            self._compute(group[:count])
            group = group[count:]

    def _compute(self, group: list[QueuedRequest]) -> None:
        start = perf_counter()
        try:
            boundaries = [request.boundary for request in group if request.boundary is not None]
            deadline = max(request.deadline for request in group)
            outputs = self._served.compute(boundaries, group[0].stage, None if deadline == inf else deadline)
        except BaseException as error:  # noqa: BLE001  whatever the model raises, the client is told
            if len(group) == 1:
                self._fail(group[0], error)
            elif self._has_device_failed():
                for request in group:
                    self._fail(request, self._device_failed())
            else:  # one request is to blame, and the others are not
                for request in group:
                    self._compute([request])
            return
        run_s = perf_counter() - start
        self._metrics.batches.observe(len(group))
        for request, output in zip(group, outputs, strict=True):
            batch = output.batch if isinstance(output, EncodedOutput) else len(group)
            request.timing["run_s"] = run_s
            if request.next_hops:
                self._forward(request, output, batch)
                continue
            try:
                reply = self._encode(request, output, batch)
            except BaseException as error:  # noqa: BLE001  the output cannot be sent
                self._fail(request, error)
            else:
                self._resolve(request, reply, batch)

    def _resolve(self, request: QueuedRequest, reply: bytes, batch: int) -> None:
        self._replies.add(len(reply))
        request.resolve(reply)  # first: metrics and logs delay only the next request
        self._count(request, batch)

    def _encode(self, request: QueuedRequest, output: object, batch: int) -> bytes:
        start = perf_counter()
        encode = self._served.encode_tensors if request.has_tensors else self._served.encode
        data = encode(output, request.at, request.codec)
        request.timing["encode_s"] = perf_counter() - start
        header = protocol.Reply(id=request.id, timing=protocol.Timing(**request.timing, batch=batch))
        return protocol.with_payload(header, data)

    def _forward(self, request: QueuedRequest, output: Any, batch: int) -> None:
        """Send what crosses the end of the stage to the server of the next one, whose reply is that of the request."""

        def answer(reply: bytes) -> None:
            self._resolve(request, reply, batch)

        try:
            if not isinstance(output, Boundary):
                raise BadQuery("expected a stage before the last one, got servers to forward the output to")
            self._forwarder.send(request, output, batch, answer, partial(self._fail, request))
        except BaseException as error:  # noqa: BLE001  the client is told
            self._fail(request, error)

    def _count(self, request: QueuedRequest, batch: int) -> None:
        self._metrics.requests.labels(request.at).inc()
        for phase, seconds in request.timing.items():
            self._metrics.seconds.labels(phase.removesuffix("_s")).observe(seconds)
        extra = {"request": request.id[:MAX_ID_CHARS], "at": request.at, "batch": batch, **request.timing}
        log.info("answered", extra=extra)

    def _fail(self, request: QueuedRequest, error: BaseException) -> None:
        kind, message = to_message(error)
        self._metrics.errors.labels(kind).inc()
        extra = {"request": request.id[:MAX_ID_CHARS], "kind": kind, "reason": message.message}
        log.warning("failed", extra=extra)
        reply = protocol.Reply(id=request.id, error=message).SerializeToString()
        self._replies.add(len(reply))
        request.resolve(reply)
        self._has_device_failed()

    def _device_failed(self) -> Draining:
        return Draining(f"the server is shutting down, since its device failed: {self._failure}")

    def _has_device_failed(self) -> bool:
        """Whether the device is unusable; the first thread to notice reports it."""
        if self._failure is None:
            self._failure = self._served.device_failure()
            if self._failure is not None:
                self._on_failure(self._failure)
        return self._failure is not None

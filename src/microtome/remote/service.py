"""The methods of the service in `split.proto`.

All of them are streams to gRPC, also those of one message: gRPC reads the message of a unary call before any of our
code runs. Here a call is first authenticated, then admitted, and only then read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any

import grpc
import torch
from google.protobuf.message import DecodeError

from microtome import __version__
from microtome.engine.session import keep_patched
from microtome.errors import MicrotomeError, describe_error
from microtome.remote import protocol
from microtome.remote.admission import BytePool, CallLimiter, OpenCall, ReplyBudget, Upload
from microtome.remote.forwarding import Forwarder, ForwardOptions
from microtome.remote.inference_backend import InferenceBackend
from microtome.remote.logs import MAX_ID_CHARS
from microtome.remote.peers import Peers
from microtome.remote.prometheus import Metrics
from microtome.remote.reply_queue import ReplyQueue
from microtome.remote.session_store import SessionStore
from microtome.remote.training.server_run import TrainingRun
from microtome.remote.worker import Limits, QueuedRequest, WorkerPool
from microtome.split.boundary.codecs import CODECS
from microtome.units import size

log = logging.getLogger("microtome.remote")

#: The most bytes of one echo, and of all unwritten echoes: a short request asks for a long reply.
MAX_ECHO_BYTES = 8 << 20
#: The most bytes of all unwritten profiles, beside one that is longer by itself.
_MAX_PROFILES_BYTES = 8 << 20
#: The most requests of one stream in flight.
_WINDOW = 32
#: Seconds after which a failed profile is tried again: no request is computed while it runs.
_PROFILE_RETRY_S = 60.0


class Service:
    """The methods of the service.

    Attributes:
        calls: The open calls.
        uploads: Bytes of requests that arrive in parts and are not complete.
        queued: Bytes of requests that are complete and not yet computed.
        echoes: Bytes of unwritten echoes.
        profiles: Bytes of unwritten profiles.
        replies: Bytes of unwritten replies: half of the quarter of the memory for replies, since gRPC copies each one
            while it writes it. A server that forwards has half of that for boundaries on their way.
        draining: Set when no new requests are accepted.
        sessions: The state that is kept for the steps of clients.
        failure: Why the device is unusable; None: it works.
    """

    def __init__(
        self, served: InferenceBackend, limits: Limits, metrics: Metrics, peers: Peers, forwards: ForwardOptions
    ) -> None:
        self._served = served
        self._limits = limits
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self.calls = CallLimiter(limits.calls, peers, are_trusted=True)
        self.uploads = BytePool(limits.max_message)
        self.queued = BytePool(limits.max_message)
        self.echoes = BytePool(MAX_ECHO_BYTES)
        self.profiles = BytePool(_MAX_PROFILES_BYTES)
        share = 4 if forwards.addresses else 2  # gRPC copies forwarded boundaries, too
        self.replies = ReplyBudget(limits.max_message // share)
        self.sessions = SessionStore(limits.sessions, metrics)
        self._forwarder = Forwarder(served, forwards, limits.max_message, limits.max_message // share)
        self._workers = WorkerPool(served, limits, metrics, self.replies, self.sessions, self._forwarder, self._fail)
        self._received_bytes, self._sent_bytes = (metrics.bytes.labels(direction) for direction in ("received", "sent"))
        self._profiler = ThreadPoolExecutor(1, thread_name_prefix="microtome-profile")
        self._profile: str | None = None
        self._profile_failure: tuple[float, Exception] | None = None
        self.draining = asyncio.Event()
        self.failure: str | None = None

    @property
    def training(self) -> TrainingRun | None:
        return self._served.training

    def handlers(self) -> Any:
        methods = {
            name: grpc.stream_stream_rpc_method_handler(partial(self._handle, name)) for name in protocol.METHODS
        }
        return grpc.method_handlers_generic_handler(protocol.SERVICE, methods)

    async def _handle(self, name: str, _: Any, context: Any) -> None:
        if self.failure is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the device failed: {self.failure}")
        await self.calls.run(context, getattr(self, name.lower()), is_stream=protocol.METHODS[name].is_stream)

    # -- the methods ---------------------------------------------------------------------------------------------------

    async def hello(self, call: OpenCall) -> None:
        request = await self._read(call, "HelloRequest")
        versions = {"torch": request.torch[:MAX_ID_CHARS], "microtome": request.microtome[:MAX_ID_CHARS]}
        log.info("hello", extra={"peer": call.peer, **versions})
        reply = protocol.HelloReply(
            protocol=protocol.PROTOCOL,
            microtome=__version__,
            torch=torch.__version__,
            model=self._served.name,
            fingerprint=self._served.fingerprint,
            device=self._served.device_name,
            codecs=CODECS,
            cuts=self._served.cuts,
            max_message=self._limits.max_message,
            batch=self._limits.batch,
            max_part=self._limits.part_bytes,
            params=self._served.params,
            sessions=self._limits.sessions.number,
            any_stage=self._served.any_stage,
            ends_at=self._served.ends_at or "",
            forwards=self._forwarder.addresses,
            trains=self.training is not None,
            modes="" if self.training is None else self.training.modes,
        )
        await call.write(reply.SerializeToString())

    async def echo(self, call: OpenCall) -> None:
        request = await self._read(call, "EchoRequest")
        if request.reply_bytes > MAX_ECHO_BYTES:
            await self._reject(call, f"expected at most {MAX_ECHO_BYTES} bytes to echo, got {request.reply_bytes}")
        async with self._reserve(call, self.echoes, request.reply_bytes):
            await call.write(protocol.EchoReply(payload=bytes(request.reply_bytes)).SerializeToString())

    async def profile(self, call: OpenCall) -> None:
        await self._read(call, "ProfileRequest")
        call.in_flight += 1
        try:
            text = await self._loop.run_in_executor(self._profiler, self._run_profile)
        except Exception as error:
            reason = str(error) if isinstance(error, MicrotomeError) else describe_error(error)
            await self._reject(call, f"it cannot be profiled: {reason}", grpc.StatusCode.FAILED_PRECONDITION)
            raise
        finally:
            call.in_flight -= 1
        async with self._reserve(call, self.profiles, len(text)):
            await call.write(protocol.ProfileReply(json=text).SerializeToString())

    def _run_profile(self) -> str:
        with self._workers.paused():  # concurrent requests would distort the times, and their calls would be recorded
            if self._profile_failure is not None and monotonic() < self._profile_failure[0]:
                raise self._profile_failure[1]
            if self._profile is None:
                try:
                    self._profile = self._served.profile()
                except Exception as error:
                    self._profile_failure = monotonic() + _PROFILE_RETRY_S, error.with_traceback(None)
                    raise
            return self._profile

    async def run(self, call: OpenCall) -> None:
        data = await call.read()
        if data is None:
            await self._reject(call, "expected a Request, got no message")
            return
        request = await self._receive(call, data)
        del data  # held by the request alone, which drops it when it is decoded
        replies = ReplyQueue(self._leave_queue, _WINDOW)
        self._submit(request, replies)
        try:
            await replies.next()
            await self._write(call, request)
        finally:
            self._settle(call, request)

    async def stream(self, call: OpenCall) -> None:
        """Read requests until the client ends or the server drains, and write replies as they are ready."""
        with keep_patched():  # between the runs of its requests
            await self._exchange(call)

    async def _exchange(self, call: OpenCall) -> None:
        self._metrics.streams.inc()
        replies = ReplyQueue(self._leave_queue, _WINDOW)

        async def read() -> None:
            while (data := await call.read()) is not None:
                await replies.window.acquire()
                request = await self._receive(call, data)
                self._submit(request, replies)
                del data, request  # do not keep the last request alive until the next one arrives

        async def write() -> None:
            while (request := await replies.next()) is not None:
                await self._write(call, request)
                self._settle(call, request)
                replies.remove(request)
                del request

        reading = asyncio.create_task(read())
        drained = asyncio.create_task(self.draining.wait())
        writing = asyncio.create_task(write())
        try:
            await asyncio.wait((reading, drained, writing), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()  # the client sends unread requests to another server, or again
            replies.end()
            await writing
            if reading.done() and not reading.cancelled():
                reading.result()
        finally:
            for task in (reading, drained, writing):
                task.cancel()
            await asyncio.gather(reading, drained, writing, return_exceptions=True)
            while replies.unanswered:
                self._settle(call, replies.unanswered.pop())
            del reading, drained, writing, task  # break the cycle of an exception and its frames
            self.sessions.end_all(call)
            if self.training is not None:  # it may be computing
                self._loop.run_in_executor(None, self.training.detach, call)
            self._metrics.streams.dec()

    # -- one request ---------------------------------------------------------------------------------------------------

    async def _receive(self, call: OpenCall, data: bytes) -> QueuedRequest:
        """Return a complete request, its bytes reserved among the queued ones; read its other parts if it has any."""
        header, payload = await self._parse_request(call, data)
        if (header.HasField("step") or header.HasField("train")) and not call.is_stream:
            await self._reject(call, "expected a single pass, got a step of a session: send it on a Stream")
        if not header.size or not call.is_stream:
            return await self._enqueue(call, QueuedRequest(header, payload, call))
        if header.size > self._limits.max_message:
            limit = size(self._limits.max_message)
            await self._reject(call, f"expected at most {limit}, got a boundary of {size(header.size)}")
        await self._wait_for_bytes(call, self.uploads, header.size)
        try:
            call.upload = Upload()
            whole = memoryview(bytearray(header.size))
            try:
                await self._assemble(call, header, payload, whole)
            except BaseException:
                whole.release()  # the frames of the exception may outlive the reservation
                raise
            call.upload = None  # from here on it waits for the server alone
            return await self._enqueue(call, QueuedRequest(header, whole.toreadonly(), call))
        finally:
            call.upload = None
            self.uploads.release(header.size)

    async def _enqueue(self, call: OpenCall, request: QueuedRequest) -> QueuedRequest:
        call.in_flight += 1
        await self.queued.reserve(request.nbytes)
        return request

    async def _wait_for_bytes(self, call: OpenCall, pool: BytePool, nbytes: int) -> None:
        call.is_waiting = True
        try:
            await pool.reserve(nbytes)
        finally:
            call.is_waiting = False

    @asynccontextmanager
    async def _reserve(self, call: OpenCall, pool: BytePool, nbytes: int) -> AsyncIterator[None]:
        """Hold bytes of a pool for the reply of a call."""
        await self._wait_for_bytes(call, pool, nbytes)
        call.reply_pool = pool
        try:
            yield
        finally:
            pool.release(nbytes)

    async def _assemble(self, call: OpenCall, header: Any, part: memoryview, whole: memoryview) -> None:
        """Fill in a boundary that arrives in parts, of which this is the first."""
        offset = 0
        while True:
            if offset + len(part) > header.size or not len(part):
                left = header.size - offset
                await self._reject(call, f"expected {left} more bytes of the boundary, got {len(part)}")
            whole[offset : offset + len(part)] = part
            offset += len(part)
            assert call.upload is not None
            call.upload.add(len(part))
            if offset == header.size:
                return
            data = await call.read()
            if data is None:
                await self._reject(call, f"expected a boundary of {header.size} bytes, got {offset}")
                raise AssertionError("`_reject` raises")
            part_header, part = await self._parse_request(call, data)
            if part_header.id != header.id:
                await self._reject(call, "expected the next part of a request, got another request")

    async def _parse_request(self, call: OpenCall, data: bytes) -> tuple[Any, memoryview]:
        try:
            return protocol.split_payload(protocol.Request, data)
        except (DecodeError, UnicodeDecodeError, ValueError) as error:
            await self._reject(call, f"expected a Request, got other bytes: {describe_error(error)}")
            raise

    def _submit(self, request: QueuedRequest, replies: ReplyQueue) -> None:
        """Queue a request for the workers; its bytes stay reserved until it is computed, forwarded or cancelled."""
        request.is_queued = True
        replies.unanswered.add(request)
        self._metrics.queue.inc()
        self._received_bytes.inc(request.nbytes)
        request.observer = replies
        self._workers.submit(request)

    def _leave_queue(self, request: QueuedRequest) -> None:
        """Release the bytes of a request, once."""
        if request.is_queued:
            request.is_queued = False
            self._metrics.queue.dec()
            self.queued.release(request.nbytes)

    async def _write(self, call: OpenCall, request: QueuedRequest) -> None:
        reply = request.reply.result()
        self._sent_bytes.inc(len(reply))
        await call.write(reply)

    def _settle(self, call: OpenCall, request: QueuedRequest) -> None:
        """Cancel a request unless it is answered, and count its reply as written once there is one."""
        call.in_flight -= 1
        if request.cancel():
            self._leave_queue(request)
        request.reply.add_done_callback(partial(self._remove_reply, request))

    def _remove_reply(self, request: QueuedRequest, reply: Future[bytes]) -> None:
        if not reply.cancelled():
            self.replies.remove(len(reply.result()))
        if request.forwarded_bytes is not None:
            self._forwarder.budget.remove(request.forwarded_bytes)

    # -- messages ------------------------------------------------------------------------------------------------------

    async def _read(self, call: OpenCall, name: str) -> Any:
        """Read the one message of a unary call."""
        data = await call.read()
        if data is None:
            await self._reject(call, f"expected a {name}, got no message")
        try:
            return protocol.MESSAGES[name].FromString(data)
        except (DecodeError, UnicodeDecodeError, ValueError) as error:
            await self._reject(call, f"expected a {name}, got other bytes: {describe_error(error)}")
            raise

    async def _reject(
        self, call: OpenCall, reason: str, status: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
    ) -> None:
        """Abort a call, which raises."""
        self._metrics.refused.labels(status.name.lower()).inc()
        log.warning("refused", extra={"peer": call.peer, "reason": reason})
        await call.context.abort(status, reason)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _fail(self, reason: str) -> None:
        """Drain because the device is unusable, from any thread."""
        self.failure = reason
        log.error("the device failed", extra={"reason": reason})
        self._loop.call_soon_threadsafe(self.draining.set)

    def close(self, timeout: float) -> None:
        self._workers.close(timeout)
        self._forwarder.close()
        self._profiler.shutdown(wait=False, cancel_futures=True)

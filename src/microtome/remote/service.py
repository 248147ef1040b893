"""The methods of the service that `split.proto` describes.

Each is a stream to gRPC, also those of one message: gRPC reads the message of any other call, whole, before anybody
is asked. Here a call has first given its token, then has its place among the calls that are open, and then is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic, perf_counter
from typing import Any

import torch

from microtome import __version__
from microtome.errors import describe_error
from microtome.remote import protocol
from microtome.remote.budget import BytePool, ReplyBudget
from microtome.remote.call_limiter import CallLimiter, OpenCall, Upload
from microtome.remote.logs import ID_CHARS
from microtome.remote.metrics import Metrics
from microtome.remote.optional_packages import DecodeError, grpc
from microtome.remote.peers import Peers
from microtome.remote.served_model import ServedModel
from microtome.remote.worker import Limits, QueuedRequest, WorkerPool
from microtome.split.codecs import CODECS
from microtome.units import size

log = logging.getLogger("microtome.remote")

#: The most bytes of one echo, and of all unwritten echoes: a short request asks for a long reply.
ECHO = 8 << 20
#: The most bytes of all unwritten profiles, beside one that is longer by itself.
PROFILES = 8 << 20
#: Requests of one stream that are taken in before the first is answered.
WINDOW = 32
#: Seconds after which a profile that failed is tried again: nothing else is computed meanwhile.
RETRY_S = 60.0


class Service:
    """The methods of the service.

    Attributes:
        calls: Those that are open.
        uploads: Bytes of requests of which not all parts have come.
        echoes: Bytes of echoes that are not yet written.
        profiles: Bytes of profiles that are not yet written.
        replies: Bytes of replies that are not yet written; gRPC holds them a second time while it writes them.
        draining: Set when nothing new is taken.
        failure: Why the device can compute nothing any more; None: it can.
    """

    def __init__(self, served: ServedModel, limits: Limits, metrics: Metrics, peers: Peers) -> None:
        self._served = served
        self._limits = limits
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self.calls = CallLimiter(limits.calls, peers, trusted=True)
        self.uploads = BytePool(limits.share)
        self._waiting = BytePool(limits.share)
        self.echoes = BytePool(ECHO)
        self.profiles = BytePool(PROFILES)
        self.replies = ReplyBudget(limits.share // 2)
        self._workers = WorkerPool(served, limits, metrics, self.replies, self._fail)
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="microtome-profile")
        self._text: str | None = None
        self._profile_failed: tuple[float, Exception] | None = None
        self.draining = asyncio.Event()
        self.failure: str | None = None

    def handlers(self) -> Any:
        made = {name: grpc.stream_stream_rpc_method_handler(partial(self._handle, name)) for name in protocol.METHODS}
        return grpc.method_handlers_generic_handler(protocol.SERVICE, made)

    async def _handle(self, name: str, _: Any, context: Any) -> None:
        if self.failure is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the device failed: {self.failure}")
        await self.calls.run(context, getattr(self, name.lower()), is_stream=protocol.METHODS[name].streams)

    # -- the methods ---------------------------------------------------------------------------------------------------

    async def hello(self, call: OpenCall) -> None:
        asked = await self._read(call, "HelloRequest")
        versions = {"torch": asked.torch[:ID_CHARS], "microtome": asked.microtome[:ID_CHARS]}
        log.info("hello", extra={"peer": call.peer, **versions})
        served = self._served
        reply = protocol.HelloReply(
            protocol=protocol.PROTOCOL,
            microtome=__version__,
            torch=torch.__version__,
            model=served.name,
            fingerprint=served.fingerprint,
            device=str(served.device or "cpu"),
            codecs=CODECS,
            cuts=served.cuts,
            max_message=self._limits.max_message,
            batch=self._limits.batch,
            max_part=self._limits.part,
        )
        await call.write(reply.SerializeToString())

    async def echo(self, call: OpenCall) -> None:
        asked = await self._read(call, "EchoRequest")
        if asked.reply_bytes > ECHO:
            await self._refuse(call, grpc.StatusCode.INVALID_ARGUMENT, f"{asked.reply_bytes} bytes are too many")
        async with self._reserve(call, self.echoes, asked.reply_bytes):
            await call.write(protocol.EchoReply(payload=bytes(asked.reply_bytes)).SerializeToString())

    async def profile(self, call: OpenCall) -> None:
        await self._read(call, "ProfileRequest")
        call.requests += 1
        try:
            text = await self._loop.run_in_executor(self._aside, self._profiled)
        except Exception as error:
            await self._refuse(
                call, grpc.StatusCode.FAILED_PRECONDITION, f"it cannot be profiled: {describe_error(error)}"
            )
            raise
        finally:
            call.requests -= 1
        async with self._reserve(call, self.profiles, len(text)):
            await call.write(protocol.ProfileReply(json=text).SerializeToString())

    async def run(self, call: OpenCall) -> None:
        data = await call.read()
        if data is None:
            await self._refuse(call, grpc.StatusCode.INVALID_ARGUMENT, "expected a Request, got no message")
            return
        request, boundary = await self._parsed(call, data)
        work = _work(request, boundary)
        call.requests += 1
        await self._waiting.take(work.nbytes)
        begun = self._submit(work)
        del data, boundary, work  # while it waits for the reply, it does not hold the request
        try:
            await self._answer(call, begun)
        finally:
            self._settle(call, begun)

    async def stream(self, call: OpenCall) -> None:
        """Read requests until the client ends, or the server does; write replies as they are ready."""
        self._metrics.streams.inc()
        answering: set[asyncio.Task[None]] = set()
        window = asyncio.Semaphore(WINDOW)

        def over(begun: Future[bytes], task: asyncio.Task[None]) -> None:
            self._settle(call, begun)
            answering.discard(task)
            window.release()

        async def read() -> None:
            while (data := await call.read()) is not None:
                await window.acquire()
                work = await self._take(call, data)
                begun = self._submit(work)
                task = asyncio.create_task(self._answer(call, begun))
                answering.add(task)
                task.add_done_callback(partial(over, begun))
                del data, work, begun, task  # else what was read last is held until more comes

        reading = asyncio.create_task(read())
        drained = asyncio.create_task(self.draining.wait())
        try:
            await asyncio.wait((reading, drained), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()  # what is not read by now is sent to another server, or again
            await asyncio.gather(*answering)
            if reading.done() and not reading.cancelled():
                reading.result()
        finally:
            for task in (reading, drained, *answering):
                task.cancel()
            await asyncio.gather(reading, drained, *answering, return_exceptions=True)
            answering.clear()
            del reading, drained, task  # an exception that holds itself, by its frames, is freed late
            self._metrics.streams.dec()

    def _profiled(self) -> str:
        with self._workers.pausing():  # it would time the requests that run beside it, and see their calls
            if self._profile_failed is not None and monotonic() < self._profile_failed[0]:
                raise self._profile_failed[1]
            if self._text is None:
                try:
                    self._text = self._served.profile()
                except Exception as error:
                    self._profile_failed = monotonic() + RETRY_S, error.with_traceback(None)
                    raise
            return self._text

    # -- one request ---------------------------------------------------------------------------------------------------

    async def _take(self, call: OpenCall, data: bytes) -> QueuedRequest:
        """A request, with room among those that wait; its other parts are read where there are some."""
        request, boundary = await self._parsed(call, data)
        if not request.size:
            work = _work(request, boundary)
            call.requests += 1
            await self._waiting.take(work.nbytes)
            return work
        if request.size > self._limits.max_message:
            why = f"expected at most {size(self._limits.max_message)}, got a boundary of {size(request.size)}"
            await self._refuse(call, grpc.StatusCode.INVALID_ARGUMENT, why)
        await self._wait(call, self.uploads, request.size)
        try:
            call.upload = Upload()
            whole = memoryview(bytearray(request.size))
            try:
                await self._assemble(call, request, boundary, whole)
            except BaseException:
                whole.release()  # the frames of an exception may live longer than it may be held
                raise
            work = _work(request, whole.toreadonly())
            call.upload = None  # from here on the server alone makes it wait
            call.requests += 1
            await self._waiting.take(work.nbytes)
            return work
        finally:
            call.upload = None
            self.uploads.give_back(request.size)

    async def _wait(self, call: OpenCall, pool: BytePool, nbytes: int) -> None:
        """Wait for room in a pool."""
        call.waits = True
        try:
            await pool.take(nbytes)
        finally:
            call.waits = False

    @asynccontextmanager
    async def _reserve(self, call: OpenCall, pool: BytePool, nbytes: int) -> AsyncIterator[None]:
        """Hold bytes of a pool for the reply of a call."""
        await self._wait(call, pool, nbytes)
        call.reply_pool = pool
        try:
            yield
        finally:
            pool.give_back(nbytes)

    async def _assemble(self, call: OpenCall, request: Any, piece: memoryview, whole: memoryview) -> None:
        """Fill in the boundary of a request that comes in parts, of which one is here."""
        at = 0
        while True:
            if at + len(piece) > request.size or not len(piece):
                why = f"expected {request.size - at} more bytes of the boundary, got {len(piece)}"
                await self._refuse(call, grpc.StatusCode.INVALID_ARGUMENT, why)
            whole[at : at + len(piece)] = piece
            at += len(piece)
            assert call.upload is not None
            call.upload.add(len(piece))
            if at == request.size:
                return
            data = await call.read()
            if data is None:
                why = f"expected a boundary of {request.size} bytes, got {at}"
                await self._refuse(call, grpc.StatusCode.INVALID_ARGUMENT, why)
                raise AssertionError(why)
            part, piece = await self._parsed(call, data)
            if part.id != request.id:
                why = "expected the next part of a request, got another request"
                await self._refuse(call, grpc.StatusCode.INVALID_ARGUMENT, why)

    async def _parsed(self, call: OpenCall, data: bytes) -> tuple[Any, memoryview]:
        try:
            request, boundary = protocol.apart(protocol.Request, data)
        except (DecodeError, UnicodeDecodeError, ValueError) as error:
            await self._refuse_bytes(call, "Request", error)
            raise
        return request, boundary

    def _submit(self, work: QueuedRequest) -> Future[bytes]:
        """Have a request computed; it has room among those that wait until it is."""
        self._metrics.queue.inc()
        self._metrics.bytes.labels("received").inc(work.nbytes)
        begun = self._workers.submit(work)
        begun.add_done_callback(partial(self._computed, work.nbytes))
        return begun

    def _computed(self, nbytes: int, _: Future[bytes]) -> None:
        """It is computed, or nobody waits for it any more. In any thread."""
        self._metrics.queue.dec()
        self._loop.call_soon_threadsafe(self._waiting.give_back, nbytes)

    async def _answer(self, call: OpenCall, begun: Future[bytes]) -> None:
        """Write the reply to a request that was taken, whatever happens to it."""
        reply = await asyncio.wrap_future(begun)
        self._metrics.bytes.labels("sent").inc(len(reply))
        await call.write(reply)

    def _settle(self, call: OpenCall, begun: Future[bytes]) -> None:
        """A request was answered, or nobody waits for it any more: then it is not computed if it has not begun."""
        call.requests -= 1
        begun.cancel()
        begun.add_done_callback(self._drop)

    def _drop(self, begun: Future[bytes]) -> None:
        if not begun.cancelled():
            self.replies.drop(len(begun.result()))

    # -- what is read --------------------------------------------------------------------------------------------------

    async def _read(self, call: OpenCall, name: str) -> Any:
        data = await call.read()
        if data is None:
            await self._refuse(call, grpc.StatusCode.INVALID_ARGUMENT, f"expected a {name}, got no message")
        try:
            return protocol.MESSAGES[name].FromString(data)
        except (DecodeError, UnicodeDecodeError, ValueError) as error:
            await self._refuse_bytes(call, name, error)
            raise

    async def _refuse_bytes(self, call: OpenCall, name: str, error: Exception) -> None:
        await self._refuse(call, grpc.StatusCode.INVALID_ARGUMENT, f"the bytes are no {name}: {describe_error(error)}")

    async def _refuse(self, call: OpenCall, status: grpc.StatusCode, why: str) -> None:
        """Close the call with a reason."""
        self._metrics.refused.labels(status.name.lower()).inc()
        log.warning("refused", extra={"peer": call.peer, "reason": why})
        await call.context.abort(status, why)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _fail(self, why: str) -> None:
        """Take nothing more: the device can compute nothing. In any thread."""
        self.failure = why
        log.error("the device failed", extra={"reason": why})
        self._loop.call_soon_threadsafe(self.draining.set)

    def close(self, timeout: float) -> None:
        self._workers.close(timeout)
        self._aside.shutdown(wait=False, cancel_futures=True)


def _work(request: Any, boundary: memoryview) -> QueuedRequest:
    now = perf_counter()
    timeout = request.timeout_s if request.timeout_s > 0 else float("inf")
    return QueuedRequest(request.id, boundary, request.codec or "raw", now, now + timeout)

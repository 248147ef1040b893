"""The methods of the service that `split.proto` describes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any

import torch

from microtome import __version__
from microtome.errors import said
from microtome.remote import messages
from microtome.remote.extra import DecodeError, grpc
from microtome.remote.metrics import Metrics
from microtome.remote.served import Served
from microtome.remote.workers import Limits, Work, Workers
from microtome.split.codecs import CODECS

log = logging.getLogger("microtome.remote")

#: The most bytes that are sent back where nothing but bytes is asked for: little is sent for them.
ECHO = 8 << 20
#: Requests of one stream that are taken in before the first is answered.
WINDOW = 32


class Service:
    """The methods of the service."""

    def __init__(self, served: Served, limits: Limits, metrics: Metrics) -> None:
        self._served = served
        self._limits = limits
        self._metrics = metrics
        self._workers = Workers(served, limits, metrics)
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="microtome-profile")
        self._text: str | None = None
        self._held = 0
        self._room = asyncio.Event()
        self.draining = asyncio.Event()

    # -- the methods ---------------------------------------------------------------------------------------------------

    async def hello(self, data: bytes, context: Any) -> bytes:
        asked = await self._read("HelloRequest", data, context)
        log.info("hello", extra={"peer": context.peer(), "torch": asked.torch, "microtome": asked.microtome})
        served = self._served
        reply: bytes = messages.HelloReply(
            protocol=messages.PROTOCOL,
            microtome=__version__,
            torch=torch.__version__,
            model=served.name,
            fingerprint=served.fingerprint,
            device=str(served.device or "cpu"),
            codecs=CODECS,
            cuts=served.cuts,
            max_message=self._limits.max_message,
            batch=self._limits.batch,
        ).SerializeToString()
        return reply

    async def echo(self, data: bytes, context: Any) -> bytes:
        asked = await self._read("EchoRequest", data, context)
        if asked.reply_bytes > ECHO:
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"{asked.reply_bytes} bytes are too many")
        reply: bytes = messages.EchoReply(payload=bytes(asked.reply_bytes)).SerializeToString()
        return reply

    async def profile(self, data: bytes, context: Any) -> bytes:
        await self._read("ProfileRequest", data, context)
        try:
            text = await asyncio.get_running_loop().run_in_executor(self._aside, self._profiled)
        except Exception as error:
            await self._refuse(context, grpc.StatusCode.FAILED_PRECONDITION, f"it cannot be profiled: {said(error)}")
            raise
        reply: bytes = messages.ProfileReply(json=text).SerializeToString()
        return reply

    async def run(self, data: bytes, context: Any) -> bytes:
        work = await self._work(data, context)
        await self._take(work)
        try:
            return await self._answer(self._workers.submit(work))
        finally:
            self._give_back(work.nbytes)

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Read requests until the client ends, or the server does; write replies as they are ready."""
        self._metrics.streams.inc()
        answering: set[asyncio.Task[None]] = set()
        window = asyncio.Semaphore(WINDOW)
        writing = asyncio.Lock()

        async def answer(begun: Future[bytes]) -> None:
            reply = await self._answer(begun)
            async with writing:
                await context.write(reply)

        def over(nbytes: int, begun: Future[bytes], task: asyncio.Task[None]) -> None:
            begun.cancel()  # of a task that was cancelled before it began
            answering.discard(task)
            self._give_back(nbytes)
            window.release()

        async def read() -> None:
            async for data in requests:
                await window.acquire()
                work = await self._work(data, context)
                await self._take(work)
                begun = self._workers.submit(work)
                task = asyncio.create_task(answer(begun))
                answering.add(task)
                task.add_done_callback(partial(over, work.nbytes, begun))
                del data, work, begun, task  # else what was read last is held until more comes

        reading = asyncio.create_task(read())
        drained = asyncio.create_task(self.draining.wait())
        try:
            await asyncio.wait((reading, drained), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()  # what is not read by now is sent to another server, or again
            await asyncio.gather(*answering)
            (ended,) = await asyncio.gather(reading, return_exceptions=True)
            if isinstance(ended, Exception):
                raise ended
        finally:
            for task in (reading, drained, *answering):
                task.cancel()
            await asyncio.gather(reading, drained, *answering, return_exceptions=True)
            self._metrics.streams.dec()

    def _profiled(self) -> str:
        with self._workers.pausing():  # it would time the requests that run beside it, and see their calls
            if self._text is None:
                self._text = self._served.profile()
            return self._text

    # -- one request ---------------------------------------------------------------------------------------------------

    async def _work(self, data: bytes, context: Any) -> Work:
        now = perf_counter()
        try:
            request, boundary = messages.apart(messages.Request, data)
        except (DecodeError, UnicodeDecodeError, ValueError) as error:
            await self._refuse_bytes(context, "Request", error)
            raise
        timeout = request.timeout_s if request.timeout_s > 0 else float("inf")
        return Work(request.id, boundary, request.codec or "raw", now, now + timeout)

    async def _answer(self, begun: Future[bytes]) -> bytes:
        """The reply to a request that was taken, whatever happens to it."""
        reply = await asyncio.wrap_future(begun)
        self._metrics.bytes.labels("sent").inc(len(reply))
        return reply

    async def _take(self, work: Work) -> None:
        """Wait until there is room for a request; one alone is always taken."""
        while self._held and self._held + work.nbytes > self._limits.held:
            self._room.clear()
            await self._room.wait()
        self._held += work.nbytes
        self._metrics.queue.inc()
        self._metrics.bytes.labels("received").inc(work.nbytes)

    def _give_back(self, nbytes: int) -> None:
        """It is answered, or nobody waits for it any more."""
        self._metrics.queue.dec()
        self._held -= nbytes
        self._room.set()

    # -- what is read --------------------------------------------------------------------------------------------------

    async def _read(self, name: str, data: bytes, context: Any) -> Any:
        try:
            return messages.MESSAGES[name].FromString(data)
        except (DecodeError, UnicodeDecodeError, ValueError) as error:
            await self._refuse_bytes(context, name, error)
            raise

    async def _refuse_bytes(self, context: Any, name: str, error: Exception) -> None:
        await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"the bytes are no {name}: {said(error)}")

    async def _refuse(self, context: Any, status: grpc.StatusCode, why: str) -> None:
        """Close the call with a reason."""
        self._metrics.refused.labels(status.name.lower()).inc()
        log.warning("refused", extra={"peer": context.peer(), "reason": why})
        await context.abort(status, why)

    def close(self, timeout: float) -> None:
        self._workers.close(timeout)
        self._aside.shutdown(wait=False, cancel_futures=True)

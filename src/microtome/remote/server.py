"""`serve`: a model's tails as a service."""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple, Self

import grpc
import torch
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from torch import nn

from microtome import __version__
from microtome.errors import BadQuery, said
from microtome.remote import messages
from microtome.remote.faults import Late, TooLarge, as_message
from microtome.remote.metrics import Metrics
from microtome.remote.security import Identity, is_loopback
from microtome.remote.served import Served
from microtome.split.codecs import CODECS
from microtome.split.stage import Stage
from microtome.units import parse_size, size

log = logging.getLogger("microtome.remote")

#: What a message takes beside the bytes that cross.
ENVELOPE = 64 << 10
#: The most bytes of one message: protobuf reads no more.
MOST = (2 << 30) - 1 - ENVELOPE
#: The most bytes that are sent back where nothing but bytes is asked for: little is sent for them.
ECHO = 8 << 20
#: Requests of one stream that are taken in before the first is answered.
WINDOW = 32
#: Streams and calls at once; those beyond are told to come again.
STREAMS = 256


class Limits(NamedTuple):
    """How much a server takes.

    Attributes:
        max_message: Bytes of a request.
        concurrency: Requests computed at once.
        held: Bytes of requests that wait to be computed; further ones are not read until there is room.
    """

    max_message: int
    concurrency: int
    held: int


class Work(NamedTuple):
    """A request that waits to be computed."""

    id: str
    data: bytes
    codec: str
    arrived: float
    ends: float

    @property
    def nbytes(self) -> int:
        """What it holds while it waits."""
        return len(self.data) + len(self.id) + len(self.codec)


class Gate:
    """Many at once, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:  # whoever comes now waits for it
            self._changed.wait_for(lambda: not self._inside)
            yield


class Service:
    """The methods of the service."""

    def __init__(self, served: Served, limits: Limits, metrics: Metrics) -> None:
        self._served = served
        self._limits = limits
        self._metrics = metrics
        self._pool = ThreadPoolExecutor(limits.concurrency, thread_name_prefix="microtome-tail")
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="microtome-profile")
        self._gate = Gate()
        self._text: str | None = None
        self._held = 0
        self._room = asyncio.Condition()
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
            batch=1,
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
        work = self._work(await self._read("Request", data, context))
        await self._take(work)
        return await self._answer(work)

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Read requests until the client ends, or the server does; write replies as they are ready."""
        self._metrics.streams.inc()
        answering: set[asyncio.Task[None]] = set()
        window = asyncio.Semaphore(WINDOW)
        writing = asyncio.Lock()

        async def answer(work: Work) -> None:
            try:
                reply = await self._answer(work)
                async with writing:
                    await context.write(reply)
            finally:
                window.release()

        async def read() -> None:
            async for data in requests:
                await window.acquire()
                work = self._work(await self._read("Request", data, context))
                await self._take(work)
                task = asyncio.create_task(answer(work))
                answering.add(task)
                task.add_done_callback(answering.discard)
                del data, work, task  # else what was read last is held until more comes

        reading = asyncio.create_task(read())
        drained = asyncio.create_task(self.draining.wait())
        try:
            await asyncio.wait((reading, drained), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()  # what is not read by now is sent to another server, or again
            await asyncio.gather(*answering)
            if not reading.cancelled():
                await reading
        finally:
            for task in (reading, drained, *answering):
                task.cancel()
            await asyncio.gather(reading, drained, *answering, return_exceptions=True)
            self._metrics.streams.dec()

    def _profiled(self) -> str:
        with self._gate.alone():  # it would time the requests that run beside it, and see their calls
            if self._text is None:
                self._text = self._served.profile()
            return self._text

    # -- one request ---------------------------------------------------------------------------------------------------

    def _work(self, request: Any) -> Work:
        now = perf_counter()
        timeout = request.timeout_s if request.timeout_s > 0 else float("inf")
        return Work(request.id, request.boundary, request.codec or "raw", now, now + timeout)

    async def _answer(self, work: Work) -> bytes:
        """The reply to a request, whatever happens to it."""
        try:
            reply = await asyncio.get_running_loop().run_in_executor(self._pool, self._compute, work)
        finally:
            self._metrics.queue.dec()
            async with self._room:
                self._held -= work.nbytes
                self._room.notify_all()
        self._metrics.bytes.labels("sent").inc(len(reply))
        return reply

    def _compute(self, work: Work) -> bytes:
        """In a thread of the pool."""
        began = perf_counter()
        try:
            if began > work.ends:
                raise Late(f"the request waited {began - work.arrived:.3f} s, longer than the client does")
            if len(work.data) > self._limits.max_message:
                raise TooLarge(f"{size(len(work.data))} are more than {size(self._limits.max_message)}")
            with self._gate.shared():
                answer = self._served.run(work.data, self._limits.held, work.codec)
        except BaseException as error:  # noqa: BLE001  whatever the model raises, the client is told, and others served
            kind, message = as_message(error)
            self._metrics.errors.labels(kind).inc()
            log.warning("failed", extra={"request": work.id, "kind": kind, "reason": message.message})
            reply: bytes = messages.Reply(id=work.id, error=message).SerializeToString()
            return reply
        spent = {
            "decode_s": answer.decode_s,
            "queue_s": began - work.arrived,
            "run_s": answer.run_s,
            "encode_s": answer.encode_s,
        }
        self._metrics.requests.labels(answer.at).inc()
        self._metrics.batches.observe(1)
        for phase, seconds in spent.items():
            self._metrics.seconds.labels(phase.removesuffix("_s")).observe(seconds)
        log.info("answered", extra={"request": work.id, "at": answer.at, **spent})
        return messages.with_bytes(messages.Reply(id=work.id, timing=messages.Timing(**spent, batch=1)), answer.data)

    async def _take(self, work: Work) -> None:
        """Wait until there is room for a request; one alone is always taken."""
        nbytes = work.nbytes
        async with self._room:
            await self._room.wait_for(lambda: self._held == 0 or self._held + nbytes <= self._limits.held)
            self._held += nbytes
        self._metrics.queue.inc()
        self._metrics.bytes.labels("received").inc(nbytes)

    # -- what is read --------------------------------------------------------------------------------------------------

    async def _read(self, name: str, data: bytes, context: Any) -> Any:
        try:
            return messages.MESSAGES[name].FromString(data)
        except (DecodeError, UnicodeDecodeError, ValueError) as error:
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"the bytes are no {name}: {said(error)}")
            raise

    async def _refuse(self, context: Any, status: grpc.StatusCode, why: str) -> None:
        """Close the call with a reason."""
        self._metrics.refused.labels(status.name.lower()).inc()
        log.warning("refused", extra={"peer": context.peer(), "reason": why})
        await context.abort(status, why)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._aside.shutdown(wait=False, cancel_futures=True)


class Server:
    """A server that runs, in a thread of its own. Use it as a context manager, or call `stop`.

    Attributes:
        address: Where it listens.
        metrics: What it counts.
    """

    def __init__(self, served: Served, listen: str, identity: Identity, limits: Limits) -> None:
        self.served = served
        self.metrics = Metrics()
        self.address = listen
        self._identity = identity
        self._limits = limits
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()
        self._grace = 0.0
        self._thread = threading.Thread(target=self._run, name="microtome-server", daemon=True)

    def start(self) -> Self:
        credentials = self._identity.credentials()
        if not is_loopback(self.address) and (credentials is None or self._identity.token is None):
            missing = " and ".join(
                word for word, there in (("TLS", credentials), ("a token", self._identity.token)) if there is None
            )
            warnings.warn(
                f"{self.address} can be reached from other machines, and there is no {missing}: whoever reaches it can "
                "use the model, read what is sent and answer in its place",
                RuntimeWarning,
                stacklevel=3,
            )
        self._thread.start()
        self._ready.result()
        return self

    def stop(self, grace: float = 10.0) -> None:
        """Take no new requests, answer those that came, and end; after `grace` seconds in any case."""
        if self._thread.is_alive():
            self._grace = grace
            self._ready.result().call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended; False: it had not by then."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self if self._thread.is_alive() else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                log.exception("the server failed")

    async def _serve(self) -> None:
        service = Service(self.served, self._limits, self.metrics)
        most = self._limits.max_message + ENVELOPE
        server = grpc.aio.server(
            interceptors=(_Doorkeeper(self._identity, self.metrics),),
            maximum_concurrent_rpcs=STREAMS,
            options=(
                ("grpc.max_receive_message_length", most),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ),
        )
        server.add_generic_rpc_handlers((_handlers(service),))
        state = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(state, server)
        for name in ("", messages.SERVICE):
            await state.set(name, health_pb2.HealthCheckResponse.SERVING)
        self.address = self._bound(server)
        await server.start()
        self._ready.set_result(asyncio.get_running_loop())
        await self._stop.wait()
        log.info("draining")
        await state.enter_graceful_shutdown()
        service.draining.set()
        await server.stop(self._grace)
        service.close()

    def _bound(self, server: Any) -> str:
        credentials = self._identity.credentials()
        host, colon, asked = self.address.rpartition(":")
        if not colon:
            raise BadQuery(f"a server listens on an address such as 127.0.0.1:7070, got {self.address!r}")
        try:
            if credentials is None:
                port = server.add_insecure_port(self.address)
            else:
                port = server.add_secure_port(self.address, credentials)
        except RuntimeError as error:
            raise BadQuery(
                f"cannot listen on {self.address!r}: is the port taken, or the address another's?"
            ) from error
        return f"{host}:{port}" if asked.isdigit() else self.address


class _Doorkeeper(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Turns away who does not know the token. Health may be asked by anybody."""

    def __init__(self, identity: Identity, metrics: Metrics) -> None:
        self._identity = identity
        self._metrics = metrics

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        ours = details.method.startswith(f"/{messages.SERVICE}/")
        if handler is None or not ours or self._identity.knows(details.invocation_metadata):
            return handler
        self._metrics.refused.labels("unauthenticated").inc()
        log.warning("refused", extra={"reason": "the token is wrong or missing"})

        async def refuse(_: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is wrong or missing")

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)


def _handlers(service: Service) -> Any:
    made = {
        name: (grpc.stream_stream_rpc_method_handler if method.streams else grpc.unary_unary_rpc_method_handler)(
            getattr(service, name.lower())
        )
        for name, method in messages.METHODS.items()
    }
    return grpc.method_handlers_generic_handler(messages.SERVICE, made)


def serve(
    model: nn.Module | Stage,
    inputs: Any = None,
    *,
    listen: str = "127.0.0.1:7070",
    tls_cert: str | None = None,
    tls_key: str | None = None,
    client_ca: str | None = None,
    token: str | None = None,
    max_message: int | str = "256MB",
    concurrency: int = 1,
) -> Server:
    """Serve every cut of a model, until the server is stopped.

    Args:
        model: The model, in eval; or the last stage of one, as `mt.load_stage` gives it.
        inputs: An example: a tensor, a tuple, a dict, an `Inputs`, or a text such as `"1x3x224x224"`.
        listen: Where; port 0 takes one that is free, and `address` of what is returned says which.
        tls_cert: A certificate, PEM, and `tls_key` its key: for connections that nobody else reads.
        client_ca: Who signs the certificates that clients must show.
        token: What clients must know.
        max_message: The most bytes of a request, such as `"256MB"`.
        concurrency: How many requests are computed at once.

    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> with serve(model, x, listen="127.0.0.1:0") as server:
    ...     len(server.served.cuts)
    37
    """
    if not isinstance(concurrency, int) or concurrency < 1:
        raise BadQuery(f"concurrency is how many requests are computed at once, got {concurrency!r}")
    served = Served(model, inputs)
    most = parse_size(max_message)
    if most > MOST:
        raise BadQuery(f"a message has at most {size(MOST)}, got max_message={max_message!r}")
    limits = Limits(most, concurrency, held=4 * most)
    identity = Identity(tls_cert, tls_key, client_ca, token)
    return Server(served, listen, identity, limits).start()

"""`serve`: a model's tails as a service."""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from concurrent.futures import Future
from typing import Any, Self

from torch import nn

from microtome.errors import BadQuery
from microtome.remote.auth import Authenticator
from microtome.remote.credentials import Identity, is_loopback
from microtome.remote.health import Health
from microtome.remote.metrics import Metrics
from microtome.remote.optional_packages import grpc
from microtome.remote.peers import Peers
from microtome.remote.served_model import ServedModel
from microtome.remote.service import Service
from microtome.remote.watchdog import Watchdog
from microtome.remote.worker import Limits
from microtome.split.stage import Stage
from microtome.units import parse_seconds, parse_size, size

log = logging.getLogger("microtome.remote")

#: The most bytes of a message beside its boundary.
ENVELOPE = 64 << 10
#: The most bytes of one message: protobuf reads no more.
MOST = (2 << 30) - 1 - ENVELOPE
#: A client that waits for a long request pings every 10 s; one that does so more often than this is disconnected.
_PING_MS = 5_000
#: Bytes of a call that gRPC takes in before anybody reads it, and calls of one connection at once.
_UNREAD, _STREAMS = 256 << 10, 128
#: Milliseconds in which a connection must have said that it speaks HTTP/2, and TLS.
_HANDSHAKE_MS = 10_000


class Server:
    """A server that runs, in a thread of its own. Use it as a context manager, or call `stop`.

    Attributes:
        address: Where it listens.
        metrics: Its counters.
        failure: Why its device can compute nothing any more, as after an error in a kernel of CUDA; None: it can. From
            then on it says NOT_SERVING, and answers nothing: end the process, so that it is started again.
    """

    def __init__(self, served: ServedModel, listen: str, identity: Identity, limits: Limits) -> None:
        self.served = served
        self.metrics = Metrics()
        self.address = listen
        self._identity = identity
        self._limits = limits
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()
        self._grace = 0.0
        self._service: Service | None = None
        self._thread = threading.Thread(target=self._run, name="microtome-server", daemon=True)

    @property
    def failure(self) -> str | None:
        return None if self._service is None else self._service.failure

    def start(self) -> Self:
        if ":" not in self.address:
            raise BadQuery(f"a server listens on an address such as 127.0.0.1:7070, got {self.address!r}")
        credentials = self._identity.credentials()
        if not is_loopback(self.address) and (credentials is None or self._identity.token is None):
            missing = " and ".join(
                f"no {word}" for word, there in (("TLS", credentials), ("token", self._identity.token)) if there is None
            )
            warnings.warn(
                f"{self.address} can be reached from other machines, and there is {missing}: whoever reaches it can "
                "use the model, read what is sent and answer in its place",
                RuntimeWarning,
                stacklevel=3,
            )
        device = self.served.device
        self.metrics.count_joules([] if device is None or device.type == "cpu" else [device])
        self._thread.start()
        self._ready.result()
        return self

    def stop(self, grace: float = 10.0) -> None:
        """Take no new requests, answer those that came, and end.

        After `grace` seconds clients wait no longer, and after as many again it does not either for what is computed.
        """
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
        peers = Peers()
        self._service = service = Service(self.served, self._limits, self.metrics, peers)
        try:
            await self._serve_with(service, peers)
        finally:
            await asyncio.to_thread(service.close, self._grace)

    async def _serve_with(self, service: Service, peers: Peers) -> None:
        health = Health(service.draining, peers)
        server = grpc.aio.server(
            interceptors=(Authenticator(self._identity, self.metrics, peers),), options=self._options()
        )
        server.add_generic_rpc_handlers((service.handlers(), health.handlers()))
        self.address = self._bound(server)
        port = self.address.rpartition(":")[2]
        peers.port = int(port) if port.isdigit() else None
        await server.start()
        watching = asyncio.create_task(Watchdog(service, health, peers).run())
        self._ready.set_result(asyncio.get_running_loop())
        await self._stop.wait()
        log.info("draining")
        service.draining.set()
        await server.stop(self._grace)
        watching.cancel()

    def _options(self) -> tuple[tuple[str, int], ...]:
        return (
            ("grpc.max_receive_message_length", self._limits.part + ENVELOPE),
            ("grpc.max_send_message_length", -1),
            ("grpc.compression_enabled_algorithms_bitset", 1),  # none: what is compressed may become any size
            ("grpc.http2.bdp_probe", 0),  # else what nobody reads may be 16 MB a call
            ("grpc.http2.lookahead_bytes", _UNREAD),
            ("grpc.max_concurrent_streams", _STREAMS),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS),
            ("grpc.keepalive_permit_without_calls", 1),
        )

    def _bound(self, server: Any) -> str:
        credentials = self._identity.credentials()
        host, _, asked = self.address.rpartition(":")
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
    batch: int = 1,
    batch_window: float | str = "2ms",
) -> Server:
    """Serve every cut of a model, until the server is stopped.

    Args:
        model: The model, in eval; or the last stage of one, as `mt.load_stage` gives it.
        inputs: An example: a tensor, a tuple, a dict, an `Inputs`, or a text such as `"1x3x224x224"`.
        listen: Where; port 0 takes one that is free, and `address` of what is returned says which.
        tls_cert: A certificate, PEM, and `tls_key` its key: for connections that nobody else reads.
        client_ca: Who signs the certificates that clients must show.
        token: The secret that clients must send.
        max_message: The most bytes of a request, such as `"256MB"`.
        concurrency: How many requests are computed at once.
        batch: How many requests at the same cut are computed together at most, where their shapes allow that. Results
            are then those of each alone to the precision of the kernels, and no longer to the last bit.
        batch_window: How long the first of a batch waits for others.

    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> with serve(model, x, listen="127.0.0.1:0") as server:
    ...     len(server.served.cuts)
    43
    """
    for name, number in (("concurrency", concurrency), ("batch", batch)):
        if not isinstance(number, int) or number < 1:
            raise BadQuery(f"{name} is a number of requests, 1 or more, got {number!r}")
    served = ServedModel(model, inputs)
    most = parse_size(max_message)
    if most > MOST:
        raise BadQuery(f"a message has at most {size(MOST)}, got max_message={max_message!r}")
    limits = Limits(most, concurrency, held=4 * most, batch=batch, batch_window_s=parse_seconds(batch_window))
    identity = Identity(tls_cert, tls_key, client_ca, token)
    return Server(served, listen, identity, limits).start()

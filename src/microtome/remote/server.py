"""`serve`: a gRPC server that runs the tails of a model."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self

import grpc
from torch import Tensor, nn
from torch.optim import Optimizer

from microtome.endpoints import explain_endpoint
from microtome.errors import BadFile, BadQuery, describe_value
from microtome.remote import protocol
from microtome.remote.exported_backend import ExportedBackend
from microtome.remote.forwarding import ForwardOptions
from microtome.remote.health import Health
from microtome.remote.inference_backend import InferenceBackend
from microtome.remote.peers import Peers
from microtome.remote.prometheus import Metrics
from microtome.remote.security import AuthInterceptor, ServerSecurity, is_loopback
from microtome.remote.served_model import ServedModel
from microtome.remote.service import Service
from microtome.remote.session_store import SessionLimits
from microtome.remote.tls_files import UNUSABLE_KEY
from microtome.remote.training.backend import TrainingBackend
from microtome.remote.training.server_run import TrainingOptions
from microtome.remote.watchdog import Watchdog
from microtome.remote.worker import Limits
from microtome.split.graph.exported_stage import ExportedStage
from microtome.split.stage import Stage
from microtome.units import parse_seconds, parse_size, size

log = logging.getLogger("microtome.remote")

#: The most bytes of a message beside its boundary.
_ENVELOPE_BYTES = 64 << 10
_MAX_BOUNDARY_BYTES = protocol.MAX_MESSAGE_BYTES - _ENVELOPE_BYTES
#: A client that waits for a long request pings every 10 s; one that pings more often than this is disconnected.
_MIN_PING_INTERVAL_MS = 5_000
#: Bytes of a call that gRPC buffers before they are read, and the most calls of one connection.
_UNREAD_BYTES, _MAX_STREAMS = 256 << 10, 128
#: The most milliseconds of the TLS and HTTP/2 handshake.
_HANDSHAKE_MS = 10_000


class Server:
    """A running server, in a thread of its own. Use it as a context manager, or call `stop`.

    Attributes:
        address: The address that it listens on.
        metrics: Its Prometheus metrics.
        failure: Why its device is unusable, as after a failed CUDA kernel; None: it works. After a failure the server
            reports NOT_SERVING and answers nothing: restart the process.
    """

    def __init__(
        self,
        served: InferenceBackend,
        listen: str,
        security: ServerSecurity,
        credentials: grpc.ServerCredentials | None,
        limits: Limits,
        forwards: ForwardOptions = ForwardOptions(),  # noqa: B008  it is immutable
    ) -> None:
        self.served = served
        self.metrics = Metrics()
        self.address = listen
        self._security = security
        self._credentials = credentials
        self._limits = limits
        self._forwards = forwards
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()
        self._grace = 0.0
        self._service: Service | None = None
        self._thread = threading.Thread(target=self._run, name="microtome-server", daemon=True)

    def __repr__(self) -> str:
        return f"<Server of {self.served.name} at {self.address}>"

    @property
    def failure(self) -> str | None:
        return None if self._service is None else self._service.failure

    def start(self) -> Self:
        if not is_loopback(self.address) and (risks := self._security.risks()):
            warnings.warn(
                f"{self.address} can be reached from other machines, and {risks}", RuntimeWarning, stacklevel=3
            )
        device = self.served.device
        self.metrics.count_joules([] if device is None or device.type == "cpu" else [device])
        self._thread.start()
        self._ready.result()
        return self

    def stop(self, grace: float = 10.0) -> None:
        """Drain: accept no new requests, answer the received ones, and stop.

        Args:
            grace: Seconds after which unanswered calls are cancelled; the computation in progress gets as many again.
        """
        if self._thread.is_alive():
            self._grace = grace
            self._ready.result().call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server has stopped; return False on timeout."""
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
        self._service = service = Service(self.served, self._limits, self.metrics, peers, self._forwards)
        try:
            await self._serve_with(service, peers)
        finally:
            await asyncio.to_thread(service.close, self._grace)

    async def _serve_with(self, service: Service, peers: Peers) -> None:
        health = Health(service.draining, peers)
        interceptor = AuthInterceptor(self._security, self.metrics, peers)
        server = grpc.aio.server(interceptors=(interceptor,), options=self._options())
        server.add_generic_rpc_handlers((service.handlers(), health.handlers()))
        self.address = self._bind(server)
        port = self.address.rpartition(":")[2]
        peers.port = int(port) if port.isdigit() else None
        await server.start()
        watchdog = asyncio.create_task(Watchdog(service, health, peers).run())
        self._ready.set_result(asyncio.get_running_loop())
        await self._stop.wait()
        log.info("draining")
        service.draining.set()
        await server.stop(self._grace)
        watchdog.cancel()

    def _options(self) -> tuple[tuple[str, int], ...]:
        return (
            ("grpc.max_receive_message_length", self._limits.part_bytes + _ENVELOPE_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.compression_enabled_algorithms_bitset", 1),  # none: the size after decompression is unbounded
            ("grpc.http2.bdp_probe", 0),  # else up to 16 MB of a call are buffered unread
            ("grpc.http2.lookahead_bytes", _UNREAD_BYTES),
            ("grpc.max_concurrent_streams", _MAX_STREAMS),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ("grpc.keepalive_permit_without_calls", 1),
        )

    def _bind(self, server: Any) -> str:
        host, _, requested = self.address.rpartition(":")
        try:
            if self._credentials is None:
                port = server.add_insecure_port(self.address)
            else:
                port = server.add_secure_port(self.address, self._credentials)
        except RuntimeError as error:
            if self._credentials is not None and self._can_bind():
                raise BadFile(f"{self._security.describe_files()}: {UNUSABLE_KEY}") from error
            raise BadQuery(
                f"cannot listen on {self.address!r}: the port is in use, or the address is not of this machine"
            ) from error
        return f"{host}:{port}" if requested.isdigit() else self.address

    def _can_bind(self) -> bool:
        """Whether a server without TLS could listen on the address."""
        try:
            return bool(grpc.aio.server(options=self._options()).add_insecure_port(self.address))
        except RuntimeError:
            return False


def parse_max_message(max_message: int | str) -> int:
    """Parse the most bytes of a request, of which a protobuf message must have room for its envelope."""
    max_bytes = parse_size(max_message)
    if max_bytes > _MAX_BOUNDARY_BYTES:
        raise BadQuery(f"expected max_message of at most {size(_MAX_BOUNDARY_BYTES)}, got {max_message!r}")
    return max_bytes


def serve(
    model: nn.Module | Stage | ExportedStage,
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
    sessions: int = 64,
    state_memory: int | str = "1GB",
    session_timeout: float | str = "10min",
    forward: str | Sequence[str] = (),
    forward_token: str | None = None,
    forward_ca: str | None = None,
    forward_cert: str | None = None,
    forward_key: str | None = None,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    loss: Callable[..., Tensor] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    train_memory: int | str = "4GB",
) -> Server:
    """Serve every cut of a model, or one stage of it, until the server is stopped.

    Args:
        model: The model, in eval mode; or one of its stages, from `mt.load_stage` or `mt.load_exported`. A stage before
            the last one answers with what crosses its end.
        inputs: Example inputs: a tensor, a tuple, a dict, an `Inputs`, or a shape such as `"1x3x224x224"`; none with a
            stage.
        listen: The address to listen on; port 0 picks a free one, which `Server.address` has.
        tls_cert: PEM file of the server's certificate, to encrypt connections; `tls_key` is its private key.
        client_ca: PEM file of the authority that signs the certificates that clients must have.
        token: The token that clients must send.
        max_message: The most bytes of a request, such as `"256MB"`.
        concurrency: The number of requests, or batches, that are computed at once.
        batch: The most requests at the same cut that are computed together, if their shapes allow it. Outputs then
            equal those of each request alone to the precision of the kernels, not bit for bit. A server of one stage
            or one that trains computes one request after the other.
        batch_window: How long the first request of a batch waits for others.
        sessions: The most sessions at once, each with the state of one sequence, such as the KV cache of an answer; the
            least recently used one ends when there are more.
        state_memory: The most bytes of the states of all sessions, such as `"4GB"`.
        session_timeout: How long a session lasts without a step.
        forward: The addresses of servers to which this one may send what crosses the end of a stage, so that it does
            not travel through the client.
        forward_token: The token that those servers require; `forward_ca`: PEM file of the authority that signed
            their certificates, to encrypt the connections; `forward_cert` and `forward_key`: PEM files of the
            certificate that they require of clients, and its private key.
        optimizer: Train the tail for one client at a time, which connects with `train=True`, and answer no other
            requests: a function that makes the optimizer from the parameters of the tail, such as
            `lambda parameters: torch.optim.Adam(parameters, lr=1e-3)`.
        loss: Computes the loss from the output of the model and what clients pass as labels, so that outputs do not
            leave the server: it answers no forwards without their loss.
        checkpoint: The folder where the weights of the tail and the state of the optimizer are saved after every
            `checkpoint_every` steps. A server that is started again continues from there.
        train_memory: The most bytes that are kept for backwards, such as `"8GB"`.

    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> with serve(model, x, listen="127.0.0.1:0") as server:
    ...     len(server.served.cuts)
    43
    """
    if error := explain_endpoint(listen, "an address to listen on such as 127.0.0.1:7070"):
        raise BadQuery(error)
    for name, number in (("concurrency", concurrency), ("batch", batch)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise BadQuery(f"expected a {name} of 1 or more requests, got {number!r}")
    if not isinstance(sessions, int) or sessions < 0:
        raise BadQuery(f"expected a number of sessions of 0 or more, got {sessions!r}")
    if optimizer is None and (loss, checkpoint) != (None, None):
        raise BadQuery("expected optimizer= of a server that trains, got loss= or checkpoint= without it")
    if optimizer is not None and not isinstance(model, nn.Module):
        raise BadQuery(f"expected the whole model of a server that trains, got {describe_value(model)}")
    if optimizer is not None and (concurrency, batch) != (1, 1):
        raise BadQuery("expected no concurrency= and no batch= of a server that trains, which answers one client")
    if not isinstance(checkpoint_every, int) or checkpoint_every < 1:
        raise BadQuery(f"expected checkpoint_every of 1 or more steps, got {checkpoint_every!r}")
    if not isinstance(model, nn.Module | Stage | ExportedStage):
        raise BadQuery(f"expected a model, or one of its stages such as stages[1], got {describe_value(model)}")
    security = ServerSecurity(tls_cert, tls_key, client_ca, token)
    credentials = security.credentials()  # checks the files, before the model is analyzed, which takes longer
    forwards = ForwardOptions.parse(forward, token=forward_token, ca=forward_ca, cert=forward_cert, key=forward_key)
    idle_s = parse_seconds(session_timeout)
    _check_stage_options(model, inputs, batch)
    served: InferenceBackend
    if optimizer is not None:
        options = TrainingOptions(optimizer, loss, checkpoint, checkpoint_every, parse_size(train_memory), idle_s)
        served = _make_training(model, inputs, options)
        concurrency = 1
    elif isinstance(model, ExportedStage):
        served = ExportedBackend(model)
    else:
        served = ServedModel(model, inputs)
    max_bytes = parse_max_message(max_message)
    session_limits = SessionLimits(sessions, parse_size(state_memory), idle_s)
    limits = Limits(max_bytes, concurrency, batch, parse_seconds(batch_window), session_limits)
    return Server(served, listen, security, credentials, limits, forwards).start()


def _check_stage_options(model: object, inputs: object, batch: int) -> None:
    """Raise if a server of one stage is to use inputs of the model, or to batch requests."""
    if not isinstance(model, Stage | ExportedStage):
        return
    if inputs is not None:
        raise BadQuery(f"expected no inputs with a stage, which has its example, got {describe_value(inputs)}")
    if batch > 1:
        raise BadQuery(
            f"expected batch=1 for a stage, got {batch}: batches are verified by running the stages before it, "
            "too. Serve the whole model, or deploy the stages with microtome.scale.ray"
        )


def _make_training(model: Any, inputs: Any, options: TrainingOptions) -> TrainingBackend:
    if not callable(options.optimizer):
        raise BadQuery(
            "expected a function that makes an optimizer from the parameters of the tail, which depend on the cut, got "
            f"{type(options.optimizer).__name__}: such as lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"
        )
    if options.loss is not None and not callable(options.loss):
        raise BadQuery(f"expected loss as a function of the output and labels, got {describe_value(options.loss)}")
    return TrainingBackend(model, inputs, options)

"""A malicious server, whose replies tests choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import torch

from microtome import __version__
from microtome.remote import protocol
from microtome.remote.served_model import ServedModel
from microtome.remote.training.backend import TrainingBackend

#: From a request and the true reply to the bytes that are sent.
Answer = Callable[[Any, Any], bytes]


def truthful(request: Any, reply: Any) -> bytes:
    data: bytes = reply.SerializeToString()
    return data


class Hostile:
    """Serves a model, and lies about it.

    Attributes:
        hello: Changes what it says of itself.
        echo: The bytes that it sends back.
        profile: What it says of its device, as JSON.
        reply: Makes the bytes of a reply.
    """

    def __init__(self, served: ServedModel | TrainingBackend, compression: grpc.Compression | None = None) -> None:
        self._served = served
        self._compression = compression
        self.hello: dict[str, Any] = {}
        self.echo: Callable[[Any], bytes] = lambda request: protocol.EchoReply(
            payload=bytes(request.reply_bytes)
        ).SerializeToString()
        self.profile: Callable[[], str] = served.profile
        self.reply: Answer = truthful

    def _hello(self, request: Any, _: Any) -> bytes:
        served = self._served
        fields = {
            "protocol": protocol.PROTOCOL,
            "microtome": __version__,
            "torch": torch.__version__,
            "model": served.name,
            "fingerprint": served.fingerprint,
            "device": "cpu",
            "codecs": ["raw"],
            "cuts": served.cuts,
            "max_message": 1 << 28,
            "batch": 1,
            "any_stage": served.any_stage,
        }
        data: bytes = protocol.HelloReply(**(fields | self.hello)).SerializeToString()
        return data

    def _echo(self, request: Any, _: Any) -> bytes:
        return self.echo(request)

    def _profile(self, request: Any, _: Any) -> bytes:
        data: bytes = protocol.ProfileReply(json=self.profile()).SerializeToString()
        return data

    def _stream(self, requests: Iterator[Any], context: Any) -> Iterator[bytes]:
        if self._compression is not None:
            context.set_compression(self._compression)
        for request in requests:
            yield self.reply(request, self._answer(request))

    def _answer(self, request: Any) -> Any:
        """The true reply."""
        boundary = self._served.decode(request.boundary, 1 << 30)
        (output,) = self._served.compute([boundary])
        data = self._served.encode(output, boundary.at, request.codec or "raw")
        return protocol.Reply(id=request.id, output=data)

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Its address."""
        server = grpc.server(
            ThreadPoolExecutor(4),
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        )
        unary = {"Hello": self._hello, "Echo": self._echo, "Profile": self._profile}
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(answer, protocol.MESSAGES[f"{name}Request"].FromString)
            for name, answer in unary.items()
        }
        handlers["Stream"] = grpc.stream_stream_rpc_method_handler(self._stream, protocol.Request.FromString)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(protocol.SERVICE, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait()


class HostileTrainer(Hostile):
    """Trains a model, and lies about it."""

    def __init__(self, backend: TrainingBackend) -> None:
        super().__init__(backend)
        self._backend = backend
        self.hello = {"trains": True, "modes": backend.training.modes}

    def _answer(self, request: Any) -> Any:
        output, trained = self._backend.run_action(self, request.train, memoryview(request.boundary), "raw", 1 << 30)
        return protocol.Reply(id=request.id, output=output, train=trained)

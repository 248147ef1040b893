"""`grpc.health.v1.Health`, without authentication; in limits of its own, so that it takes no slots of clients."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from microtome.remote import protocol
from microtome.remote.admission import CallLimiter, OpenCall
from microtome.remote.peers import Peers

#: The most calls of Check, or of Watch before its message has arrived; and of Watch after that.
_MAX_CHECKS, _MAX_WATCHES = 16, 64
#: The services whose health is reported: the server as a whole, and its one service.
_SERVICES = "", protocol.SERVICE
_Reply = health_pb2.HealthCheckResponse


class Health:
    """Report SERVING until the server drains or its device fails."""

    def __init__(self, draining: asyncio.Event, peers: Peers) -> None:
        self._draining = draining
        self.checks = CallLimiter(_MAX_CHECKS, peers)
        self.watches = CallLimiter(_MAX_WATCHES, peers)

    def handlers(self) -> Any:
        methods = {"Check": self._check, "Watch": self._watch}
        return grpc.method_handlers_generic_handler(
            "grpc.health.v1.Health",
            {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()},
        )

    async def _check(self, _: Any, context: Any) -> None:
        async def check(call: OpenCall) -> None:
            if await _read_service(call) not in _SERVICES:
                await context.abort(grpc.StatusCode.NOT_FOUND, "expected the name of a service of this server, or none")
            await call.write(self._status())

        await self.checks.run(context, check, is_stream=False)

    async def _watch(self, _: Any, context: Any) -> None:
        services: list[str] = []

        async def read(call: OpenCall) -> None:
            services.append(await _read_service(call))

        async def watch(call: OpenCall) -> None:
            if services[0] not in _SERVICES:
                await call.write(_Reply(status=_Reply.SERVICE_UNKNOWN).SerializeToString())
                await self._draining.wait()
                return
            if not self._draining.is_set():
                await call.write(self._status())
            await self._draining.wait()
            await call.write(self._status())

        await self.checks.run(context, read, is_stream=False)
        await self.watches.run(context, watch, is_stream=True)

    def _status(self) -> bytes:
        status = _Reply.NOT_SERVING if self._draining.is_set() else _Reply.SERVING
        data: bytes = _Reply(status=status).SerializeToString()
        return data


async def _read_service(call: OpenCall) -> str:
    """Read the request, and return the name of the service that it asks about."""
    data = await call.read()
    try:
        name: str = health_pb2.HealthCheckRequest.FromString(data or b"").service
    except (DecodeError, UnicodeDecodeError, ValueError):
        await call.context.abort(grpc.StatusCode.INVALID_ARGUMENT, "expected a HealthCheckRequest, got other bytes")
        raise
    return name

"""`grpc.health.v1.Health`, which anybody may ask: in bounds of its own, so that who asks takes nothing from clients."""

from __future__ import annotations

import asyncio
from typing import Any

from microtome.remote import protocol
from microtome.remote.call_limiter import CallLimiter, OpenCall
from microtome.remote.optional_packages import DecodeError, grpc, health_pb2
from microtome.remote.peers import Peers

#: The most calls of Check, or of Watch before its message, and of Watch after it.
ASKING, WATCHING = 16, 64
#: The services whose health is known: the server as a whole, and the one service.
_NAMES = "", protocol.SERVICE
_Reply = health_pb2.HealthCheckResponse


class Health:
    """Says SERVING until the server drains or its device fails."""

    def __init__(self, draining: asyncio.Event, peers: Peers) -> None:
        self._draining = draining
        self.asking = CallLimiter(ASKING, peers)
        self.watching = CallLimiter(WATCHING, peers)

    def handlers(self) -> Any:
        made = {"Check": self._check, "Watch": self._watch}
        return grpc.method_handlers_generic_handler(
            "grpc.health.v1.Health",
            {name: grpc.stream_stream_rpc_method_handler(handler) for name, handler in made.items()},
        )

    async def _check(self, _: Any, context: Any) -> None:
        async def check(call: OpenCall) -> None:
            if await _name(call) not in _NAMES:
                await context.abort(grpc.StatusCode.NOT_FOUND, "expected the name of a service that is here, or none")
            await call.write(self._status())

        await self.asking.run(context, check, is_stream=False)

    async def _watch(self, _: Any, context: Any) -> None:
        names: list[str] = []

        async def ask(call: OpenCall) -> None:
            names.append(await _name(call))

        async def watch(call: OpenCall) -> None:
            if names[0] not in _NAMES:
                await call.write(_Reply(status=_Reply.SERVICE_UNKNOWN).SerializeToString())
                await self._draining.wait()
                return
            if not self._draining.is_set():
                await call.write(self._status())
            await self._draining.wait()
            await call.write(self._status())

        await self.asking.run(context, ask, is_stream=False)
        await self.watching.run(context, watch, is_stream=True)

    def _status(self) -> bytes:
        status = _Reply.NOT_SERVING if self._draining.is_set() else _Reply.SERVING
        data: bytes = _Reply(status=status).SerializeToString()
        return data


async def _name(call: OpenCall) -> str:
    """The service that is asked for."""
    data = await call.read()
    try:
        name: str = health_pb2.HealthCheckRequest.FromString(data or b"").service
    except (DecodeError, UnicodeDecodeError, ValueError):
        await call.context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the bytes are no HealthCheckRequest")
        raise
    return name

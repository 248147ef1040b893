"""Refuses calls without the token, before anything of them is read."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from microtome.remote import protocol
from microtome.remote.credentials import Identity
from microtome.remote.metrics import Metrics
from microtome.remote.optional_packages import grpc
from microtome.remote.peers import Peers

log = logging.getLogger("microtome.remote")

#: Seconds before a wrong token is answered, and how many such answers may wait; beyond that connections are closed.
DELAY_S, DELAYED = 0.5, 32


class Authenticator(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets calls with the token through. Health may be asked by anybody."""

    def __init__(self, identity: Identity, metrics: Metrics, peers: Peers) -> None:
        self._identity = identity
        self._metrics = metrics
        self._peers = peers
        self._delayed = 0

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        ours = details.method.startswith(f"/{protocol.SERVICE}/")
        if handler is None or not ours or self._identity.knows(details.invocation_metadata):
            return handler
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, _: Any, context: Any) -> None:
        self._metrics.refused.labels("unauthenticated").inc()
        if self._delayed < DELAYED:
            log.warning("refused", extra={"peer": context.peer(), "reason": "the token is wrong or missing"})
            self._delayed += 1
            try:
                await asyncio.sleep(DELAY_S)
            finally:
                self._delayed -= 1
        else:
            self._peers.disconnect(context.peer())
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is wrong or missing")

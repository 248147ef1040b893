"""Calls that are ended so that others have a place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from microtome.remote.admission import UPLOAD_GRACE_S, CallLimiter, OpenCall, Upload
from microtome.remote.peers import Peers


class Context:
    """What gRPC tells of a call."""

    def __init__(self, peer: str = "ipv4:127.0.0.1:1") -> None:
        self._peer = peer
        self.aborted: tuple[grpc.StatusCode, str] | None = None

    def peer(self) -> str:
        return self._peer

    async def abort(self, status: grpc.StatusCode, why: str) -> None:
        self.aborted = status, why
        raise grpc.aio.AbortError


class Clock:
    """A clock that stands still, and counts how often it was asked."""

    def __init__(self) -> None:
        self.now, self.asked = 100.0, 0

    def __call__(self) -> float:
        self.asked += 1
        return self.now

    async def is_asked(self) -> None:
        """Wait until calls have looked for a place several times."""
        before = self.asked
        async with asyncio.timeout(20):
            while self.asked < before + 6:
                await asyncio.sleep(0.005)


async def sends(call: OpenCall) -> None:
    call.upload = Upload()
    await asyncio.Event().wait()


async def waits_for_room(call: OpenCall) -> None:
    call.is_waiting = True
    await asyncio.Event().wait()


async def is_idle(call: OpenCall) -> None:
    call.has_received = True
    await asyncio.Event().wait()


async def ends(_: OpenCall) -> None:
    pass


def opened(limiter: CallLimiter, body: Callable[[OpenCall], Awaitable[None]]) -> tuple[asyncio.Task[None], Context]:
    context = Context()
    return asyncio.create_task(limiter.run(context, body, is_stream=True)), context


@pytest.mark.parametrize("body", [sends, waits_for_room])
def test_a_call_that_is_sending_is_ended_only_after_another_has_waited(body: Any) -> None:
    async def run() -> None:
        clock = Clock()
        limiter = CallLimiter(1, Peers(), clock=clock)
        first, context = opened(limiter, body)
        await asyncio.sleep(0)
        second, _ = opened(limiter, ends)
        await clock.is_asked()
        clock.now += UPLOAD_GRACE_S  # not yet longer
        await clock.is_asked()
        assert not first.done()
        assert not second.done()
        clock.now += 0.01
        await second
        with pytest.raises(grpc.aio.AbortError):
            await first
        status, why = context.aborted or (None, "")
        assert (status, why) == (grpc.StatusCode.UNAVAILABLE, "all calls are in use: send the request again later")

    asyncio.run(run())


def test_a_call_that_sends_all_of_its_request_while_another_waits_is_not_ended() -> None:
    async def run() -> None:
        clock, complete = Clock(), asyncio.Event()

        async def uploads(call: OpenCall) -> None:
            call.upload = Upload()
            await complete.wait()

        limiter = CallLimiter(1, Peers(), clock=clock)
        first, context = opened(limiter, uploads)
        await asyncio.sleep(0)
        second, _ = opened(limiter, ends)
        await clock.is_asked()
        complete.set()
        await asyncio.gather(first, second)
        assert context.aborted is None

    asyncio.run(run())


def test_an_idle_call_is_ended_at_once_and_before_one_that_is_sending() -> None:
    async def run() -> None:
        limiter = CallLimiter(2, Peers(), clock=Clock())
        sending, _ = opened(limiter, sends)
        idle, context = opened(limiter, is_idle)
        await asyncio.sleep(0)
        third, _ = opened(limiter, ends)
        await third
        with pytest.raises(grpc.aio.AbortError):
            await idle
        assert context.aborted is not None
        assert "the call was idle and others wait" in context.aborted[1]
        assert not sending.done()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    asyncio.run(run())

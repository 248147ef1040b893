"""`Remote`: the requests and sessions of a model that runs partly here and partly on a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Self

import torch

from microtome.addresses import INPUT
from microtome.engine.meta_run import copy_inputs
from microtome.errors import BadQuery, MicrotomeError, RemoteError, Unsupported
from microtome.inputs import Inputs
from microtome.remote import protocol
from microtome.remote.autotune import Autotuner, RouteChange
from microtome.remote.connection import Connection
from microtome.remote.error_kinds import TRANSIENT
from microtome.remote.local_model import LocalModel
from microtome.remote.payloads import INPUTS, ExpectedReply, check_not_autocast, pack_inputs, unpack_output
from microtome.remote.pipeline import run_pipeline
from microtome.remote.remote_session import LocalSession, RemoteSession
from microtome.remote.request import RemoteRequest, RequestOptions, RequestState, Route
from microtome.results.metrics import advise
from microtome.results.plan import Plan
from microtome.results.requests import RequestRecord
from microtome.split.boundary.boundary import Boundary
from microtome.split.session import StageSession, generate
from microtome.units import parse_size, size

#: Seconds for which a request is sent again after a broken stream: without a fallback, and with one.
_RESEND_FOR_S, _RESEND_WITH_FALLBACK_FOR_S = 15.0, 1.0
#: Seconds that a server has for the warm-up request at a cut.
_WARM_UP_S = 60.0
_NO_LIMIT = 1 << 62
#: The number of requests whose records are kept.
_MAX_RECORDS = 10_000


class Remote:
    """A model whose tail a server runs. Call it like the model.

    Attributes:
        requests: The records of the last requests.
        server: The server's reply to `Hello`.
        options: The options of every request.
        has_fallback: Whether this device computes the output if the server does not answer: all weights are here.
    """

    def __init__(
        self,
        local: LocalModel,
        connection: Connection,
        server: Any,
        route: Route | Autotuner,
        options: RequestOptions = RequestOptions(),  # noqa: B008  it is immutable
    ) -> None:
        self._local = local
        self._connection = connection
        self.options = options
        self.has_fallback = options.has_fallback and local.is_whole
        self._tail_s: dict[str, float] = {}  # seconds of the tail on this device, by cut
        self._autotuner: Autotuner | None = None
        if isinstance(route, Autotuner):
            self._autotuner, route = route, route.route
            self._autotuner.warm_up = self.warm_up
        self._route = route  # unused with an autotuner
        self.server = server
        self.requests: deque[RequestRecord] = deque(maxlen=_MAX_RECORDS)

    @property
    def route(self) -> Route:
        """The current cut and codec."""
        return self._route if self._autotuner is None else self._autotuner.route

    @property
    def history(self) -> list[RouteChange]:
        """The changes of the cut, with their reasons; empty with a fixed cut."""
        return [] if self._autotuner is None else list(self._autotuner.history)

    @property
    def plan(self) -> Plan | None:
        """The plan that the first cut comes from; None with a fixed cut."""
        return None if self._autotuner is None else self._autotuner.plan

    @property
    def at(self) -> str | None:
        """The current cut; None: the whole model runs here."""
        return self.route.at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, and return its output."""
        if self._local.spec.states:
            with self.session() as session:
                return session(*args, **kwargs)
        return self._finish(self._send(self._start(Inputs(*args, **kwargs))))

    def stream(self, items: Iterable[Any], window: int = 8) -> Iterator[Any]:
        """Yield the output of the model for each of many inputs, in their order.

        The heads, encodings, transfers and tails of different inputs overlap.

        Args:
            items: Inputs, each a tensor, a tuple, a dict or an `Inputs`. They are read as requests are answered.
            window: The most requests in flight.
        """
        if not isinstance(window, int) or window < 1:
            raise BadQuery(f"expected a window of 1 or more requests in flight, got {window!r}")
        if self._local.spec.states:  # each in a session of its own, one after the other
            return (self(*one.args, **one.kwargs) for one in map(Inputs.of, items))
        return run_pipeline(self._start, self._send, self._finish, self._connection.cancel, iter(items), window)

    def session(self, *, replay_memory: int | str = "256MB") -> StageSession:
        """Begin a sequence of steps; the server keeps the tail's part of the state, such as a KV cache, between them.

        The cut does not move during a session. If the server dies, the steps so far are replayed on it when it is back,
        or on this device.

        Args:
            replay_memory: The most bytes of boundaries that are kept for a replay; a longer session raises when the
                server dies.

        Raises:
            Unsupported: The inputs of the model are sent, not the values at a layer.
        """
        keep_bytes = parse_size(replay_memory)
        route = self.route
        if self._autotuner is not None and route.at == INPUTS:
            route = self._autotuner.best_layer_route()
        if route.at is None:
            return LocalSession(self._local.model)
        if route.at == INPUTS:
            advice = advise("at=", "--at")
            raise Unsupported(f"expected a cut at a layer for a session, got {INPUT!r}: pass one with {advice}")
        options = replace(self.options, has_fallback=self.has_fallback)
        return self._new_session(route, keep_bytes, options, self.requests)

    def _new_session(
        self, route: Route, keep_bytes: int, options: RequestOptions, records: deque[RequestRecord]
    ) -> RemoteSession:
        assert route.at is not None
        if not self.server.sessions:
            raise RemoteError(
                f"{self._connection.address} keeps no sessions: start it with --sessions, or a newer microtome",
                "REFUSED",
            )
        return RemoteSession(self, self._local.variants_at(route.at), route, keep_bytes, options, records)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens by the loop of transformers; the arguments are those of the model's own `generate`."""
        with self.session() as session:
            return generate(self._local.model, session, args, kwargs)

    def warm_up(self, route: Route) -> None:
        """Send the example along a route, so that both sides have built their stages before the first request.

        With a deadline and a fallback, it also measures the tail on this device, which must begin that much earlier.
        """
        splitter = self._local.splitter
        if route.at is None or splitter is None:
            return
        if self._local.spec.states and route.at == INPUTS:
            return  # sessions do not send inputs
        if self._local.spec.states:
            options = RequestOptions(_WARM_UP_S, max_reply_bytes=self.options.max_reply_bytes)
            with self._new_session(route, _NO_LIMIT, options, deque()) as session:
                example = copy_inputs(splitter.example, splitter.model)
                session(*example.args, **example.kwargs)
            return
        request = RemoteRequest(copy_inputs(splitter.example, splitter.model), route)  # the model may write into them
        self._send(self._run_head(request))
        if request.state is RequestState.SENT:
            try:
                request.reply.result(_WARM_UP_S)
            except FutureTimeout:
                self._connection.cancel(request)
        if self.has_fallback and self.options.deadline_s is not None:
            for _ in range(2):  # the first run takes longer
                self._fall_back(request)

    # -- the steps of a request ----------------------------------------------------------------------------------------

    def _start(self, inputs: Inputs) -> RemoteRequest:
        return self._run_head(RemoteRequest(inputs, self.route, self.options.deadline_s))

    def _run_head(self, request: RemoteRequest) -> RemoteRequest:
        inputs, at = request.inputs, request.route.at
        if at is not None:
            check_not_autocast()
        with request.timed("head_s"):
            if at == INPUTS:
                request.boundary = pack_inputs(inputs, self._local.spec.inputs, self._local.fingerprint)
            elif at is not None:
                head, _ = self._local.stages_at(at)
                with torch.no_grad():
                    request.boundary = head(*inputs.args, **inputs.kwargs)
        request.state = RequestState.HEAD_DONE
        return request

    def _send(self, request: RemoteRequest) -> RemoteRequest:
        """Encode and send the boundary, if there is one and the server is not known to be down."""
        if request.boundary is None:
            return request
        if self.has_fallback and self._connection.down_reason is not None:
            request.reason = self._connection.down_reason
            return request
        with request.timed("encode_s"):
            self._set_retry_until(request)
            example = self._local.spec.example
            request.expected = ExpectedReply(example, request.inputs, self.options.max_reply_bytes)
            request.encode(request.boundary)
        self._submit(request, max(request.nbytes, request.boundary.nbytes))  # encoded, and decoded
        return request

    def _submit(self, request: RemoteRequest, nbytes: int) -> None:
        if nbytes > self.server.max_message:
            raise RemoteError(
                f"{size(nbytes)} cross at {request.route.at or INPUT!r}, and {self._connection.address} accepts "
                f"{size(self.server.max_message)}: raise --max-message there, or cut elsewhere",
                "TOO_LARGE",
            )
        request.mark_sent(is_alone=self._connection.is_idle())
        self._connection.submit(request)

    def exchange(self, request: RemoteRequest) -> Any:
        """Send an encoded step of a session, and return the reply.

        Raises:
            RemoteError: There is none.
        """
        if self.has_fallback and self._connection.down_reason is not None:
            raise RemoteError(self._connection.down_reason, "UNREACHABLE")
        self._set_retry_until(request)
        self._submit(request, request.nbytes)
        timeout = None if request.deadline is None else max(request.deadline - monotonic(), 0.0)
        try:
            reply = request.reply.result(timeout)
        except FutureTimeout as error:
            raise self._late_error(request) from error
        request.mark_replied(reply)
        return reply

    def end_session(self, session: str) -> None:
        """Tell the server that a session has ended, without waiting for a reply."""
        request = RemoteRequest(Inputs(), self.route)
        request.encode_step(protocol.Step(session=session, ends=True), memoryview(b""))
        request.retry_until = 0.0  # if the stream breaks, the session ends with it
        with suppress(RemoteError):  # the connection is closed, and with it the session
            self._connection.submit(request)

    def _set_retry_until(self, request: RemoteRequest) -> None:
        if request.deadline is not None and not self.has_fallback:
            request.retry_until = request.deadline
        else:
            resend_for_s = _RESEND_WITH_FALLBACK_FOR_S if self.has_fallback else _RESEND_FOR_S
            request.retry_until = monotonic() + resend_for_s

    def _late_error(self, request: RemoteRequest) -> RemoteError:
        """Cancel a request that is not answered in time."""
        self._connection.cancel(request)
        request.reason = f"{self._connection.address} did not answer in {request.deadline_s:g} s"
        return RemoteError(request.reason, "DEADLINE")

    def _finish(self, request: RemoteRequest) -> Any:
        """Return the output, from the reply or computed here, and record the request."""
        try:
            output = self._output(request)
        except MicrotomeError as error:
            request.mark_failed(str(error))
            raise
        finally:
            record = request.record()
            self.requests.append(record)
        if self._autotuner is not None:  # not for a request that failed: its times mean nothing
            self._autotuner.observe(record)
        return output

    def _output(self, request: RemoteRequest) -> Any:
        reply = self._wait(request) if request.state is RequestState.SENT else None
        if reply is None:
            return self._fall_back(request)
        with request.timed("decode_s"):
            assert request.expected is not None
            boundary = Boundary.from_bytes(reply.output, limit=request.expected.decoding_bytes)
            return unpack_output(boundary, self._local.spec.output, self._local.device, request.expected)

    def _wait(self, request: RemoteRequest) -> Any:
        """Return the reply; None: fall back to this device."""
        timeout = None
        if request.deadline is not None:
            timeout = max(request.deadline - monotonic() - self._fallback_s(request.route.at), 0.0)
        try:
            reply = request.reply.result(timeout)
        except FutureTimeout as error:
            late = self._late_error(request)
            if not self.has_fallback:
                raise late from error
            return None
        except RemoteError as error:
            self._connection.cancel(request)
            if error.kind not in TRANSIENT or not self.has_fallback:
                raise
            request.reason = str(error)
            return None
        request.mark_replied(reply)
        return reply

    def _fallback_s(self, at: str | None) -> float:
        """Seconds that this device needs to compute the rest; 0 if it cannot, or has never done so."""
        if not self.has_fallback or at is None:
            return 0.0
        if at in self._tail_s or self._autotuner is None:
            return self._tail_s.get(at, 0.0)
        return self._autotuner.local_tail_s(at)

    def _fall_back(self, request: RemoteRequest) -> Any:
        """Compute the output here: the tail, or the whole model if the inputs were to be sent."""
        request.state = RequestState.LOCAL
        at = request.route.at or INPUTS
        run = partial(request.inputs.run, self._local.model)
        if at != INPUTS:
            _, tail = self._local.stages_at(at)
            assert tail is not None
            run = partial(tail, request.boundary)
        with request.timed("tail_s"), torch.no_grad():
            output = run()
        self._tail_s[at] = request.timing["tail_s"]
        return output

    def close(self) -> None:
        self._connection.close()
        if self._autotuner is not None:
            self._autotuner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "all here" if self.at is None else f"cut at {self.at or INPUT!r}"
        return f"<Remote {type(self._local.model).__name__} at {self._connection.address}, {where}>"

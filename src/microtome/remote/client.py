"""`Remote`: the requests and sessions of a model that runs partly here and partly on servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from itertools import accumulate
from time import monotonic
from typing import Any, Self

import torch

from microtome.addresses import INPUT
from microtome.engine.meta_run import copy_inputs
from microtome.errors import BadQuery, MicrotomeError, RemoteError, Unsupported
from microtome.inputs import Inputs
from microtome.remote.autotune import Autotuner, RouteChange
from microtome.remote.chain import Chain, too_large
from microtome.remote.connection import Connection
from microtome.remote.error_kinds import TRANSIENT
from microtome.remote.local_model import LocalModel
from microtome.remote.message import Message
from microtome.remote.payloads import INPUTS, ExpectedReply, check_not_autocast, pack_inputs, unpack_output
from microtome.remote.pipeline import run_pipeline
from microtome.remote.remote_session import LocalSession, RemoteSession
from microtome.remote.request import RemoteRequest, RequestOptions, RequestState, Route
from microtome.results.metrics import advise
from microtome.results.plan import Plan
from microtome.results.requests import RequestLog, RequestRecord, cut_moves
from microtome.split.boundary.boundary import Boundary
from microtome.split.session import StageSession, generate
from microtome.split.stage import Stage
from microtome.units import parse_size

#: Seconds for which a request is sent again after a broken stream: without a fallback, and with one.
_RESEND_FOR_S, _RESEND_WITH_FALLBACK_FOR_S = 15.0, 1.0
#: Seconds that a server has for the warm-up request at a cut.
_WARM_UP_S = 60.0
_NO_LIMIT = 1 << 62
#: The number of requests whose records are kept.
_MAX_RECORDS = 10_000


class Remote:
    """A model whose tail a server runs, or several servers one after the other. Call it like the model.

    Attributes:
        requests: The records of the last requests.
        options: The options of every request.
        has_fallback: Whether this device computes the output if a server does not answer: all weights are here.
    """

    def __init__(
        self,
        local: LocalModel,
        chain: Chain,
        route: Route | Autotuner,
        options: RequestOptions = RequestOptions(),  # noqa: B008  it is immutable
    ) -> None:
        self._local = local
        self._chain = chain
        self.options = options
        self.has_fallback = options.has_fallback and local.is_whole
        self._tail_s: dict[str, float] = {}  # seconds of the tail on this device, by cut
        self._autotuner: Autotuner | None = None
        if isinstance(route, Autotuner):
            self._autotuner, route = route, route.route
            self._autotuner.warm_up = self.warm_up
        self._route = route  # unused with an autotuner
        self.requests: deque[RequestRecord] = deque(maxlen=_MAX_RECORDS)
        self._closed = False

    @property
    def servers(self) -> list[Any]:
        """The replies to `Hello` of all servers, without those that could not be reached yet."""
        return [connection.hello for pool in self._chain.pools for connection in pool.ready]

    @property
    def server(self) -> Any:
        """The first server's reply to `Hello`."""
        return self.servers[0]

    @property
    def down_reasons(self) -> list[str]:
        """Why servers are not used, each with its address."""
        reasons = (connection.down_reason for pool in self._chain.pools for connection in pool.connections)
        return [reason for reason in reasons if reason is not None]

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

    def log(self) -> RequestLog:
        """Return the records of the last requests as one result: a table, and files such as CSV."""
        requests = tuple(self.requests)
        began = min((sent.began for sent in requests), default=0.0)
        return RequestLog(
            model=self.server.model if self.servers else type(self._local.model).__name__,
            server=self._chain.address,
            device=self.server.device if self.servers else "",
            window=_most_in_flight(requests),
            wall_s=max((sent.began + sent.total_s for sent in requests), default=began) - began,
            samples=None,
            requests=requests,
            moves=cut_moves(self.history),
        )

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
        return run_pipeline(self._start, self._send, self._finish, self._chain.cancel, iter(items), window)

    def session(self, *, replay_memory: int | str = "256MB") -> StageSession:
        """Begin a sequence of steps; the server keeps the tail's part of the state, such as a KV cache, between them.

        The cut does not move during a session. If the server dies, the steps so far are replayed on it when it is back,
        or on this device.

        Args:
            replay_memory: The most bytes of boundaries that are kept for a replay; a longer session raises when the
                server dies.

        Raises:
            Unsupported: The inputs of the model are sent, not the values at a layer; or there is more than one cut.
        """
        self.check_open()
        keep_bytes = parse_size(replay_memory)
        route = self.route
        if self._autotuner is not None and route.at == INPUTS:
            route = self._autotuner.best_layer_route()
        if route.at is None:
            return LocalSession(self._local)
        if route.at == INPUTS:
            advice = advise("at=", "--at")
            raise Unsupported(f"expected a cut at a layer for a session, got {INPUT!r}: pass one with {advice}")
        options = replace(self.options, has_fallback=self.has_fallback)
        return self._new_session(route, keep_bytes, options, self.requests)

    def _new_session(
        self, route: Route, keep_bytes: int, options: RequestOptions, records: deque[RequestRecord]
    ) -> RemoteSession:
        assert route.at is not None
        if route.later:
            raise Unsupported(
                f"expected one cut for a session, got {len(route.later) + 1}: connect to one server, which keeps the "
                "state of the tail"
            )
        if not all(server.sessions for server in self.servers):
            raise RemoteError(
                f"{self._chain.address} keeps no sessions: start it with --sessions, or a newer microtome; replicas on "
                "Ray keep none",
                "REFUSED",
            )
        (pool,) = self._chain.pools
        return RemoteSession(self, pool, self._local.variants_at(route.at), route, keep_bytes, options, records)

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
                self._chain.cancel(request)
        if self.has_fallback and self.options.deadline_s is not None:
            for _ in range(2):  # the first run takes longer
                request.payload, request.stage = None, route.first_stage  # all stages that servers run
                self._fall_back(request)

    # -- the steps of a request ----------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise if the client was closed: it answers nothing then, also where this device could compute the output."""
        if self._closed:
            raise RemoteError(f"the connection to {self._chain.address} was closed", "UNREACHABLE")

    def _start(self, inputs: Inputs) -> RemoteRequest:
        self.check_open()
        return self._run_head(RemoteRequest(inputs, self.route, self.options.deadline_s))

    def _run_head(self, request: RemoteRequest) -> RemoteRequest:
        inputs, at = request.inputs, request.route.at
        self._local.check_modes()
        if at is not None:
            check_not_autocast()
        with request.timed("head_s"):
            if at == INPUTS:
                request.boundary = pack_inputs(inputs, self._local.spec.inputs, self._local.fingerprint)
            elif at is not None:
                head = self._local.stages_at(request.route.cuts)[0]
                assert head is not None
                with torch.no_grad():
                    request.boundary = head(*inputs.args, **inputs.kwargs)
        request.state = RequestState.HEAD_DONE
        return request

    def _send(self, request: RemoteRequest) -> RemoteRequest:
        """Encode and send the boundary, if there is one and the servers are not known to be down."""
        if request.boundary is None:
            return request
        if self.has_fallback and self._chain.down_reason is not None:
            request.reason = self._chain.down_reason
            return request
        expected = ExpectedReply(self._local.spec.example, request.inputs, self.options.max_reply_bytes)
        request.expected = expected
        ends = request.route.later[-len(self._chain.pools) :] if request.route.later else ()
        bounds = [expected.bound(self._local.boundary_bytes(at)) for at in ends]
        if not self._chain.ends_here(request.route):
            bounds.append(expected.reply_bytes)
        self._chain.submit(request, self._retry_until(request), bounds)
        return request

    def exchange(self, request: RemoteRequest, message: Message, connection: Connection) -> Any:
        """Send an encoded step of a session, and return the reply.

        Raises:
            RemoteError: There is none.
        """
        if self.has_fallback and connection.down_reason is not None:
            raise RemoteError(connection.down_reason, "UNREACHABLE")
        message.retry_until = self._retry_until(request)
        if message.nbytes > connection.hello.max_message:
            raise too_large(message.nbytes, request.route.at, connection.address, connection.hello.max_message)
        request.message, message.connection = message, connection
        request.mark_sent(is_alone=connection.is_idle())
        connection.submit(message)
        timeout = None if request.deadline is None else max(request.deadline - monotonic(), 0.0)
        try:
            reply = message.reply.result(timeout)
        except FutureTimeout as error:
            raise self._late_error(request) from error
        request.add_reply(message, reply)
        request.mark_replied()
        return reply

    def _retry_until(self, request: RemoteRequest) -> float:
        if request.deadline is not None and not self.has_fallback:
            return request.deadline
        return monotonic() + (_RESEND_WITH_FALLBACK_FOR_S if self.has_fallback else _RESEND_FOR_S)

    def _late_error(self, request: RemoteRequest) -> RemoteError:
        """Cancel a request that is not answered in time."""
        self._chain.cancel(request)
        request.reason = f"{self._chain.address} did not answer in {request.deadline_s:g} s"
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
        assert request.expected is not None
        if self._chain.ends_here(request.route):
            return self._run_last(request, reply.output)
        with request.timed("decode_s"):
            boundary = Boundary.from_bytes(reply.output, limit=request.expected.decoding_bytes)
            return unpack_output(boundary, self._local.spec.output, self._local.device, request.expected)

    def _run_last(self, request: RemoteRequest, payload: bytes) -> Any:
        """Run the last stage on what crosses the last cut."""
        boundary = self._decode(request, request.route.cuts[-1], payload)
        last = self._local.stages_at(request.route.cuts)[-1]
        assert last is not None
        with request.timed("last_s"), torch.no_grad():
            return last.run((boundary,), {}, release=True)

    def _decode(self, request: RemoteRequest, at: str, payload: bytes) -> Boundary:
        """Decode what crosses a cut, from a server."""
        assert request.expected is not None
        with request.timed("decode_s"):
            limit = request.expected.bound_decoding(self._local.boundary_bytes(at))
            return Boundary.from_bytes(payload, limit=limit)

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
            self._chain.cancel(request)
            if error.kind not in TRANSIENT or not self.has_fallback:
                raise
            request.reason = str(error)
            return None
        request.mark_replied()
        return reply

    def _fallback_s(self, at: str | None) -> float:
        """Seconds that this device needs to compute the rest; 0 if it cannot, or has never done so."""
        if not self.has_fallback or at is None:
            return 0.0
        if at in self._tail_s or self._autotuner is None:
            return self._tail_s.get(at, 0.0)
        return self._autotuner.local_tail_s(at)

    def _fall_back(self, request: RemoteRequest) -> Any:
        """Compute the output here: the stages that are left, or the whole model if the inputs were to be sent."""
        request.state = RequestState.LOCAL
        value: Any = request.boundary
        stages: Sequence[Stage | None] = ()
        if request.stage > 0:
            stages = self._local.stages_at(request.route.cuts)[request.stage :]
        if request.payload is not None:
            value = self._decode(request, request.route.cuts[request.stage - 1], request.payload)
        with request.timed("tail_s"), torch.no_grad():
            if not stages:
                value = request.inputs.run(self._local.model)
            for stage in stages:
                assert stage is not None
                value = stage(value)
        if request.payload is None:
            self._tail_s[request.route.at or INPUTS] = request.timing["tail_s"]
        return value

    def close(self) -> None:
        self._closed = True
        self._chain.close()
        if self._autotuner is not None:
            self._autotuner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        cuts = (self.at or INPUT, *self.route.later)
        where = "all here" if self.at is None else f"cut at {', '.join(map(repr, cuts))}"
        return f"<Remote {type(self._local.model).__name__} at {self._chain.address}, {where}>"


def _most_in_flight(requests: Sequence[RequestRecord]) -> int:
    """Return how many requests were in flight at once, at most."""
    changes = [(sent.began, 1) for sent in requests] + [(sent.began + sent.total_s, -1) for sent in requests]
    return max(accumulate(change for _, change in sorted(changes)), default=0)

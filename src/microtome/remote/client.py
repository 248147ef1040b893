"""`connect`: a model that runs partly here and partly on a server."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import TimeoutError as NotYet
from time import monotonic, perf_counter
from typing import Any, Self

import torch
from torch import nn

from microtome.engine.meta_run import copy_inputs
from microtome.errors import BadQuery, MicrotomeError, RemoteError
from microtome.inputs import Inputs
from microtome.remote import protocol
from microtome.remote.autotune import LOSSLESS, Autotuner, Route, RouteChange, best_codec, tuned
from microtome.remote.connection import Connection, Pending, Security
from microtome.remote.error_kinds import PASSING
from microtome.remote.local_model import LocalModel, shake_hands
from microtome.remote.payloads import INPUTS, of_inputs, to_output
from microtome.remote.pipeline import RequestSteps, streamed
from microtome.remote.replies import Expected
from microtome.remote.request import RequestJob
from microtome.results.plan import Plan
from microtome.results.requests import RequestRecord
from microtome.split.boundary import Boundary
from microtome.split.codecs import parse_codec
from microtome.split.stage import Stage
from microtome.units import parse_size, size

#: Seconds that a request is sent again for when the stream breaks: if it must be answered there, and if it need not.
_PATIENCE_S = 15.0, 1.0
#: Seconds that a server has for the first request at a cut.
_REHEARSAL_S = 60.0
#: How many requests are remembered.
_REMEMBERED = 10_000


class Remote:
    """A model of which a server runs the rest. Call it as the model is called.

    Attributes:
        requests: A record of each of the last requests.
        server: The server's reply to `Hello`.
    """

    def __init__(
        self,
        parts: LocalModel,
        connection: Connection,
        server: Any,
        way: Route | Autotuner,
        deadline: float | None,
        fallback: str | None,
        max_reply: int | None = None,
    ) -> None:
        self._parts = parts
        self._max_reply = max_reply
        self._connection = connection
        self._deadline = deadline
        self._fallback = fallback == "local" and parts.is_whole
        self._tail_s: dict[str, float] = {}
        self._way = way
        if isinstance(way, Autotuner):
            way.rehearse = self.rehearse
        self.server = server
        self.requests: deque[RequestRecord] = deque(maxlen=_REMEMBERED)

    @property
    def way(self) -> Route:
        """The current cut and codec."""
        return self._way if isinstance(self._way, Route) else self._way.way

    @property
    def history(self) -> list[RouteChange]:
        """The moves of the cut with their reasons; empty with a fixed cut."""
        return [] if isinstance(self._way, Route) else list(self._way.history)

    @property
    def plan(self) -> Plan | None:
        """The plan that the first cut comes from; None if it was not to be found."""
        return None if isinstance(self._way, Route) else self._way.plan

    @property
    def at(self) -> str | None:
        """The current cut; None: all runs here."""
        return self.way.at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, and return its output."""
        job = self._prepare(Inputs(*args, **kwargs), self.way)
        self._encode(job)
        return self._finish(job)

    def stream(self, items: Iterable[Any], window: int = 8) -> Iterator[Any]:
        """Yield the output of the model for each of many inputs, in their order.

        Head, encoding, sending and tail of different inputs run at once.

        Args:
            items: Each as inputs are given: a tensor, a tuple, a dict or an `Inputs`. They are taken as there is room.
            window: How many are on their way at most.
        """
        if not isinstance(window, int) or window < 1:
            raise BadQuery(f"window is how many requests are on their way at most, got {window!r}")
        calls = RequestSteps(lambda given: self._prepare(given, self.way), self._encode, self._finish, self._drop)
        return streamed(calls, iter(items), window)

    # -- the parts of a request ----------------------------------------------------------------------------------------

    def _prepare(self, given: Inputs, way: Route) -> RequestJob:
        """Run the head."""
        sent = RequestRecord(way.at, way.codec)
        ends = None if self._deadline is None else monotonic() + self._deadline
        job = RequestJob(given, sent, ends)
        if way.at is None:
            sent.where = "edge"
        elif way.at == INPUTS:
            job.boundary = of_inputs(given, self._parts.spec.inputs, self._parts.fingerprint)
        else:
            head, _ = self._parts.at(way.at)
            with torch.no_grad():
                job.boundary = head(*given.args, **given.kwargs)
        sent.head_s = perf_counter() - sent.began
        return job

    def _encode(self, job: RequestJob) -> RequestJob:
        """Make bytes of what crosses, and send them off."""
        if job.boundary is None:
            return job
        if self._fallback and self._connection.down is not None:
            job.sent.reason = self._connection.down
            return job
        start = perf_counter()
        head = protocol.Request(id=uuid.uuid4().hex, codec=job.sent.codec)
        patience_s = _PATIENCE_S[self._fallback]
        if job.ends is not None and not self._fallback:
            patience_s = job.ends - monotonic()
        job.expected = Expected(self._parts.spec.example, job.given, self._max_reply)
        pending = Pending(head, job.boundary, job.sent.codec, job.ends, patience_s, job.expected.reply_bytes)
        if (nbytes := max(pending.nbytes, job.boundary.nbytes)) > self.server.max_message:  # as sent, or as unpacked
            raise RemoteError(
                f"{size(nbytes)} cross at {job.sent.at!r}, and {self._connection.address} takes "
                f"{size(self.server.max_message)}: raise --max-message there, or cut elsewhere",
                "TOO_LARGE",
            )
        job.sent.encode_s = perf_counter() - start
        job.sent.sent_bytes = pending.nbytes
        job.pending = pending
        job.sent.alone = self._connection.is_idle()
        job.began = perf_counter()
        self._connection.submit(job.pending)
        return job

    def _finish(self, job: RequestJob) -> Any:
        """Take the reply; or finish here, where that is due."""
        sent = job.sent
        try:
            output = self._output(job)
        except MicrotomeError as error:
            sent.where, sent.reason = "nowhere", str(error)
            raise
        finally:
            sent.total_s = perf_counter() - sent.began
            self.requests.append(sent)
        if isinstance(self._way, Autotuner):  # one that failed does not tell how long it takes
            self._way.saw(sent)
        return output

    def _output(self, job: RequestJob) -> Any:
        if job.sent.at is None:
            return self._run_here(job, job.given)
        reply = None if job.pending is None else self._wait(job)
        if reply is None:
            return self._fall_back(job)
        start = perf_counter()
        assert job.expected is not None
        boundary = Boundary.from_bytes(reply.output, limit=job.expected.reading_bytes)
        output = to_output(boundary, self._parts.spec.output, self._parts.device, job.expected)
        job.sent.decode_s = perf_counter() - start
        return output

    def _wait(self, job: RequestJob) -> Any:
        """The reply; None: the edge is to finish."""
        assert job.pending is not None
        sent, left = job.sent, None
        if job.ends is not None:
            left = max(job.ends - monotonic() - self._reserve(sent.at), 0.0)
        try:
            reply = job.pending.reply.result(left)
        except (NotYet, RemoteError) as error:
            self._connection.give_up(job.pending)
            sent.attempts = job.pending.attempts
            if isinstance(error, RemoteError):
                if error.kind not in PASSING or not self._fallback:
                    raise
                sent.reason = str(error)
                return None
            sent.reason = f"{self._connection.address} did not answer in {self._deadline:g} s"
            if not self._fallback:
                raise RemoteError(sent.reason, "DEADLINE") from error
            return None
        sent.attempts = job.pending.attempts
        took, timing = job.pending.answered - job.began, reply.timing
        told = (timing.decode_s, timing.queue_s, timing.run_s, timing.encode_s)
        phases = [phase if 0 <= phase <= took else 0.0 for phase in told]  # or it is no time of this request
        sent.server_decode_s, sent.queue_s, sent.tail_s, sent.server_encode_s = phases
        sent.wire_s = max(took - sum(phases), 0.0)
        sent.received_bytes = len(reply.output)
        return reply

    def _reserve(self, at: str | None) -> float:
        """Seconds that the edge needs to finish by itself; 0 if it cannot, or has never done so."""
        if not self._fallback or at is None:
            return 0.0
        known = self._tail_s.get(at)
        return known if known is not None else self._way.rest_s(at) if isinstance(self._way, Autotuner) else 0.0

    def rehearse(self, way: Route) -> None:
        """Have both sides ready for requests of this way, by one of the example: what is made once takes its time.

        With a deadline, the edge learns how long before it it must begin to finish by itself.
        """
        splitter = self._parts.splitter
        if way.at is None or splitter is None:
            return
        job = self._prepare(copy_inputs(splitter.example, splitter.model), way)  # the model may write into it
        job.ends = None
        self._encode(job)
        if job.pending is not None:
            try:
                job.pending.reply.result(_REHEARSAL_S)
            except NotYet:
                self._connection.give_up(job.pending)
        if self._fallback and self._deadline is not None:
            for _ in range(2):  # the first time takes longer
                self._fall_back(job)

    def _fall_back(self, job: RequestJob) -> Any:
        """Finish here."""
        sent = job.sent
        sent.where = "edge"
        if sent.at == INPUTS or job.boundary is None:
            return self._run_here(job, job.given)
        assert sent.at is not None
        _, tail = self._parts.at(sent.at)
        assert tail is not None
        start = perf_counter()
        with torch.no_grad():
            output = tail(job.boundary)
        sent.tail_s = self._tail_s[sent.at] = perf_counter() - start
        return output

    def _run_here(self, job: RequestJob, given: Inputs) -> Any:
        start = perf_counter()
        with torch.no_grad():
            output = given.run(self._parts.model)
        job.sent.tail_s = self._tail_s[INPUTS] = perf_counter() - start
        return output

    def _drop(self, job: RequestJob) -> None:
        if job.pending is not None:
            self._connection.give_up(job.pending)

    def close(self) -> None:
        self._connection.close()
        if isinstance(self._way, Autotuner):
            self._way.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "all here" if self.at is None else f"cut at {self.at!r}" if self.at else "all there"
        return f"<Remote {type(self._parts.model).__name__} at {self._connection.address}, {where}>"


def connect(
    model: nn.Module | Stage,
    inputs: Any,
    server: str,
    at: Any = "auto",
    *,
    deadline: float | None = None,
    codec: str = "auto",
    fallback: str | None = "local",
    tls: bool = False,
    ca: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    token: str | None = None,
    server_name: str | None = None,
    any_torch: bool = False,
    max_reply: int | str | None = None,
    timeout: float = 10.0,
) -> Remote:
    """Run a model partly here and partly on a server.

    Args:
        model: The model that the server has, in eval; or its first stage, as `mt.load_stage` gives it.
        inputs: An example of its inputs, of the structure that later ones have.
        server: Its address, such as `"host:7070"`.
        at: Where it is cut: an address, a cut or a plan; `""`: the inputs are sent, and all runs there. `"auto"`: both
            devices and the link are measured, it is cut where a request is answered soonest, and elsewhere when that
            changes; `history` tells.
        deadline: Seconds that a request may take. When the server cannot make it, the edge finishes by itself.
        codec: How what crosses is encoded; `"auto"`: the quickest of those that lose nothing.
        fallback: `"local"`: the edge finishes by itself when the server cannot, if its weights are here. None: it
            raises.
        tls: Whether the connection is encrypted, with `ca`, `cert` and `key` as files.
        token: The secret that the server asks for.
        server_name: The name in the server's certificate, if it is not that of the address.
        any_torch: Go on though the other side has another version of torch, whose results may differ in the last bits.
        max_reply: The most bytes of a reply, such as `"256MB"`, if the size of an output depends on values. None: twice
            what the example and the inputs explain, and 32 MiB at least.
        timeout: Seconds to wait for the server at first.

    >>> import microtome as mt
    >>> from microtome import zoo
    >>> model, x = zoo.build("tiny-resnet")
    >>> with mt.serve(model, x, listen="127.0.0.1:0") as server:
    ...     with connect(model, x, server.address, at="layer1") as remote:
    ...         remote(x).equal(model(x)), remote.requests[-1].where
    (True, 'cloud')
    """
    if fallback not in ("local", None):
        raise BadQuery(f"fallback is 'local' or None, got {fallback!r}")
    if deadline is not None and not deadline > 0:
        raise BadQuery(f"a deadline is a number of seconds, got {deadline!r}")
    parts = LocalModel(model, inputs)
    connection = Connection(server, Security(tls, ca, cert, key, token, server_name))
    try:
        told = shake_hands(connection, parts, timeout, any_torch=any_torch)
        way = _way(parts, connection, told, at, codec)
        most = None if max_reply is None else parse_size(max_reply)
        remote = Remote(parts, connection, told, way, deadline, fallback, most)
        remote.rehearse(remote.way)
        return remote
    except BaseException:
        connection.close()
        raise


def _way(parts: LocalModel, connection: Connection, told: Any, at: Any, codec: str) -> Route | Autotuner:
    if codec != "auto":
        parse_codec(codec)
        codecs: tuple[str, ...] = (codec,)
    else:
        codecs = tuple(name for name in LOSSLESS if name in told.codecs) or ("raw",)
    is_auto = isinstance(at, str) and at == "auto"
    if is_auto and parts.splitter is not None and parts.is_whole:
        return tuned(parts.splitter, connection, codecs, told.cuts)
    address = parts.address(at)
    if address not in told.cuts:
        raise RemoteError(
            f"{connection.address} does not serve the cut at {address!r}; it has {_few(told.cuts)}", "NO_CUT"
        )
    if len(codecs) == 1 or parts.splitter is None or not parts.is_whole:
        return Route(address, codecs[0])
    return Route(address, best_codec(parts.splitter, address, connection, codecs))


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(map(repr, listed[:5])) + (f" and {len(listed) - 5} others" if len(listed) > 5 else "")

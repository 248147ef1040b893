"""Sessions over a server: the head of each step runs here, and the server keeps the state of the tail."""

from __future__ import annotations

import logging
import random
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from microtome.engine.pytree import as_state
from microtome.errors import MicrotomeError, RemoteError
from microtome.inputs import Inputs
from microtome.remote import protocol
from microtome.remote.error_kinds import TRANSIENT
from microtome.remote.payloads import ExpectedReply, check_not_autocast, unpack_output
from microtome.remote.repeated_inputs import SentInputs
from microtome.remote.request import RemoteRequest, RequestOptions, RequestState, Route
from microtome.remote.server_pool import ServerPool
from microtome.remote.step_codec import (
    DeltaCodec,
    encode_edits,
    encode_split,
    encode_states,
    parse_all_changes,
    split_header,
)
from microtome.remote.tail_session import StepResult, TailSession
from microtome.results.requests import RequestRecord
from microtome.split.boundary.boundary import Boundary
from microtome.split.session import StageSession
from microtome.split.stage import Stage
from microtome.split.state.stage_state import Changes, Edits, StageState
from microtome.split.state.steps import StepSequence, replace_states
from microtome.split.variants import StageVariants, Variant
from microtome.units import size

if TYPE_CHECKING:
    from microtome.remote.client import Remote
    from microtome.remote.local_model import LocalModel

log = logging.getLogger("microtome.remote")

#: How often a session begins again on the server within one step, and seconds before the first time.
_MAX_REPLAYS, _MIN_BACKOFF_S = 8, 0.02


class LoggedStep(NamedTuple):
    """A step as it was sent, kept to be replayed.

    Attributes:
        split: The encoded description of the split.
        state: The encoded state objects of the first step, or the edits before another one.
        boundary: The encoded boundary.
        expected: Bounds and checks of the reply.
    """

    variant: Variant
    split: bytes
    state: bytes
    boundary: bytes
    expected: ExpectedReply


class RemoteSession(StageSession):
    """One sequence of steps whose tail a server runs. Call it as the model, with the state of the last step.

    If the server ends the session, or dies, the steps so far are replayed: there when it is back, or on this device.

    Attributes:
        where: Where the last step was computed: "cloud" or "edge".
        replays: How often the steps so far were computed again.
    """

    def __init__(
        self,
        remote: Remote,
        pool: ServerPool,
        variants: StageVariants,
        route: Route,
        keep_bytes: int,
        options: RequestOptions,
        records: deque[RequestRecord],
    ) -> None:
        """Begin with the first step.

        Args:
            pool: The servers, of which one keeps the state.
            keep_bytes: The most bytes of steps that are kept for a replay.
            records: The records of its requests are appended here.
        """
        super().__init__(variants)
        self._sequence = self._steps = _RemoteSequence(remote, pool, route, keep_bytes, options, records)

    @property
    def where(self) -> str:
        return self._steps.where

    @property
    def replays(self) -> int:
        return self._steps.replays

    def run_step(self, variant: Variant, inputs: Inputs) -> Any:
        check_not_autocast()
        with torch.no_grad():
            return self._steps.run_variant(variant, inputs)

    def close(self) -> None:
        """End the session on the server, too."""
        self._steps.close()


class LocalSession(StageSession):
    """Steps of a model that is not cut: it runs here as a whole; the attributes are those of a `RemoteSession`."""

    where = "edge"
    replays = 0

    def __init__(self, local: LocalModel) -> None:
        self._local = local
        self.num_steps = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._local.check_modes()
        self.num_steps += 1
        with torch.no_grad():
            return self._local.model(*args, **kwargs)

    def close(self) -> None:
        """Do nothing: the caller has the state."""


class _RemoteSequence(StepSequence):
    """The steps of a session: the head's state is the caller's, the tail's is on the server or in a `TailSession`."""

    def __init__(
        self,
        remote: Remote,
        pool: ServerPool,
        route: Route,
        keep_bytes: int,
        options: RequestOptions,
        records: deque[RequestRecord],
    ) -> None:
        super().__init__()
        self._remote = remote
        self._pool = pool
        self._connection = pool.next()
        self._route = route
        self._keep_bytes = keep_bytes
        self._options = options
        self._records = records
        self._splits: dict[int, bytes] = {}  # the encoded descriptions, by the identity of the variant
        self._sent_inputs = SentInputs()
        self._log: list[LoggedStep] | None = []  # None: it became too long to be kept
        self._logged_bytes = 0
        self._reset()
        self._local: TailSession | None = None
        self._initial = b""
        self._num_steps = 0
        self._head_s = 0.0
        self.replays = 0

    @property
    def where(self) -> str:
        return "cloud" if self._local is None else "edge"

    def make_state(self, stage: Stage, states: Sequence[Any]) -> StageState:
        self._initial = encode_states(states)
        return StageState(list(states))  # the caller's: those of the server are there

    def run_variant(self, variant: Variant, inputs: Inputs) -> Any:
        """Run one step on the stages of a variant; `inputs` have all states."""
        self._remote.check_open()
        self._variant, self._inputs, self._started = variant, inputs, perf_counter()
        return self.run(variant.stages, inputs)

    def run_step(self, stage: Stage, boundary: Boundary, state: StageState, edits: Edits) -> tuple[Any, Changes]:
        self._head_s = perf_counter() - self._started
        variant = self._variant
        encoded_state = encode_edits(edits) if self._num_steps else self._initial
        if id(variant) not in self._splits:
            self._splits[id(variant)] = encode_split(variant.describe())
        expected = ExpectedReply(variant.spec.example, self._inputs, self._options.max_reply_bytes)
        encoded = self._sent_inputs.without_repeated(boundary).to_bytes(self._route.codec)
        step = LoggedStep(variant, self._splits[id(variant)], encoded_state, encoded, expected)
        self._num_steps += 1
        self._keep(step)
        output, changes = self._run(step, state.objects)
        return output, parse_all_changes(changes, len(state.objects))

    def _keep(self, step: LoggedStep) -> None:
        """Keep a step for a replay; one that runs on this device needs none."""
        self._logged_bytes += len(step.boundary) + len(step.state)
        if self._log is not None and self._local is None:
            self._log.append(step)
            if self._logged_bytes > self._keep_bytes:
                self._log = None
                log.warning("the session cannot be replayed any more", extra={"bytes": self._logged_bytes})

    def _run(self, step: LoggedStep, states: list[Any]) -> tuple[Any, bytes]:
        """Run a step on the server; if that fails, replay the session there, or here."""
        if self._local is not None:
            return self._run_locally(step, states)
        error: RemoteError | None = None
        for attempt in range(_MAX_REPLAYS + 1):
            try:
                if error is not None:
                    sleep(random.uniform(0.0, _MIN_BACKOFF_S * 2**attempt))  # others that were evicted replay, too
                    self._replay_on_server(states, error)
                return self._run_on_server(step, states)
            except RemoteError as failure:
                if failure.kind not in TRANSIENT | {"NO_SESSION"}:
                    raise
                error = failure
                if failure.kind != "NO_SESSION":  # the connection has tried again for a while
                    other = self._pool.next(exclude=self._connection)
                    if other.down_reason is not None or other is self._connection:
                        break
                    self.end_on_server()
                    self._connection = other
        assert error is not None
        if not self._options.has_fallback:
            raise error
        self.end_on_server()
        return self._replay_locally(states, error)

    def _make_request(self, deadline_s: float | None = None) -> RemoteRequest:
        head_s, self._head_s = self._head_s, 0.0  # a replay runs no head
        return RemoteRequest(Inputs(), self._route, deadline_s, head_s)

    # -- on the server -------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._id = uuid.uuid4().hex
        self._sent, self._received = DeltaCodec(), DeltaCodec()
        self._number = 0
        self._last_split = b""

    def _run_on_server(self, step: LoggedStep, states: list[Any]) -> tuple[Any, bytes]:
        request = self._make_request(self._options.deadline_s)
        try:
            return self._exchange(request, step, states)
        except MicrotomeError as error:
            request.mark_failed(str(error))
            raise
        finally:
            self._records.append(request.record())

    def _exchange(self, request: RemoteRequest, step: LoggedStep, states: list[Any]) -> tuple[Any, bytes]:
        spec = step.variant.spec
        with request.timed("encode_s"):
            header, rest = split_header(step.boundary)
            message = protocol.Step(
                session=self._id,
                number=self._number,
                split=b"" if step.split == self._last_split else self._sent.compress("split", step.split),
                state=self._sent.compress("state", step.state),
                header=self._sent.compress("header", header),
            )
            encoded = request.make_message(step.expected.reply_bytes, step=message)
            encoded.set_payload(rest)
        self._last_split, self._number = step.split, self._number + 1
        reply = self._remote.exchange(request, encoded, self._connection)
        with request.timed("decode_s"):
            boundary = Boundary.from_bytes(reply.output, limit=step.expected.decoding_bytes)
            with as_state(spec.state_classes):
                device = step.variant.stages[0].device
                output = unpack_output(boundary, spec.output, device, step.expected, states)
            return output, self._received.decompress("state", reply.state)

    def _replay_on_server(self, states: list[Any], error: RemoteError) -> None:
        """Begin a new session, and run all steps before the last one again."""
        before = self._steps_before(error)
        self._reset()
        self.replays += 1
        log.info("replaying a session", extra={"steps": len(before), "reason": str(error)})
        for step in before:
            self._run_on_server(step, states)

    def _steps_before(self, error: RemoteError) -> list[LoggedStep]:
        """The steps before the last one.

        Raises:
            RemoteError: They are not kept.
        """
        if self._log is None:
            raise RemoteError(
                f"{error}. The {self._num_steps} steps of the session took {size(self._logged_bytes)}, and "
                f"{size(self._keep_bytes)} are kept for a replay: raise replay_memory=, or begin again",
                error.kind,
            ) from error
        return self._log[:-1]

    # -- on this device ------------------------------------------------------------------------------------------------

    def _replay_locally(self, states: list[Any], error: RemoteError) -> tuple[Any, bytes]:
        """Run all steps again on this device, which computes the rest of the session, too."""
        before = self._steps_before(error)
        log.warning("continuing a session locally", extra={"steps": len(before), "reason": str(error)})
        self._local = TailSession()
        self.replays += 1
        for step in before:
            self._run_tail(step)
        assert self._log is not None
        last, self._log = self._log[-1], None
        return self._run_locally(last, states, str(error))

    def _run_locally(self, step: LoggedStep, states: list[Any], reason: str | None = None) -> tuple[Any, bytes]:
        request = self._make_request()
        request.reason = reason
        with request.timed("tail_s"):
            result = self._run_tail(step)
        request.state = RequestState.LOCAL
        self._records.append(request.record())
        assert self._local is not None
        with as_state(step.variant.spec.state_classes):
            return replace_states(result.output, self._local.state.objects, states), result.changes

    def _run_tail(self, step: LoggedStep) -> StepResult:
        assert self._local is not None
        return self._local.run(step.variant.stages[-1], step.state, Boundary.from_bytes(step.boundary))

    def close(self) -> None:
        """End the session on the server."""
        if self._local is None:
            self.end_on_server()
        self._failed = True

    def end_on_server(self) -> None:
        """Let the server drop the state, also after an error here."""
        if self._number:
            step = protocol.Step(session=self._id, ends=True)
            message = RemoteRequest(Inputs(), self._route).make_message(protocol.DEFAULT_REPLY_BYTES, step=step)
            message.set_payload(b"")
            message.retry_until = 0.0  # if the stream breaks, the session ends with it
            with suppress(RemoteError):  # the connection is closed, and with it the session
                self._connection.submit(message)
            self._number = 0

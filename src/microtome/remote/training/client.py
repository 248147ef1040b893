"""The client of a training run: the head trains here, and the tail on a server."""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any, NamedTuple, Self

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from microtome.engine.torch_internals import on_backward_end
from microtome.errors import BadBoundary, RemoteError, SessionError, Unsupported
from microtome.inputs import Inputs
from microtome.remote import protocol
from microtome.remote.chain import too_large
from microtome.remote.connection import Connection
from microtome.remote.message import Message
from microtome.remote.payloads import ExpectedReply, check_not_autocast, unpack_output
from microtome.remote.training.backend import APPLY, ATTACH, BACKWARD, FORWARD, encode_labels
from microtome.remote.training.trained_stage import TrainedStage
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.gradients import FACTS, match_gradients
from microtome.split.boundary.tensor_bytes import moved

log = logging.getLogger("microtome.remote")

#: Kinds of errors after which the actions of a step are sent again.
_RETRIED = frozenset({"UNREACHABLE", "DRAINING", "NO_SESSION"})
#: Seconds before the first and between the last retries.
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.02, 1.0
#: Bytes of a reply beside twice those of its tensors.
_REPLY_BYTES = 1 << 20
_SEED_MASK = (1 << 63) - 1


class _Action(NamedTuple):
    """A forward or backward of the present step, kept to be sent again.

    Attributes:
        fields: Those of its `TrainAction`.
        digest: Of the reply.
    """

    fields: dict[str, Any]
    payload: bytes
    reply_bytes: int
    digest: bytes = b""


class RemoteTraining:
    """A model whose head trains here, and whose tail trains on a server. Call it like the model.

    Attributes:
        optimizer: The optimizer of the head; None: the caller has one.
        retries: How often actions of a step were sent again, since the server had lost them.
    """

    def __init__(
        self, head: TrainedStage, connection: Connection, at: str, codec: str, patience_s: float, max_reply: int | None
    ) -> None:
        """Attach to the server.

        Args:
            head: The head.
            patience_s: Seconds for which an action is retried while the server is down.
            max_reply: The most bytes of a reply; None: derived from the example.
        """
        self._head = head
        self._connection = connection
        self._at = at
        self._codec = codec
        self._patience_s = patience_s
        self._max_reply = max_reply
        self._actions: list[_Action] = []
        self._failure: str | None = None  # why the present step cannot be ended
        self._open_backwards = 0  # those whose gradients came, and have not gone through all of the head
        self._epoch = 0  # changes when the actions so far are done with
        self._is_ending = False  # the server may have ended the present step
        self._is_ended = self._is_applied = False  # it has; the optimizer here has stepped, too
        self._is_attached = False
        self._server_step = 0
        self._server_keeps = self._saves = False
        self.retries = 0
        saved_run = head.read_run()
        head.run = saved_run or uuid.uuid4().hex
        if saved_run is not None:
            head.step = None  # until the server says from which one both go on
        self._seed = int.from_bytes(xxhash.xxh3_64_digest(torch.initial_seed().to_bytes(16, "little", signed=True)))
        head.discard()  # a run begins without gradients, as on the server
        self._until_answered(self._attach)

    @property
    def num_steps(self) -> int:
        """The number of whole steps that both sides have made.

        Raises:
            SessionError: The optimizer here failed midway.
        """
        if self._head.step is None:
            raise SessionError(
                f"the head has {self._head.describe_failure()}. Connect again, with checkpoint= to go on from the last "
                "one"
            )
        return self._head.step

    @property
    def optimizer(self) -> Optimizer | None:
        return self._head.optimizer

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that are trained here."""
        return iter(self._head.parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, and return its output, whose backward runs on the server and then here."""
        inputs = Inputs(*args, **kwargs)
        boundary = self._run_head(inputs)
        spec = self._head.stage.spec
        expected = ExpectedReply(spec.example, inputs, self._max_reply)
        reply = self._forward(boundary, b"", expected.reply_bytes, has_loss=False)
        number = len(self._actions) - 1
        with self._failing():
            output = Boundary.from_bytes(reply, limit=expected.decoding_bytes)
            unpack_output(output, spec.output, None, expected)  # checks it before the tensors get a graph
            tensors = self._with_graph(number, boundary, output)
            return unpack_output(output.with_tensors(tensors), spec.output, None)

    def loss(self, inputs: Any, labels: Tensor | Sequence[Tensor] = ()) -> Tensor:
        """Run the model and the loss of the server, and return that.

        Args:
            inputs: A tensor, a tuple, a dict or an `Inputs`.
            labels: What the loss takes after the output of the model: labels or, if the server has them, which ones.
        """
        boundary = self._run_head(Inputs.of(inputs, self._head.stage.model))
        encoded = encode_labels((labels,) if isinstance(labels, Tensor) else tuple(labels))
        reply = self._forward(boundary, encoded, protocol.DEFAULT_REPLY_BYTES, has_loss=True)
        with self._failing():
            output = Boundary.from_bytes(reply, limit=_REPLY_BYTES)
            if [tensor.shape for tensor in output.tensors.values()] != [()]:
                raise BadBoundary(f"expected a loss that is a number, got {output!r}")
            (loss,) = self._with_graph(len(self._actions) - 1, boundary, output).values()
        return loss

    def step(self, *, client: bool = True, server: bool = True) -> None:
        """End the step: step the optimizers of both sides, and drop the gradients.

        Losses may not be scaled, as by a `GradScaler`: the server cannot unscale its gradients.

        If this raises because the server is down or a checkpoint cannot be written, call it again: both step once.

        Args:
            client: Step the optimizer here; False: drop the gradients of the head.
            server: Step the one on the server; False: drop the gradients of the tail.

        Raises:
            SessionError: The step has no backward, or a part of it failed: call `zero_grad`, and repeat it.
        """
        self._check_whole()
        self._check_backwards()
        _ = self.num_steps
        if not self._is_ended:
            if not any(action.fields["kind"] == BACKWARD for action in self._actions):
                raise SessionError("expected a backward before the step, got none: call backward on the loss first")
            self._is_ending = True
            self._saves = self._until_answered(lambda: self._apply(skip=not server)) or not self._server_keeps
            self._is_ended = True
        if not self._is_applied:
            self._head.apply(skip=not client)
            self._is_applied = True
        if self._saves:
            self._head.save()
        self._forget()

    def zero_grad(self) -> None:
        """Drop what the present step has done on both sides, and begin it again."""
        self._check_not_ending()
        self._head.discard()
        self._forget()

    def close(self) -> None:
        """Disconnect; both sides drop what the present step has done."""
        try:
            if self._head.is_in_step:
                self._head.discard()
        finally:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = type(self._head.stage.model).__name__
        return f"<RemoteTraining {name} at {self._connection.address}, cut at {self._at!r}, step {self._head.step}>"

    # -- forward and backward ------------------------------------------------------------------------------------------

    def _run_head(self, inputs: Inputs) -> Boundary:
        check_not_autocast()
        if not torch.is_grad_enabled():
            raise Unsupported(
                "expected gradients to be enabled, got torch.no_grad(): the server only trains. To evaluate, run the "
                "model with the weights of both sides"
            )
        self._check_whole()
        self._check_not_ending()
        if not self._actions:
            self._head.begin_step()
        with self._failing():
            boundary: Boundary = self._head.stage(*inputs.args, **inputs.kwargs)
        return boundary

    def _forward(self, boundary: Boundary, labels: bytes, reply_bytes: int, *, has_loss: bool) -> bytes:
        payload = boundary.to_bytes(self._codec)
        number = len(self._actions)
        drawn = b"%d %d %d" % (self._seed, self.num_steps, number)
        fields = {"kind": FORWARD, "has_loss": has_loss, "labels_bytes": len(labels)}
        fields["seed"] = xxhash.xxh3_64_intdigest(drawn) & _SEED_MASK
        bound = max(reply_bytes, 2 * boundary.nbytes + _REPLY_BYTES)  # of the gradients, too, on the same stream
        return self._run(_Action(fields, payload + labels, bound))

    def _with_graph(self, number: int, boundary: Boundary, output: Boundary) -> dict[str, Tensor]:
        """The tensors of a reply, whose backward is on the server."""
        names = output.facts.get("requires_grad")
        if not isinstance(names, list) or not {*map(str, names)} <= {*output.tensors}:
            raise BadBoundary(f"expected the names of tensors that require a gradient, got {names!r:.200}")
        crossing = [tensor for tensor in boundary.tensors.values() if tensor.requires_grad]
        anchor = torch.zeros((), requires_grad=True)  # the tail has a backward, also if the head has none
        device = self._head.stage.device or torch.device("cpu")
        received = [moved(tensor, device) for tensor in output.tensors.values()]
        call = _Call(self, self._epoch, number, boundary, tuple(output.tensors))
        tensors = _OnServer.apply(call, frozenset(names), anchor, received, *crossing)
        return dict(zip(output.tensors, tensors, strict=True))

    def run_backward(self, epoch: int, number: int, boundary: Boundary, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """Send the gradients of a reply, and return those of what crossed the cut."""
        self._check_whole()
        if epoch != self._epoch:
            raise SessionError("the step that this output belongs to has ended: run the forward again")
        gradients = {name: grad.cpu() for name, grad in grads.items()}
        sent = Boundary(boundary.at, boundary.fingerprint, gradients, dict(FACTS))
        bound = 2 * boundary.nbytes + _REPLY_BYTES
        payload = sent.to_bytes(self._codec)
        reply = self._run(_Action({"kind": BACKWARD, "forward": number}, payload, bound))
        with self._failing():
            matched = match_gradients(boundary, Boundary.from_bytes(reply, limit=6 * bound))
            self._open_backwards += 1
            on_backward_end(lambda: self._end_backward(epoch))
        return matched

    def _end_backward(self, epoch: int) -> None:
        """Record that the gradients of a reply have gone through all of the head."""
        if epoch == self._epoch:
            self._open_backwards -= 1

    def _run(self, action: _Action) -> bytes:
        """Run an action on the server; after a failure there, send those before it in this step again."""
        number = len(self._actions)
        with self._failing():
            reply: bytes = self._until_answered(lambda: self._exchange(action, number).output)
        self._actions.append(action._replace(digest=xxhash.xxh3_128_digest(reply)))
        return reply

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Refuse to end the present step if the block raises."""
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or str(error) or type(error).__name__
            raise

    def _forget(self) -> None:
        """Begin a step."""
        self._actions.clear()
        self._epoch += 1
        self._failure = None
        self._open_backwards = 0
        self._is_ending = self._is_ended = self._is_applied = False

    def _check_not_ending(self) -> None:
        if self._is_ending:
            raise SessionError("the server may have ended the step: call step() again, which ends it on both sides")

    def _check_whole(self) -> None:
        if self._failure is not None:
            raise SessionError(
                f"a part of step {self._head.step} failed, so that it cannot be ended: call zero_grad(), and repeat "
                f"it. It failed with: {self._failure}"
            )

    def _check_backwards(self) -> None:
        """Raise if a backward failed in the head after the gradients of the tail were added on the server."""
        if self._open_backwards:
            raise SessionError(
                f"expected the backwards of step {self._head.step} to end, got {self._open_backwards} that failed in "
                "the head, or still run: the tail has gradients that the head has not. Call zero_grad(), and repeat "
                "the step"
            )

    # -- the server ----------------------------------------------------------------------------------------------------

    def _until_answered(self, exchange: Any) -> Any:
        """Call a function again, attached to the server anew, until it does not fail because the server is down."""
        backoff_s, give_up = _MIN_BACKOFF_S, monotonic() + self._patience_s
        while True:
            try:
                if not self._is_attached and exchange != self._attach:
                    self._attach()
                    if self._server_step == self.num_steps:  # else it has ended the step
                        self._resend()
                return exchange()
            except RemoteError as error:
                self._is_attached = False
                if error.kind not in _RETRIED or monotonic() > give_up:
                    raise
                log.info("retrying a training step", extra={"step": self._head.step, "reason": str(error)})
            sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _attach(self) -> None:
        """Agree with the server on a number of whole steps.

        Raises:
            RemoteError: There is none; or both sides have gone back, `ROLLED_BACK`.
        """
        head = self._head
        before = head.step
        here = () if before is None else (before, before + 1) if self._is_ending else (before,)
        steps = sorted({*head.saved_steps, *here})
        fields = {"kind": ATTACH, "run": head.run, "at": self._at, "steps": steps}
        reply = self._exchange(_Action(fields, b"", _REPLY_BYTES), 0).train
        if reply.step not in steps:
            raise RemoteError(f"{self._connection.address} went to step {reply.step}, which is not here", "LOST")
        self._server_step, self._server_keeps, self._is_attached = reply.step, reply.keeps, True
        if reply.step not in here:
            head.discard()
            self._forget()
            head.go_to(reply.step)
            if before is not None:
                raise RemoteError(
                    f"{self._connection.address} had lost the steps after {reply.step}: both sides have gone back from "
                    f"step {before} to {reply.step}, where they were saved. Call zero_grad(), and go on from num_steps",
                    "ROLLED_BACK",
                )

    def _resend(self) -> None:
        """Send the actions of the present step again.

        Raises:
            RemoteError: The server computes something else than before.
        """
        for number, action in enumerate(self._actions):
            self.retries += 1
            reply = self._exchange(action, number)
            if xxhash.xxh3_128_digest(reply.output) != action.digest:
                raise RemoteError(
                    f"{self._connection.address} computed other values when a part of step "
                    f"{self._head.step} was sent again: its kernels, or random numbers of Python, vary. Call "
                    "zero_grad(), and repeat the step",
                    "VARIES",
                )

    def _apply(self, *, skip: bool) -> bool:
        """End the step on the server; return whether there is a checkpoint of it."""
        fields = {"kind": APPLY, "skips": skip}
        reply = self._exchange(_Action(fields, b"", _REPLY_BYTES), len(self._actions)).train
        if reply.step != self.num_steps + 1:
            raise RemoteError(f"expected step {self.num_steps + 1} of the server, got {reply.step}", "LOST")
        return bool(reply.saved)

    def _exchange(self, action: _Action, number: int) -> Any:
        """Send an action once, and return the reply."""
        train = protocol.TrainAction(**{"step": self._head.step or 0, "number": number, **action.fields})
        header = protocol.Request(id=uuid.uuid4().hex, codec=self._codec, train=train)
        message = Message(header, reply_bytes=max(action.reply_bytes, protocol.DEFAULT_REPLY_BYTES))
        message.set_payload(action.payload)
        message.retry_until = 0.0  # a step belongs to its stream
        limit = self._connection.hello.max_message
        if message.nbytes > limit:
            raise too_large(message.nbytes, self._at, self._connection.address, limit)
        self._connection.submit(message)
        return message.reply.result()


class _Call(NamedTuple):
    """A forward on the server.

    Attributes:
        epoch: Of the step that it belongs to; `number`: that of the action.
        names: Those of the tensors of the reply.
    """

    training: RemoteTraining
    epoch: int
    number: int
    boundary: Boundary
    names: tuple[str, ...]


class _OnServer(torch.autograd.Function):
    """The tail on a server: from what crosses the cut to the tensors of a reply."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, differentiable: frozenset[str], _: Tensor, received: list[Tensor], *crossing: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        named = zip(call.names, received, strict=True)
        ctx.mark_non_differentiable(*(one for name, one in named if name not in differentiable))
        return tuple(received)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if ctx.call is None:
            raise SessionError("the server has run this backward, and dropped its graph: run the forward again")
        training, epoch, number, boundary, names = ctx.call
        ctx.call = None
        named = {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}
        found = training.run_backward(epoch, number, boundary, named)
        crossing = [name for name, tensor in boundary.tensors.items() if tensor.requires_grad]
        return (None,) * 4 + tuple(found.get(name) for name in crossing)

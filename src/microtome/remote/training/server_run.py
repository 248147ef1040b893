"""The training run of a server: whole steps of the tail, and what the present step has done so far."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.devices.base import default_generators
from microtome.engine.fingerprint import modes_fingerprint
from microtome.engine.saved_tensors import graph_bytes, saved_bytes
from microtome.errors import BadQuery, MicrotomeError, NoMatch, RemoteError, Unsupported
from microtome.files.reading import File
from microtome.remote.error_kinds import NoSession, TooLarge
from microtome.remote.payloads import pack_output
from microtome.remote.training.checkpoints import Checkpoints
from microtome.remote.training.trained_stage import OptimizerOrFactory, TrainedStage, common_step
from microtome.split.analysis.structure_spec import flatten
from microtome.split.boundary.boundary import Boundary
from microtome.split.splitter import Splitter
from microtome.units import size

log = logging.getLogger("microtome.remote")


class TrainingOptions(NamedTuple):
    """Options of a server that trains.

    Attributes:
        optimizer: Makes the optimizer from the parameters of the tail.
        loss: Computes the loss from the output of the model and the labels; None: clients do.
        folder: Where checkpoints are written; None: nowhere.
        every: The number of steps from one checkpoint to the next.
        nbytes: The most bytes that are kept for backwards.
        idle_s: Seconds without an action after which another client may train, and what is kept is dropped.
    """

    optimizer: OptimizerOrFactory
    loss: Callable[..., Tensor] | None = None
    folder: File | None = None
    every: int = 1
    nbytes: int = 4 << 30
    idle_s: float = 600.0


class _Forward(NamedTuple):
    """A forward whose backward may follow.

    Attributes:
        received: What crossed the cut, whose tensors collect gradients.
        sent: The tensors of the reply that require a gradient, with their graph.
        nbytes: The bytes that are kept for the backward.
    """

    received: Boundary
    sent: Boundary
    nbytes: int


class TrainingRun:
    """The training run of a server. Thread-safe.

    Between two steps the weights are those of a whole number of steps. An action that fails, and the end of the stream
    that the run belongs to, drop what the present step has done.

    Attributes:
        modes: The `modes_fingerprint` of the model.
        at: The cut; empty: none is known yet.
    """

    def __init__(self, splitter: Splitter, options: TrainingOptions, clock: Callable[[], float] = monotonic) -> None:
        self.options = options
        self.modes = modes_fingerprint(splitter.model)
        self._splitter = splitter
        self._clock = clock
        self._lock = threading.RLock()
        self._checkpoints = None if options.folder is None else Checkpoints(options.folder)
        self._owner: object = None
        self._last_used = 0.0
        self._tail: TrainedStage | None = None
        self.at = ""
        self._forwards: dict[int, _Forward] = {}
        self._num_actions = 0

    @property
    def nbytes(self) -> int:
        """The bytes that are kept for backwards."""
        return sum(forward.nbytes for forward in list(self._forwards.values()))

    @property
    def step(self) -> int | None:
        """The number of whole steps of the weights; None: a step failed midway."""
        return 0 if self._tail is None else self._tail.step

    def attach(self, owner: object, run: str, at: str, steps: Sequence[int]) -> int:
        """Begin or continue a run; return the number of whole steps from which both sides go on.

        Args:
            owner: The stream that the run belongs to from now on.
            run: The id of the run; the client makes a new one for a new run.
            steps: Those from which the client can go on.

        Raises:
            RemoteError: Another client trains, or there is no such step.
        """
        with self._lock:
            tail = self._tail
            is_same = tail is not None and tail.run == run
            if self._owner not in (None, owner) and not is_same:
                raise RemoteError("another client trains the model: connect when it is done", "BUSY")
            self._drop()
            if tail is None or (self.at != at and tail.step == 0 and not tail.saved_steps):
                tail = self._tail = self._make_tail(at)
            if self.at != at:
                raise RemoteError(f"the model trains with a cut at {self.at!r}, got {at!r:.200}", "LOST")
            self._join(tail, run, steps)
            self._owner, self._last_used = owner, self._clock()
            log.info("training", extra={"run": run[:64], "at": at[:200], "step": tail.step})
            assert tail.step is not None
            return tail.step

    def forward(
        self, owner: object, step: int, number: int, boundary: Boundary, seed: int, labels: Sequence[Tensor] | None
    ) -> Boundary:
        """Run the tail, and return its output, or its loss if there are labels.

        Args:
            number: That of the action; 0 begins the step anew.
            seed: Of the random numbers that it draws.
        """
        if labels is None and self.options.loss is not None:
            raise BadQuery("the server computes the loss, and outputs do not leave it: call loss() with the labels")
        with self._action(owner, step, number) as tail:
            stage, spec = tail.stage, tail.stage.spec
            output = self._run(tail, boundary, seed, labels)
            if labels is not None:
                packed = Boundary(boundary.at, stage.fingerprint, {"0": output.detach()}, {})
                tensors = {"0": output}
            else:
                packed = pack_output(output, spec.output, boundary.at, stage.fingerprint)
                tensors = dict(zip(packed.facts["tensors"], flatten(output)[1], strict=True))
            tensors = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
            packed.facts["requires_grad"] = list(tensors)
            weights = (*stage.model.parameters(), *stage.model.buffers())
            crossing = (*boundary.tensors.values(), *packed.tensors.values())
            kept = graph_bytes(tensors.values()) + saved_bytes(tensors.values(), (*weights, *crossing))
            nbytes = boundary.nbytes + packed.nbytes + kept
            if self.nbytes + nbytes > self.options.nbytes:
                raise TooLarge(
                    f"{size(self.nbytes + nbytes)} would be kept for the backward, and the server keeps "
                    f"{size(self.options.nbytes)}: raise train_memory= there, send smaller batches, or run the "
                    "backward of each before the next one"
                )
            sent = Boundary(boundary.at, stage.fingerprint, tensors, packed.facts)
            self._forwards[number] = _Forward(boundary, sent, nbytes)
            return packed

    def backward(self, owner: object, step: int, number: int, forward: int, gradients: Boundary) -> Boundary:
        """Run the backward of a forward from the gradients of its reply; return those of what crossed the cut."""
        with self._action(owner, step, number):
            kept = self._forwards.pop(forward, None)
            if kept is None:
                raise BadQuery(f"expected the number of a forward without a backward, got {forward}")
            kept.sent.backward(gradients)
            return kept.received.gradients()

    def apply(self, owner: object, step: int, number: int, *, skip: bool) -> tuple[int, bool]:
        """End a step, once; return the number of whole steps, and whether there is a checkpoint of it.

        Args:
            number: The number of actions that the step has had.
            skip: Drop the gradients instead of stepping the optimizer.
        """
        with self._lock:
            self._check_owner(owner)
            tail = self._tail
            assert tail is not None
            if tail.step != step + 1:  # else the reply was lost, or writing the checkpoint failed
                with self._action(owner, step, number):
                    tail.apply(skip=skip)
                self._forwards.clear()
                self._num_actions = 0
            assert tail.step is not None
            if tail.step % self.options.every == 0:
                tail.save()
            return tail.step, tail.step in tail.saved_steps

    def detach(self, owner: object) -> None:
        """End the hold of a stream that has ended, and drop what the present step has done."""
        with self._lock:
            if self._owner is owner:
                self._drop()
                self._owner = None

    def expire(self) -> None:
        """Do the same if there was no action for a while; a client that comes back sends the step again."""
        if self._lock.acquire(blocking=False):  # else an action runs
            try:
                if self._owner is not None and self._clock() - self._last_used > self.options.idle_s:
                    log.info("training paused", extra={"reason": "expired"})
                    self.detach(self._owner)
            finally:
                self._lock.release()

    # -- the steps -----------------------------------------------------------------------------------------------------

    def _make_tail(self, at: str) -> TrainedStage:
        try:
            stages = self._splitter.at(at)
        except (Unsupported, BadQuery, NoMatch) as error:
            raise NoMatch(f"the model cannot be trained across the cut at {at!r:.200}: {error}") from error
        tail = TrainedStage(stages[1], self.options.optimizer, self._checkpoints)
        self.at = at
        return tail

    def _join(self, tail: TrainedStage, run: str, steps: Sequence[int]) -> None:
        """Go to the last step that both sides have of a run."""
        saved_run = tail.read_run()
        here = {*tail.saved_steps} if run == saved_run else set()
        own = tail.run or saved_run
        if tail.step is not None and (tail.run == run or (saved_run is None and tail.step == 0)):
            here.add(tail.step)
        step = common_step(here, steps)
        if step is None:
            raise RemoteError(
                f"no common checkpoint: the server has {_describe(own, tail)}, the client has step "
                f"{' or '.join(map(str, sorted(steps)[-3:]))} of the run {run:.8}. Continue from checkpoints that both "
                "sides have, or begin anew on both",
                "LOST",
            )
        tail.run = run
        tail.go_to(step)

    def _drop(self) -> None:
        self._forwards.clear()
        self._num_actions = 0
        if self._tail is not None:
            self._tail.discard()

    def _check_owner(self, owner: object) -> None:
        if self._owner is not owner:
            raise NoSession("the training run does not belong to this stream: attach first")
        self._last_used = self._clock()

    @contextmanager
    def _action(self, owner: object, step: int, number: int) -> Iterator[TrainedStage]:
        """Run an action in the block; if it fails, drop what the step has done."""
        with self._lock:
            self._check_owner(owner)
            tail = self._tail
            assert tail is not None
            if number == 0:
                self._drop()
            try:
                if step != tail.step or number != self._num_actions:
                    raise NoSession(
                        f"expected action {self._num_actions} of step {tail.step}, got action {number} of step {step}"
                    )
                if number == 0:
                    tail.begin_step()
                yield tail
                self._num_actions = number + 1
            except BaseException:
                self._drop()
                raise
            finally:
                self._last_used = self._clock()

    def _run(self, tail: TrainedStage, boundary: Boundary, seed: int, labels: Sequence[Tensor] | None) -> Any:
        device = tail.stage.device or torch.device("cpu")
        with _seeded_generators({device, *_devices_of(tail.stage.model)}, seed), torch.enable_grad():
            output = tail.stage.run((boundary,), {})
            if labels is None:
                return output
            if self.options.loss is None:
                raise BadQuery("the server has no loss: start it with loss=, or compute the loss on the client")
            loss = self.options.loss(output, *(label.to(device) for label in labels))
            if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
                raise MicrotomeError(f"expected a loss that is a number with a gradient, got {loss!r:.200}")
            return loss


def _devices_of(model: nn.Module) -> set[torch.device]:
    return {parameter.device for parameter in model.parameters() if not parameter.is_meta}


@contextmanager
def _seeded_generators(devices: set[torch.device], seed: int) -> Iterator[None]:
    """Seed the generators of the CPU and of these devices alone, and restore their states afterwards."""
    generators = default_generators(devices)
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _describe(run: str | None, tail: TrainedStage) -> str:
    steps = sorted({*tail.saved_steps, *(() if tail.step is None or not tail.run else (tail.step,))})
    if tail.step is None and not steps:
        return tail.describe_failure()
    return f"step {' or '.join(map(str, steps[-3:]))} of the run {run:.8}" if run and steps else "step 0 of a new run"

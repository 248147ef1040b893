"""The model on the side of the server: the stages that it runs, and batches of requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from xxhash import xxh3_128_digest

from microtome.engine.meta_run import SUBSTITUTION_LOCK
from microtome.engine.pytree import named_tensors
from microtome.errors import BadBoundary, BadQuery, MicrotomeError, NoMatch, Unsupported, describe_error
from microtome.inputs import Inputs, no_inputs_error
from microtome.profile import profile
from microtome.remote.batching import Batcher, ExampleBoundaries, build_batcher, make_examples
from microtome.remote.inference_backend import check_origin, find_failure
from microtome.remote.payloads import INPUTS, pack_inputs, pack_output, unpack_inputs
from microtome.remote.stage_ref import StageRef, describe_stage
from microtome.remote.step_codec import parse_split
from microtome.remote.tensor_messages import encode_tensors, parse_tensors
from microtome.split.boundary.boundary import Boundary
from microtome.split.description import restore_inputs
from microtome.split.modes import ModuleModes
from microtome.split.splitter import Splitter
from microtome.split.stage import Stage
from microtome.split.weights import copy_with_weights

#: The most stages for steps of sessions that are kept; and the most chains, each with the stages between its cuts.
_MAX_TAILS = _MAX_CHAINS = 64
#: The most cuts of a chain.
_MAX_CUTS = 64


class ServedModel:
    """A model that can be run between any of its cuts; or one of its stages.

    Attributes:
        model: The model.
        fingerprint: The fingerprint of its structure and weights.
        cuts: The addresses of the cuts where its stages may begin.
        only: The only stage that it has; None: it has the whole model.
    """

    training = None

    def __init__(self, model: nn.Module | Stage, inputs: Any = None, examples: ExampleBoundaries | None = None) -> None:
        """Take a model with example inputs, or a stage.

        Args:
            examples: What crosses the cut where the stage begins, from which requests can be batched; None: they are
                computed one by one.
        """
        self._lock = threading.Lock()
        self._stages: dict[tuple[str, ...], Sequence[Stage]] = {}  # by their cuts
        self._batchers: dict[StageRef, Batcher | None] = {}
        self._splitter: Splitter | None = None
        self._examples = examples
        self.only: Stage | None = None
        self._tails: dict[bytes, Stage] = {}  # of the steps of sessions, by a digest of the description
        self._without_weights: nn.Module | None = None
        source: Stage | Splitter
        if isinstance(model, Stage):
            source = self.only = model
            _check_stateless(model.state)
            self.cuts: tuple[str, ...] = (model.begins_at or INPUTS,)
        else:
            if inputs is None:
                raise no_inputs_error(model)
            source = self._splitter = Splitter(model, inputs)
            _check_stateless(source.state)
            self.cuts = (INPUTS, *(cut.at for cut in source.cuts))
        self.model, self.fingerprint, self._spec = source.model, source.fingerprint, source.spec
        self._modes = ModuleModes(self.model)

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def params(self) -> int:
        """The number of parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def any_stage(self) -> bool:
        return self.only is None

    @property
    def device_name(self) -> str:
        return str(self.device or "cpu")

    @property
    def device(self) -> torch.device | None:
        return next((parameter.device for parameter in self.model.parameters() if not parameter.is_meta), None)

    def device_failure(self) -> str | None:
        return find_failure(self.device)

    def profile(self) -> str:
        """Profile the model on this device, as JSON."""
        if self._splitter is None:
            raise Unsupported("the server has one stage of the model")
        with torch.no_grad():
            return profile(self.model, self._splitter.example, measure="time").to_json()

    @property
    def ends_at(self) -> str | None:
        """The cut where the only stage ends; None: at the output."""
        return None if self.only is None else self.only.ends_at

    def describe_stage(self) -> str:
        """Name the only stage by its cuts."""
        return describe_stage(self.cuts[0], self.ends_at)

    def decode(self, data: bytes | memoryview, limit: int) -> Boundary:
        """Decode a boundary.

        Args:
            limit: The most memory that decoding may take, four times the size of the largest message.

        Raises:
            BadBoundary: If it is not a boundary of this model.
            NoMatch: If the cut is not served.
        """
        boundary = Boundary.from_bytes(data, limit=limit, max_tensor_bytes=limit // 4)
        check_origin(self, boundary.at, boundary.fingerprint, self.cuts)
        return boundary

    def decode_tensors(self, data: bytes | memoryview, limit: int) -> Boundary:
        """Decode a message `Tensors`; its facts are derived later."""
        boundary = parse_tensors(data, limit)
        check_origin(self, boundary.at, boundary.fingerprint, self.cuts)
        return boundary

    def complete(
        self, boundary: Boundary, stage: StageRef, exclusive: Callable[[], AbstractContextManager[None]]
    ) -> Boundary:
        """Return a boundary with facts, if it has the shapes of the model's inputs instead.

        Args:
            exclusive: Opens a block in which no other thread computes.
        """
        if not Stage.lacks_facts(boundary):
            return boundary
        if stage.index == 0:
            raise BadBoundary("expected the tensors of a cut, got those of the inputs: run an exported stage first")
        target = self._stage(stage)
        if target.knows_facts(boundary):
            return target.complete(boundary)
        with exclusive():
            return target.complete(boundary)

    def check_stage(self, stage: StageRef, boundary: Boundary) -> None:
        """Raise if a request cannot name this stage.

        Raises:
            BadBoundary: If the boundary is of another cut.
            NoMatch: If the stage is not served.
        """
        if stage.begins_at != boundary.at:
            raise BadBoundary(f"expected a boundary of the cut at {stage.begins_at!r:.200}, got one of {boundary.at!r}")
        if self.only is not None and (boundary.at, stage.ends_at) != (self.cuts[0], self.ends_at):
            raise NoMatch(f"expected the stage {self.describe_stage()}, got that {stage}")
        if len(stage.cuts) > _MAX_CUTS:
            raise NoMatch(f"expected at most {_MAX_CUTS} cuts, got {len(stage.cuts)}")

    def batch_key(self, boundary: Boundary, stage: StageRef | None = None) -> str | None:
        """Return the same key for requests that can be computed together; None: it must be computed alone."""
        batcher = self._batcher(stage or StageRef.tail(boundary.at))
        return None if batcher is None else batcher.key(boundary)

    def divide(self, boundaries: Sequence[Boundary], stage: StageRef) -> list[int]:
        """Return how many requests of one batch key are computed together, in order."""
        batcher = self._batcher(stage)
        assert batcher is not None
        with self._lock:
            return batcher.divide([batcher.batch_size(boundary) for boundary in boundaries])

    def compute(
        self, boundaries: Sequence[Boundary], stage: StageRef | None = None, deadline: float | None = None
    ) -> list[Any]:
        """Return the output of a stage for each boundary; several of the same batch key are computed together.

        Args:
            stage: None: from the cut of the boundaries to the output.
            deadline: Ignored: a computation that has begun is not stopped.
        """
        stage = stage or StageRef.tail(boundaries[0].at)
        run = partial(self._run, stage)
        with torch.no_grad():
            if len(boundaries) == 1:
                return [run(boundaries[0])]
            batcher = self._batcher(stage)
            assert batcher is not None
            rows = [batcher.batch_size(boundary) for boundary in boundaries]
            with self._lock:
                for count in sorted({sum(rows), *rows} - {batcher.unit}):  # and the rows of each request alone
                    batcher.verify(run, count)
            return batcher.split(run(batcher.concatenate(boundaries)), rows)

    def encode(self, output: Any, at: str, codec: str) -> bytes:
        """Encode the output of the model, or what crosses the end of a stage."""
        if not isinstance(output, Boundary):
            output = pack_output(output, self._spec.output, at, self.fingerprint)
        return output.to_bytes(codec)

    def encode_tensors(self, output: Any, at: str, codec: str) -> bytes:
        """Encode the output as a message `Tensors`, each tensor under its path in the output."""
        if isinstance(output, Boundary):
            return encode_tensors(output.tensors, output.at, self.fingerprint, codec)
        named = {path or "output": tensor for path, tensor in named_tensors(output)}
        return encode_tensors(named, at, self.fingerprint, codec)

    def tail_for(self, split: bytes, limit: int) -> Stage:
        """Return the last stage for the steps of a session, from the description of the client's split.

        The client has verified the split, and says which values cross; here the model is analyzed on an example of the
        same shapes.

        Args:
            limit: The most bytes of the example.

        Raises:
            NoMatch: If the cut is not served.
            Unsupported: If the model cannot be analyzed: its code reads values, and not all weights are here.
        """
        key = xxh3_128_digest(split)
        tail = self._tails.get(key)
        if tail is not None:
            return tail
        description = parse_split(split)
        if len(description.at) != 1 or description.at[0] not in self.cuts:
            raise NoMatch(f"the cut of {self.name} at {', '.join(description.at)!r:.200} is not served")
        with self._lock, SUBSTITUTION_LOCK:
            if key in self._tails:  # made by another thread meanwhile
                return self._tails[key]
            model, device = self.model, self.device
            if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
                self._without_weights = self._without_weights or copy_with_weights(model, ())
                model, device = self._without_weights, None
            try:
                inputs = restore_inputs(description.inputs, model, device, limit)
                splitter = Splitter(model, inputs, self.fingerprint, description.state)
                variant = splitter.load(description, self.model)
            except MicrotomeError:
                raise
            except Exception as error:  # from the model's code, which runs on the example of the client
                raise BadBoundary(f"{self.name} cannot run on the client's example: {describe_error(error)}") from error
            while len(self._tails) >= _MAX_TAILS:
                del self._tails[next(iter(self._tails))]
            self._tails[key] = tail = variant.stages[-1]
            return tail

    def _run(self, ref: StageRef, boundary: Boundary, *, release: bool = True) -> Any:
        if ref.index > 0:
            return self._stage(ref).run((boundary,), {}, release=release)
        inputs = unpack_inputs(boundary, self._spec.inputs, self.device)
        if not ref.cuts:
            self._modes.check()
            return inputs.run(self.model)
        return self._stage(ref)(*inputs.args, **inputs.kwargs)

    def _stage(self, ref: StageRef) -> Stage:
        return self._stages_at(ref.cuts)[ref.index] if self.only is None else self.only

    def _stages_at(self, cuts: tuple[str, ...]) -> Sequence[Stage]:
        """Return the stages between cuts, built and verified on first use."""
        stages = self._stages.get(cuts)
        if stages is not None:
            return stages
        assert self._splitter is not None
        with self._lock:
            if cuts not in self._stages:
                self._stages[cuts] = self._split(self._splitter, cuts)
                _keep_newest(self._stages, [key for key in self._stages if len(key) > 1])
            return self._stages[cuts]

    def _split(self, splitter: Splitter, cuts: tuple[str, ...]) -> Sequence[Stage]:
        try:
            stages = splitter.at(cuts)
        except (Unsupported, BadQuery, NoMatch) as error:
            raise NoMatch(f"the cut of {self.name} at {', '.join(cuts)!r:.200} is not served: {error}") from error
        if stages.at != cuts:
            raise NoMatch(f"expected cuts in the order of a run, {', '.join(stages.at)}, got {', '.join(cuts):.200}")
        return stages

    def _batcher(self, ref: StageRef) -> Batcher | None:
        """Return the batcher of a stage, built on first use; None: its requests cannot be batched."""
        if ref in self._batchers or (self._splitter or self._examples) is None:
            return self._batchers.get(ref)
        heads = self._stages_at(ref.cuts)[: ref.index] if ref.cuts and self.only is None else ()
        with self._lock:
            if ref not in self._batchers:
                tail = partial(self._run, ref, release=False)  # the examples are run several times
                self._batchers[ref] = build_batcher(partial(self._make_examples, heads), tail)
                _keep_newest(self._batchers, [key for key in self._batchers if len(key.cuts) > 1])
            return self._batchers[ref]

    def _make_examples(self, heads: Sequence[Stage]) -> ExampleBoundaries:
        """Return what crosses the cut after some stages on the example."""
        if self._examples is not None:
            return self._examples
        assert self._splitter is not None

        def head(*args: Any, **kwargs: Any) -> Boundary:
            if not heads:
                return self._pack_inputs(*args, **kwargs)
            boundary = heads[0](*args, **kwargs)
            for stage in heads[1:]:
                boundary = stage(boundary)
            return boundary

        return make_examples(head, self._splitter.example)

    def _pack_inputs(self, *args: Any, **kwargs: Any) -> Boundary:
        return pack_inputs(Inputs(*args, **kwargs), self._spec.inputs, self.fingerprint)


def _keep_newest(cache: dict[Any, Any], chains: Sequence[Any]) -> None:
    """Remove all but the newest chains from a cache: clients can name any number of them."""
    for key in chains[:-_MAX_CHAINS]:
        del cache[key]


def _check_stateless(state: str | None) -> None:
    """Raise if a model carries state from run to run, which the requests of all clients would share."""
    if state is not None:
        raise Unsupported(
            f"a server cannot run this model: it carries {state} from run to run, and requests of several clients "
            "would share it. Put the model in eval mode, train it with optimizer=, have it take and return its state, "
            "or run its stages without a server"
        )

"""A model on the side of the server: its tails, each made once, run on what crosses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from microtome.devices.base import backend_of
from microtome.errors import BadQuery, NoMatch, Unsupported, describe_error
from microtome.inputs import Inputs
from microtome.profile import profile
from microtome.remote.batching import Batcher, learn
from microtome.remote.error_kinds import WrongModel
from microtome.remote.payloads import INPUTS, of_inputs, of_output, to_inputs
from microtome.split.boundary import Boundary
from microtome.split.codecs import parse_codec
from microtome.split.splitter import Splitter
from microtome.split.stage import Stage


class Decoded(NamedTuple):
    """A boundary that came as bytes, and the seconds that reading it took."""

    boundary: Boundary
    seconds: float


class ServedModel:
    """The model of a server, run from any of its cuts on; or one stage of it.

    Attributes:
        model: The model.
        fingerprint: Of its structure and weights.
        cuts: The addresses from which it can go on.
    """

    def __init__(self, model: nn.Module | Stage, inputs: Any = None) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, tuple[Stage | None, Stage]] = {}
        self._joiners: dict[str, Batcher | None] = {}
        self._splitter: Splitter | None = None
        if isinstance(model, Stage):
            _refuse_state(model.state)
            if model.begins_at is None or model.ends_at is not None:
                raise BadQuery(f"a server runs the last stage of a model, and this is {model!r}")
            self.model, self.fingerprint = model.model, model.fingerprint
            self._made[model.begins_at] = None, model
            self.cuts: tuple[str, ...] = (model.begins_at,)
            self._spec = model.spec
        else:
            self._splitter = splitter = Splitter(model, inputs)
            _refuse_state(splitter.state)
            self.model, self.fingerprint = splitter.model, splitter.fingerprint
            self.cuts = (INPUTS, *(cut.at for cut in splitter.cuts))
            self._spec = splitter.spec

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def device(self) -> torch.device | None:
        first = next((one for one in self.model.parameters() if not one.is_meta), None)
        return None if first is None else first.device

    def device_failure(self) -> str | None:
        """Return the error that makes the device unusable; None if it works.

        A failed kernel, as on an index that is out of range, can leave the process unable to use the device.
        """
        try:
            if self.device is not None:
                backend_of(self.device).synchronize(self.device)
        except RuntimeError as error:
            return describe_error(error)
        return None

    def profile(self) -> str:
        """Profile the model on this device, as JSON."""
        if self._splitter is None:
            raise Unsupported("only a stage of the model is here")
        with torch.no_grad():
            return profile(self.model, self._splitter.example, measure="time").to_json()

    def decode(self, data: bytes | memoryview, limit: int) -> Decoded:
        """Decode a boundary.

        Raises:
            BadBoundary: If it is no boundary, or one of another model.
            NoMatch: If the cut is not served.
        """
        start = perf_counter()
        boundary = Boundary.from_bytes(data, limit=limit, max_tensor_bytes=limit // 4)  # that is `max_message`
        if boundary.fingerprint != self.fingerprint:
            raise WrongModel(
                f"the boundary is of a model with the fingerprint {boundary.fingerprint:.80}, and {self.name} "
                f"here has {self.fingerprint}"
            )
        if boundary.at not in self.cuts:
            raise NoMatch(f"{self.name} is not served from {boundary.at!r:.200} on")
        return Decoded(boundary, perf_counter() - start)

    def key(self, boundary: Boundary) -> str | None:
        """The same for requests that can be computed together; None: it cannot be, with any."""
        joiner = self._joiner(boundary.at)
        return None if joiner is None else joiner.key(boundary)

    def compute(self, several: Sequence[Boundary]) -> list[Any]:
        """Run the model on each, several with the same key together."""
        at = several[0].at
        with torch.no_grad():
            if len(several) == 1:
                return [self._run(several[0])]
            joiner = self._joiner(at)
            assert joiner is not None
            rows = [joiner.rows(boundary) for boundary in several]
            with self._lock:
                for count in sorted({sum(rows), *rows} - {joiner.unit}):  # also those that each would have alone
                    joiner.check(self._run, count)
            return joiner.part(self._run(joiner.join(several)), rows)

    def encode(self, output: Any, at: str, codec: str) -> bytes:
        return of_output(output, self._spec.output, at, self.fingerprint).to_bytes(codec)

    def _run(self, boundary: Boundary) -> Any:
        if boundary.at == INPUTS:
            return to_inputs(boundary, self._spec.inputs, self.device).run(self.model)
        return self._parts(boundary.at)[1].run((boundary,), {}, release=True)

    def _parts(self, at: str) -> tuple[Stage | None, Stage]:
        """Head and tail; made when they are first needed, and compared with the whole model."""
        found = self._made.get(at)
        if found is not None:
            return found
        assert self._splitter is not None
        with self._lock:
            if at not in self._made:
                try:
                    head, tail = self._splitter.at(at)
                except Unsupported as error:
                    raise NoMatch(f"{self.name} is not served from {at!r} on: {error}") from error
                self._made[at] = head, tail
            return self._made[at]

    def _joiner(self, at: str) -> Batcher | None:
        """Return the batcher of a cut; made when it is first asked for."""
        if at in self._joiners or self._splitter is None:
            return self._joiners.get(at)
        head: Callable[..., Boundary]
        tail: Callable[[Boundary], Any]
        if at == INPUTS:
            head, tail = self._whole_head, self._run
        else:
            first, tail = self._parts(at)
            assert first is not None
            head = first
        with self._lock:
            if at not in self._joiners:
                self._joiners[at] = learn(head, tail, self._splitter.example)
            return self._joiners[at]

    def _whole_head(self, *args: Any, **kwargs: Any) -> Boundary:
        return of_inputs(Inputs(*args, **kwargs), self._spec.inputs, self.fingerprint)


def check_codec(name: str) -> None:
    """Raise before anything is computed if a reply cannot be encoded so."""
    try:
        parse_codec(name)
    except NoMatch as error:  # which is about cuts elsewhere here
        raise BadQuery(str(error)) from error


def _refuse_state(state: str | None) -> None:
    """Raise if a model carries state from run to run: a server answers many clients, in any order."""
    if state is not None:
        raise Unsupported(
            f"a server cannot run this model: it carries {state} from run to run, and requests of several clients "
            "would share it. Put the model in eval mode, have it take and return its state, or run its stages without "
            "a server"
        )

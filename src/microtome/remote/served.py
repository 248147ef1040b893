"""A model on the side of the server: its tails, each made once, run on what crosses."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from microtome.errors import BadQuery, NoMatch, Unsupported
from microtome.profile import profile
from microtome.remote.faults import WrongModel
from microtome.remote.payloads import INPUTS, of_output, to_inputs
from microtome.split.boundary import Boundary
from microtome.split.stage import Stage
from microtome.split.stages import Splitter


class Answer(NamedTuple):
    """What the model makes of a request.

    Attributes:
        at: The cut from which it went on.
        data: What it returned, as bytes.
        decode_s: Seconds to read the request; then to run, and to encode what was returned.
    """

    at: str
    data: bytes
    decode_s: float
    run_s: float
    encode_s: float


class Served:
    """What a server runs: a model from any of its cuts on, or one stage of it.

    Attributes:
        model: The model.
        fingerprint: Of its structure and weights.
        cuts: The addresses from which it can go on.
    """

    def __init__(self, model: nn.Module | Stage, inputs: Any = None) -> None:
        self._lock = threading.Lock()
        self._tails: dict[str, Stage] = {}
        self._splitter: Splitter | None = None
        if isinstance(model, Stage):
            if model.begins_at is None or model.ends_at is not None:
                raise BadQuery(f"a server runs the last stage of a model, and this is {model!r}")
            self.model, self.fingerprint = model.model, model.fingerprint
            self._tails[model.begins_at] = model
            self.cuts: tuple[str, ...] = (model.begins_at,)
            self._templates = model.templates
        else:
            self._splitter = splitter = Splitter(model, inputs)
            self.model, self.fingerprint = splitter.model, splitter.fingerprint
            self.cuts = (INPUTS, *(cut.at for cut in splitter.cuts))
            self._templates = splitter.templates

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def device(self) -> torch.device | None:
        first = next((one for one in self.model.parameters() if not one.is_meta), None)
        return None if first is None else first.device

    def profile(self) -> str:
        """What the model costs here, as JSON."""
        if self._splitter is None:
            raise Unsupported("only a stage of the model is here")
        with torch.no_grad():
            return profile(self.model, self._splitter.given, measure="time").to_json()

    def run(self, data: bytes, limit: int, codec: str) -> Answer:
        """What the model makes of bytes that crossed, as bytes.

        Raises:
            BadBoundary: If they are no boundary, or not one of a cut of this model.
            NoMatch: If the cut is not served.
        """
        started = perf_counter()
        boundary = Boundary.from_bytes(data, limit=limit)
        decoded = perf_counter()
        output = self.compute(boundary)
        ran = perf_counter()
        reply = of_output(output, self._templates.output, boundary.at, self.fingerprint).to_bytes(codec)
        return Answer(boundary.at, reply, decoded - started, ran - decoded, perf_counter() - ran)

    def compute(self, boundary: Boundary) -> Any:
        """What the model returns, from a cut on."""
        if boundary.fingerprint != self.fingerprint:
            raise WrongModel(
                f"the boundary is of a model with the fingerprint {boundary.fingerprint:.80}, and {self.name} "
                f"here has {self.fingerprint}"
            )
        with torch.no_grad():
            if boundary.at == INPUTS and INPUTS in self.cuts:
                return to_inputs(boundary, self._templates.inputs, self.device).run(self.model)
            return self.tail(boundary.at)(boundary)

    def tail(self, at: str) -> Stage:
        """The part of the model after a cut."""
        found = self._tails.get(at)
        if found is not None:
            return found
        if at not in self.cuts or self._splitter is None:
            raise NoMatch(f"{self.name} is not served from {at!r:.200} on")
        with self._lock, torch.no_grad():
            if at not in self._tails:
                try:
                    self._tails[at] = self._splitter.at(self._splitter.exactly(at))[-1]
                except Unsupported as error:
                    raise NoMatch(f"{self.name} is not served from {at!r} on: {error}") from error
            return self._tails[at]

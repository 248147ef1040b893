"""Serve a stage that another runtime runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from microtome.errors import BadBoundary, NoMatch, Unsupported
from microtome.remote.inference_backend import check_origin
from microtome.remote.payloads import INPUTS
from microtome.remote.stage_ref import StageRef, describe_stage
from microtome.remote.tensor_messages import encode_tensors, parse_tensors
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.schema import INPUT_SHAPES
from microtome.split.graph.exported_stage import ExportedStage


class ExportedBackend:
    """Computes requests with an exported stage; see `InferenceBackend`."""

    any_stage = False
    device: torch.device | None = None
    training = None
    device_name = "cpu"

    def __init__(self, stage: ExportedStage) -> None:
        details = stage.details
        if stage.ends_at is None and details.output is None:
            raise Unsupported(f"{stage.file} cannot be served: the model returns numbers that depend on shapes")
        self.stage = stage
        self.name, self.params, self.fingerprint = details.model, details.params, details.fingerprint
        self.cuts: tuple[str, ...] = (stage.begins_at or INPUTS,)
        self.ends_at = stage.ends_at

    def device_failure(self) -> None:
        """Return None: the runtime uses no accelerator."""

    def profile(self) -> NoReturn:
        raise Unsupported("the server has one exported stage of the model")

    def describe_stage(self) -> str:
        """Name the stage by its cuts."""
        return describe_stage(self.cuts[0], self.ends_at)

    def decode(self, data: bytes | memoryview, limit: int) -> Boundary:
        boundary = Boundary.from_bytes(data, limit=limit, max_tensor_bytes=limit // 4)
        check_origin(self, boundary.at, boundary.fingerprint, self.cuts)
        return boundary

    def decode_tensors(self, data: bytes | memoryview, limit: int) -> Boundary:
        boundary = parse_tensors(data, limit)
        check_origin(self, boundary.at, boundary.fingerprint, self.cuts)
        return boundary

    def complete(
        self, boundary: Boundary, stage: StageRef, exclusive: Callable[[], AbstractContextManager[None]]
    ) -> Boundary:
        """Return the boundary: the program takes tensors alone."""
        return boundary

    def check_stage(self, stage: StageRef, boundary: Boundary) -> None:
        if stage.begins_at != boundary.at:
            raise BadBoundary(f"expected a boundary of the cut at {stage.begins_at!r:.200}, got one of {boundary.at!r}")
        if stage.ends_at != self.ends_at:
            raise NoMatch(f"expected the stage {self.describe_stage()}, got that {stage}")

    def batch_key(self, boundary: Boundary, stage: StageRef | None = None) -> None:
        """Return None: whether rows are independent of each other is not known."""

    def divide(self, boundaries: Sequence[Boundary], stage: StageRef) -> NoReturn:
        raise AssertionError("requests have no batch keys")

    def compute(
        self, boundaries: Sequence[Boundary], stage: StageRef | None = None, deadline: float | None = None
    ) -> list[Any]:
        with torch.no_grad():
            return [self._run(boundary) for boundary in boundaries]

    def _run(self, boundary: Boundary) -> Any:
        if boundary.at != INPUTS:
            return self.stage.run_boundary(boundary)
        if boundary.facts.keys() == {INPUT_SHAPES}:
            return self.stage(**boundary.tensors)
        return self.stage.run_inputs(boundary)

    def encode(self, output: Boundary | dict[str, Any], at: str, codec: str) -> bytes:
        if isinstance(output, Boundary):
            return output.to_bytes(codec)
        made = self.stage.details.output
        assert made is not None
        tensors = list(output.values())
        used = {str(position): tensors[position] for position in made.tensors}
        facts = {"plain": made.plain, "tensors": list(map(str, made.tensors))}
        return Boundary(at, self.fingerprint, used, facts).to_bytes(codec)

    def encode_tensors(self, output: Boundary | dict[str, Any], at: str, codec: str) -> bytes:
        if isinstance(output, Boundary):
            return encode_tensors(output.tensors, output.at, self.fingerprint, codec)
        return encode_tensors(output, at, self.fingerprint, codec)

    def tail_for(self, split: bytes, limit: int) -> NoReturn:
        raise Unsupported("an exported stage keeps no state: run the steps of a sequence on a server of the model")

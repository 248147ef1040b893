"""Serve the training of a model: its actions on the wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from microtome.errors import BadBoundary, BadQuery, Unsupported
from microtome.inputs import no_inputs_error
from microtome.remote import protocol
from microtome.remote.inference_backend import check_origin, find_failure
from microtome.remote.stage_ref import StageRef
from microtome.remote.training.server_run import TrainingOptions, TrainingRun
from microtome.split.boundary.boundary import Boundary
from microtome.split.splitter import Splitter

ATTACH, FORWARD, BACKWARD, APPLY = range(4)
#: The names of the labels in their boundary.
_LABEL = "label{}"


class TrainingBackend:
    """Trains the tail of a model, and answers no other requests; see `InferenceBackend`.

    Attributes:
        training: The training run.
    """

    any_stage = False
    ends_at: str | None = None

    def __init__(self, model: nn.Module, inputs: Any, options: TrainingOptions) -> None:
        if inputs is None:
            raise no_inputs_error(model)
        splitter = Splitter(model, inputs, grad=True)
        self.model, self.fingerprint = splitter.model, splitter.fingerprint
        self.name = type(model).__name__
        self.cuts = tuple(cut.at for cut in splitter.cuts)
        self.training = TrainingRun(splitter, options)

    @property
    def params(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def device(self) -> torch.device | None:
        return next((parameter.device for parameter in self.model.parameters()), None)

    @property
    def device_name(self) -> str:
        return str(self.device or "cpu")

    def device_failure(self) -> str | None:
        return find_failure(self.device)

    def run_action(self, owner: object, action: Any, data: memoryview, codec: str, limit: int) -> tuple[bytes, Any]:
        """Run an action; return the boundary and the `TrainReply` of the reply.

        Args:
            owner: The stream on which it arrived.
            limit: The most memory that decoding may take.
        """
        run = self.training
        if action.kind == ATTACH:
            step = run.attach(owner, action.run, action.at, list(action.steps))
            return b"", protocol.TrainReply(step=step, keeps=run.options.folder is not None)
        if action.kind == APPLY:
            step, saved = run.apply(owner, action.step, action.number, skip=action.skips)
            return b"", protocol.TrainReply(step=step, saved=saved)
        if action.kind == FORWARD:
            split = len(data) - (action.labels_bytes if action.has_loss else 0)
            if split < 0:
                raise BadBoundary(f"expected {action.labels_bytes} bytes of labels, got {len(data)} bytes in all")
            boundary = self._decode(data[:split], limit)
            labels = _decode_labels(data[split:], limit) if action.has_loss else None
            reply = run.forward(owner, action.step, action.number, boundary, action.seed, labels)
        else:
            boundary = self._decode(data, limit)
            reply = run.backward(owner, action.step, action.number, action.forward, boundary)
        return reply.to_bytes(codec), None

    def _decode(self, data: memoryview, limit: int) -> Boundary:
        boundary = Boundary.from_bytes(data, limit=limit, max_tensor_bytes=limit // 4)
        check_origin(self, boundary.at, boundary.fingerprint, self.cuts)
        return boundary

    # -- requests of inference, which are refused ----------------------------------------------------------------------

    def decode(self, data: bytes | memoryview, limit: int) -> NoReturn:
        raise Unsupported("the server trains the model: connect with train=True")

    decode_tensors = decode

    def profile(self) -> NoReturn:
        raise Unsupported("the server trains the model: profile it elsewhere")

    def tail_for(self, split: bytes, limit: int) -> NoReturn:
        raise Unsupported("the server trains the model, and keeps no sessions")

    def complete(
        self, boundary: Any, stage: StageRef, exclusive: Callable[[], AbstractContextManager[None]]
    ) -> NoReturn:
        raise AssertionError("decode refuses such requests")

    def check_stage(self, stage: StageRef, boundary: Any) -> NoReturn:
        raise AssertionError("decode refuses such requests")

    def batch_key(self, boundary: Any, stage: StageRef | None = None) -> NoReturn:
        raise AssertionError("decode refuses such requests")

    def divide(self, boundaries: Sequence[Any], stage: StageRef) -> NoReturn:
        raise AssertionError("decode refuses such requests")

    def compute(
        self, boundaries: Sequence[Any], stage: StageRef | None = None, deadline: float | None = None
    ) -> NoReturn:
        raise AssertionError("decode refuses such requests")

    def encode(self, output: Any, at: str, codec: str) -> NoReturn:
        raise AssertionError("decode refuses such requests")

    encode_tensors = encode


def encode_labels(labels: Sequence[Tensor]) -> bytes:
    """Encode the labels of a batch."""
    if not all(isinstance(label, Tensor) for label in labels):
        raise BadQuery("expected labels that are a tensor, or a tuple of tensors")
    named = {_LABEL.format(index): label.detach().cpu() for index, label in enumerate(labels)}
    return Boundary("", "", named, {}).to_bytes()


def _decode_labels(data: memoryview, limit: int) -> list[Tensor]:
    tensors = Boundary.from_bytes(data, limit=limit, max_tensor_bytes=limit // 4).tensors
    names = [_LABEL.format(index) for index in range(len(tensors))]
    if {*names} != {*tensors}:
        raise BadBoundary(f"expected labels, got {', '.join(tensors)!r:.80}")
    return [tensors[name] for name in names]

"""The interface between a server and the model that computes its requests, in this process or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from microtome.devices.base import backend_of
from microtome.errors import NoMatch, RemoteError, describe_error
from microtome.remote.error_kinds import WrongModel
from microtome.remote.handshake import ModelIdentity
from microtome.remote.stage_ref import StageRef
from microtome.split.stage import Stage

if TYPE_CHECKING:
    from microtome.remote.training.server_run import TrainingRun


class EncodedOutput(NamedTuple):
    """The output of a request that another process computed, as a boundary; or the error that it ended with.

    Attributes:
        data: The bytes of the boundary, of any type with the buffer protocol; None: there was an error.
        kind: The kind of the error, as in `split.proto`.
        batch: The number of requests that were computed together.
    """

    data: Any = None
    kind: str = ""
    message: str = ""
    batch: int = 1

    def check(self) -> None:
        """Raise the error if there is one."""
        if self.data is None:
            raise RemoteError(self.message, self.kind)


class InferenceBackend(Protocol):
    """Decodes, computes and encodes the requests of a server.

    `ServedModel` computes in this process; `scale/ray` has one that calls replicas in a cluster.

    Attributes:
        name: The name of the model's class.
        params: The number of parameters of the whole model.
        fingerprint: The fingerprint of its structure and weights.
        cuts: The addresses of the cuts where its stages may begin.
        ends_at: The cut where the stages end; None: at the output.
        any_stage: Whether it runs the model between any two of its cuts.
        device: The device of this process that computes; None: there is none. `device_name` is that of requests.
        training: The training run of a server that trains, and answers no other requests; None: it does not.
    """

    fingerprint: str
    cuts: tuple[str, ...]

    @property
    def training(self) -> TrainingRun | None: ...

    @property
    def name(self) -> str: ...
    @property
    def params(self) -> int: ...
    @property
    def ends_at(self) -> str | None: ...
    @property
    def any_stage(self) -> bool: ...
    @property
    def device(self) -> torch.device | None: ...
    @property
    def device_name(self) -> str: ...

    def device_failure(self) -> str | None:
        """Return the error that makes the device unusable; None if it works."""

    def profile(self) -> str:
        """Profile the model, as JSON."""

    def decode(self, data: bytes | memoryview, limit: int) -> Any:
        """Return a boundary of this model, or an object with its cut as `at`."""

    def decode_tensors(self, data: bytes | memoryview, limit: int) -> Any:
        """Return the boundary that a message `Tensors` of a program without microtome is."""

    def check_stage(self, stage: StageRef, boundary: Any) -> None:
        """Raise if a request with a boundary cannot name this stage."""

    def complete(self, boundary: Any, stage: StageRef, exclusive: Callable[[], AbstractContextManager[None]]) -> Any:
        """Return a boundary with facts, if it has the shapes of the model's inputs instead.

        Args:
            exclusive: Opens a block in which no other thread computes.
        """

    def batch_key(self, boundary: Any, stage: StageRef | None = None) -> str | None:
        """Return the same key for requests that can be computed together; None: it must be computed alone."""

    def divide(self, boundaries: Sequence[Any], stage: StageRef) -> list[int]:
        """Return how many requests of one batch key are computed together, in order."""

    def compute(
        self, boundaries: Sequence[Any], stage: StageRef | None = None, deadline: float | None = None
    ) -> list[Any]:
        """Return the output of a stage for each boundary.

        Args:
            deadline: When no client waits any more, a time of `perf_counter`; None: never.
        """

    def encode(self, output: Any, at: str, codec: str) -> bytes | memoryview:
        """Encode an output of `compute`."""

    def encode_tensors(self, output: Any, at: str, codec: str) -> bytes:
        """Encode an output of `compute` as a message `Tensors`."""

    def tail_for(self, split: bytes, limit: int) -> Stage:
        """Return the last stage for the steps of a session."""


def find_failure(device: torch.device | None) -> str | None:
    """Return the error that makes a device unusable; None if it works.

    A failed kernel, as on an index that is out of range, can leave the process unable to use the device.
    """
    try:
        if device is not None:
            backend_of(device).synchronize(device)
    except RuntimeError as error:
        return describe_error(error)
    return None


def check_origin(model: ModelIdentity, at: str, fingerprint: str, cuts: Collection[str]) -> None:
    """Raise if a boundary is of another model, or of a cut that is not served.

    Raises:
        BadBoundary: If it is of another model.
        NoMatch: If the cut is not served.
    """
    if fingerprint != model.fingerprint:
        raise WrongModel(
            f"expected a boundary of {model.name} with the fingerprint {model.fingerprint}, got {fingerprint:.80}"
        )
    if at not in cuts:
        raise NoMatch(f"the cut of {model.name} at {at!r:.200} is not served")

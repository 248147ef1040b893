"""The gRPC server of an application: `mt.connect` sends requests to it, and replicas compute them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import ray
import torch
from ray.serve.handle import DeploymentHandle

from microtome.addresses import INPUT
from microtome.errors import BadBoundary, NoMatch, Unsupported
from microtome.remote.inference_backend import EncodedOutput, check_origin
from microtome.remote.security import ServerSecurity
from microtome.remote.server import Server
from microtome.remote.stage_ref import StageRef, describe_stage
from microtome.remote.worker import Limits
from microtome.scale.ray.stage_chain import StageChain
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.decoder import decode_header

#: The part of the grace period of Ray Serve in which an ingress answers what it has received.
_GRACE_S = 5.0
#: Addresses on which a server listens on all interfaces.
_ALL_INTERFACES = ("0.0.0.0", "[::]")


class DeployedModel(NamedTuple):
    """The model of an application.

    Attributes:
        name: The name of its class.
        params: The number of its parameters.
        fingerprint: The fingerprint of its structure and weights.
        cuts: The cuts where its stages begin, in order.
        ends_at: The cut where the last of them ends; None: at the output.
        device_name: The device of the replicas.
    """

    name: str
    params: int
    fingerprint: str
    cuts: tuple[str, ...]
    ends_at: str | None
    device_name: str


class IngressOptions(NamedTuple):
    """The options of the gRPC server, as `mt.serve` has them; `retry_s` is that of `StageChain`."""

    listen: str
    security: ServerSecurity
    limits: Limits
    retry_s: float


class EncodedBoundary(NamedTuple):
    """A boundary of which only the header was decoded: the replica decodes the rest.

    Attributes:
        at: The address of the cut.
        data: All of its bytes.
    """

    at: str
    data: memoryview


class ReplicaBackend:
    """Has the requests of a server computed by replicas; see `InferenceBackend`."""

    any_stage = False
    device: torch.device | None = None
    training = None

    def __init__(self, model: DeployedModel, chain: StageChain) -> None:
        self._model = model
        self._chain = chain
        self.name, self.params, self.fingerprint, self.cuts, self.ends_at, self.device_name = model

    def device_failure(self) -> None:
        """Return None: the replicas check their devices."""

    def profile(self) -> NoReturn:
        raise Unsupported(
            f"replicas have stages of the model alone: connect with at= one of "
            f"{', '.join(repr(cut or INPUT) for cut in self.cuts)}"
        )

    def decode(self, data: bytes | memoryview, limit: int) -> EncodedBoundary:
        header = decode_header(data, limit)
        check_origin(self, header["at"], header["fingerprint"], self.cuts)
        return EncodedBoundary(header["at"], memoryview(data))

    def decode_tensors(self, data: bytes | memoryview, limit: int) -> NoReturn:
        raise Unsupported("replicas take boundaries of microtome alone: send tensors to a server of mt.serve")

    def encode_tensors(self, output: EncodedOutput, at: str, codec: str) -> NoReturn:
        raise AssertionError("decode_tensors refuses such requests")

    def complete(self, boundary: EncodedBoundary, stage: StageRef, exclusive: Any) -> EncodedBoundary:
        return boundary

    def check_stage(self, stage: StageRef, boundary: EncodedBoundary) -> None:
        if stage.begins_at != boundary.at:
            raise BadBoundary(f"expected a boundary of the cut at {stage.begins_at!r:.200}, got one of {boundary.at!r}")
        if stage.ends_at != self.ends_at:
            raise NoMatch(f"expected the stage {describe_stage(boundary.at, self.ends_at)}, got that {stage}")

    def batch_key(self, boundary: EncodedBoundary, stage: StageRef | None = None) -> str:
        """Return the cut: the replicas find out which requests can be computed together."""
        return boundary.at

    def divide(self, boundaries: Sequence[EncodedBoundary], stage: StageRef) -> list[int]:
        return [len(boundaries)]

    def compute(
        self, boundaries: Sequence[EncodedBoundary], stage: StageRef | None = None, deadline: float | None = None
    ) -> list[EncodedOutput]:
        requests = [EncodedOutput(np.frombuffer(boundary.data, np.uint8)) for boundary in boundaries]
        return self._chain.compute(requests, self.cuts.index(boundaries[0].at), deadline)

    def encode(self, output: EncodedOutput, at: str, codec: str) -> bytes | memoryview:
        output.check()
        if codec == "raw":
            return memoryview(output.data)
        return Boundary.from_bytes(output.data).to_bytes(codec)

    def tail_for(self, split: bytes, limit: int) -> NoReturn:
        raise Unsupported("replicas keep no sessions: run the steps of a sequence on a server of mt.serve")


class Ingress:
    """A gRPC server in a process of the cluster. Ray Serve starts it, and again if it dies."""

    def __init__(self, model: DeployedModel, options: IngressOptions, *handles: DeploymentHandle) -> None:
        self._chain = StageChain(handles, options.retry_s)
        backend = ReplicaBackend(model, self._chain)
        credentials = options.security.credentials()
        self._server = Server(backend, options.listen, options.security, credentials, options.limits).start()

    async def address(self) -> str:
        """Return the address that clients of other nodes connect to."""
        host, _, port = self._server.address.rpartition(":")
        return f"{ray.util.get_node_ip_address() if host in _ALL_INTERFACES else host}:{port}"

    async def retries(self) -> int:
        """Return how often it has sent requests again."""
        return self._chain.retries

    async def check_health(self) -> None:
        if self._server.wait(0):
            raise RuntimeError("the gRPC server has stopped")

    def __del__(self) -> Any:
        """Answer what has been received, and stop; Ray Serve calls it when the replica ends."""
        if "_server" in vars(self):
            self._server.stop(_GRACE_S)

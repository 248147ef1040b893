"""A running application: its addresses, and its handle inside the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, Self

import numpy as np
import torch
from ray import serve
from ray.serve.handle import DeploymentHandle

from microtome.errors import BadInputs, RemoteError
from microtome.inputs import Inputs
from microtome.remote.inference_backend import EncodedOutput, check_origin
from microtome.remote.payloads import INPUTS, pack_inputs, unpack_output
from microtome.scale.ray.ingress import DeployedModel
from microtome.scale.ray.stage_chain import StageChain
from microtome.split.analysis.structure_spec import SplitSpec
from microtome.split.boundary.boundary import Boundary

#: Seconds within which all ingresses must have reported their address.
_ADDRESSES_S = 60.0


class ClusterHandle:
    """Runs the stages of an application from inside the cluster. It can be passed to tasks, actors and deployments.

    Calls from several threads are batched as those of clients are. From a coroutine, call it by `asyncio.to_thread`.
    """

    def __init__(
        self, handles: Sequence[DeploymentHandle], model: DeployedModel, spec: SplitSpec, retry_s: float
    ) -> None:
        self._arguments = (handles, model, spec, retry_s)
        self._chain = StageChain(handles, retry_s)
        self._model = model
        self._spec = spec
        self._stopped: str | None = None  # the name of the application

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stages on a boundary of the cut where one begins, or on the inputs of the model.

        Returns:
            The output of the model; the boundary where the last stage ends, if that is not the model's last.

        Raises:
            NoMatch: No stage begins there.
            RemoteError: A stage failed, or no replica can be reached.
        """
        if self._stopped is not None:
            raise stopped_error(self._stopped)
        boundary = self._pack(*args, **kwargs)
        check_origin(self._model, boundary.at, boundary.fingerprint, self._model.cuts)
        request = EncodedOutput(np.frombuffer(boundary.to_bytes(), np.uint8))
        reply = self._chain.compute_one(request, self._model.cuts.index(boundary.at))
        reply.check()
        output = Boundary.from_bytes(reply.data)
        if self._model.ends_at is not None:
            return output
        return unpack_output(output, self._spec.output, torch.device("cpu"))

    def close(self, name: str) -> None:
        """Refuse further calls of this handle, since its application was stopped."""
        self._stopped = name

    def _pack(self, *args: Any, **kwargs: Any) -> Boundary:
        if len(args) == 1 and not kwargs and isinstance(args[0], Boundary):
            return args[0]
        if INPUTS not in self._model.cuts:
            cuts = ", ".join(map(repr, self._model.cuts))
            raise BadInputs(
                f"expected a Boundary of the cut at {cuts}, got other inputs: the first stage is not deployed"
            )
        return pack_inputs(Inputs(*args, **kwargs), self._spec.inputs, self._model.fingerprint)

    def __reduce__(self) -> Any:
        return type(self), self._arguments

    def __repr__(self) -> str:
        return (
            f"<ClusterHandle of {self._model.name}, from {' or '.join(cut or '(input)' for cut in self._model.cuts)}>"
        )


def stopped_error(name: str) -> RemoteError:
    """Return the error of a call to an application that does not run."""
    return RemoteError(f"the application {name!r} was stopped: deploy it again", "UNREACHABLE")


class Deployment:
    """A running application. Use it as a context manager, or call `stop`.

    Attributes:
        name: Its name in Ray Serve.
        handle: Runs its stages from inside the cluster.
    """

    def __init__(self, name: str, ingress: DeploymentHandle, handle: ClusterHandle) -> None:
        self.name = name
        self.handle = handle
        self._ingress = ingress

    @property
    def address(self) -> str:
        """The address of an ingress, for `mt.connect`."""
        return self.addresses[0]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of all ingresses: `mt.connect(servers=[addresses])` uses those that are up."""
        application = serve.status().applications.get(self.name)
        if application is None:
            raise stopped_error(self.name)
        ingresses = application.deployments[self._ingress.deployment_name]
        expected = ingresses.replica_states.get("RUNNING", 0)
        addresses: set[str] = set()
        deadline = monotonic() + _ADDRESSES_S
        while len(addresses) < expected and monotonic() < deadline:  # any of them answers a call
            addresses.add(self._ingress.address.remote().result())
        if not addresses:
            raise RemoteError(
                f"the application {self.name!r} has no running ingress: see `serve status`", "UNREACHABLE"
            )
        return tuple(sorted(addresses))

    def stop(self) -> None:
        """Stop the replicas and the ingresses; those answer what they have received."""
        self.handle.close(self.name)
        if self.name in serve.status().applications:
            serve.delete(self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Deployment {self.name!r} of {self.handle!r}>"

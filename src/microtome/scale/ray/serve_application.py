"""`deploy`: the stages of a model as a Ray Serve application with a gRPC ingress."""

from __future__ import annotations

import re
import warnings
from functools import partial, reduce
from pathlib import Path
from typing import Any

import ray
import torch
from ray import serve
from ray.serve.deployment import Application

from microtome.errors import BadQuery, MicrotomeError, Unsupported, describe_error, describe_value
from microtome.inputs import Inputs
from microtome.remote.batching import make_examples
from microtome.remote.payloads import pack_inputs
from microtome.remote.security import is_loopback
from microtome.remote.server import parse_max_message
from microtome.remote.session_store import SessionLimits
from microtome.remote.worker import Limits
from microtome.scale.ray.deployment import ClusterHandle, Deployment
from microtome.scale.ray.ingress import DeployedModel, Ingress, IngressOptions
from microtome.scale.ray.options import BATCHES_PER_REPLICA, DeployOptions
from microtome.scale.ray.replica import ReplicaOptions, StageReplica
from microtome.scale.ray.resources import Demand, check_room
from microtome.scale.ray.stage_sources import PackedStage, StageSet
from microtome.split.boundary.boundary import Boundary
from microtome.split.stages import Stages
from microtome.units import parse_seconds

#: The deployment of the gRPC servers, and those of the stages by number.
_INGRESS, _STAGE = "ingress", "stage{}"
#: Errors in the traceback with which Ray Serve reports that a replica does not start: of microtome, and others.
_OWN_ERROR = re.compile(r"^microtome\.errors\.\w+: (.+)", re.MULTILINE)
_ANY_ERROR = re.compile(r"^([\w.]+Error: .+)", re.MULTILINE)


def deploy(stages: Stages | str | Path, *, name: str = "microtome", **options: Any) -> Deployment:
    """Run stages on a Ray cluster: a deployment of Ray Serve for each, behind a gRPC server for `mt.connect`.

    It joins the cluster of `ray.init`, or starts one on this machine. Each replica has the weights of its stage only.
    The requests of a replica or a node that dies are computed by another one, as long as the client waits.

    ```
    stages = mt.split(model, x, at="layer1")
    with deploy(stages, only=["layer1"], replicas=2, batch=8) as deployment:
        with mt.connect(model, x, deployment.address, at="layer1") as remote:
            remote(x)
    ```

    Args:
        stages: The stages of `mt.split`, whose weights go through Ray's object store, and stay there while this process
            lives; or a folder of `Stages.save` that all nodes see at the same path.
        name: The name of the application.
        options: Those of `DeployOptions`.

    Raises:
        BadQuery: An option is invalid, or the nodes have no room for the replicas and the gRPC servers. If others use
            the nodes, it warns, and waits.
        Unsupported: The stages cannot run in replicas, or a replica does not start.
    """
    if not isinstance(name, str) or not name:
        raise BadQuery(f"expected a name of the application, such as 'microtome', got {describe_value(name)}")
    app = StageApplication(stages, DeployOptions.parse(options))
    listen, security = app.options.listen, app.options.security
    if not is_loopback(listen) and (risks := security.risks()):
        warnings.warn(f"{listen} can be reached from other machines, and {risks}", RuntimeWarning, stacklevel=2)
    if not ray.is_initialized():
        ray.init()
    serve.start(proxy_location="Disabled")  # a no-op if Ray Serve runs
    if name in serve.status().applications:
        raise BadQuery(f"an application named {name!r} runs already: stop it, or pass another name")
    check_room(ray, app.demands())
    try:
        serve.run(app.bind(), name=name, route_prefix=None)
    except RuntimeError as error:
        reason = _find_reason(name) or describe_error(error)
        _delete(name)
        raise Unsupported(f"{name!r} did not start: {reason}") from error
    except BaseException:
        _delete(name)
        raise
    handles = [serve.get_deployment_handle(_STAGE.format(index), name) for index in app.indices]
    handle = ClusterHandle(handles, app.model, app.spec, app.retry_s)
    return Deployment(name, serve.get_deployment_handle(_INGRESS, name), handle)


def _delete(name: str) -> None:
    """Delete an application if it exists."""
    if name in serve.status().applications:
        serve.delete(name)


def _find_reason(name: str) -> str | None:
    """Return the error with which the replicas of an application ended; None: not known."""
    application = serve.status().applications.get(name)
    deployments = {} if application is None else application.deployments
    text = "\n".join(deployment.message for deployment in deployments.values())
    errors = _OWN_ERROR.findall(text) or _ANY_ERROR.findall(text)
    return errors[-1] if errors else None


def application(stages: Stages | str | Path, **options: Any) -> Application:
    """Return what `deploy` starts, for `serve run` and for the `import_path` of a RayService on Kubernetes.

    Args:
        stages: As for `deploy`. On Kubernetes a folder: weights in the object store are lost when the process ends that
            makes the application.
        options: Those of `deploy`, without `name`.
    """
    return StageApplication(stages, DeployOptions.parse(options)).bind()


class StageApplication:
    """An application of Ray Serve that is checked, and has not started.

    Attributes:
        indices: The numbers of the stages that it has.
        resources: The resources of each of them.
        model: What it tells clients.
        spec: The structures of the model's inputs and output.
    """

    def __init__(self, stages: Stages | str | Path, options: DeployOptions) -> None:
        self.options = options
        self._stages = StageSet(stages, options.model, options.inputs)
        self.indices = self._stages.resolve(options.only)
        self.resources = options.of_stages(len(self.indices))
        self.retry_s, self._window_s = parse_seconds(options.retry), parse_seconds(options.batch_window)
        options.security.credentials()  # checks the files
        self._limits = self._make_limits()
        if options.batch > 1 and self._stages.example is None:
            raise BadQuery("expected inputs= beside the folder, from which batching is verified, got batch= alone")
        for index in self.indices if isinstance(stages, Stages) else self.indices[:1]:
            self._stages.check(index)
        first = self._stages[self.indices[0]]
        self.spec = first.spec
        self.model = DeployedModel(
            name=type(first.model).__name__,
            params=sum(parameter.numel() for parameter in first.model.parameters()),
            fingerprint=first.fingerprint,
            cuts=tuple(self._stages.ref(index).begins_at for index in self.indices),
            ends_at=self._stages.ref(self.indices[-1]).ends_at,
            device_name=self.resources[-1].device,
        )
        self._examples = self._make_examples() if options.batch > 1 else {}

    def bind(self) -> Application:
        """Return the application, with the weights in the object store or in a folder."""
        sources = self._stages.sources(self.indices)
        references = [ray.put(source) if isinstance(source, PackedStage) else source for source in sources]
        handles = []
        for index, source, resources in zip(self.indices, references, self.resources, strict=True):
            options = resources.for_serve(_STAGE.format(index), self.options.batch)
            replica = self._replica_options(index, resources.device)
            handles.append(serve.deployment(StageReplica).options(**options).bind(source, replica))
        ingress = IngressOptions(self.options.listen, self.options.security, self._limits, self.retry_s)
        deployment = serve.deployment(Ingress).options(**self.options.ingress_for_serve(_INGRESS))
        return deployment.bind(self.model, ingress, *handles)

    def demands(self) -> list[Demand]:
        """Return the resources of all processes of the application."""
        stages = [stage.demand(index) for index, stage in zip(self.indices, self.resources, strict=True)]
        return [*stages, self.options.ingress_demand]

    def _make_limits(self) -> Limits:
        """Return the limits of a gRPC server, which has a thread for each batch that the replicas hold."""
        most = BATCHES_PER_REPLICA * sum(stage.replicas[1] for stage in self.resources)
        max_bytes = parse_max_message(self.options.max_message)
        return Limits(max_bytes, most, self.options.batch, self._window_s, SessionLimits(0))

    def _replica_options(self, index: int, device: str) -> ReplicaOptions:
        return ReplicaOptions(
            self._stages.ref(index),
            self.model.fingerprint,
            device,
            self._limits.total_bytes,
            self.options.batch,
            self._window_s,
            self._examples.get(index),
        )

    def _make_examples(self) -> dict[int, tuple[bytes, bytes, bytes]]:
        """Return what begins each deployed stage, on the example, from which its replicas verify batches."""
        assert self._stages.example is not None
        inputs = Inputs(*self._stages.example.args, **self._stages.example.kwargs)
        found: dict[int, tuple[bytes, bytes, bytes]] = {}
        try:
            with torch.no_grad():
                for index in range(self.indices[0], self.indices[-1] + 1):
                    one, other, double = make_examples(partial(self._run_head, index), inputs)
                    found[index] = one.to_bytes(), other.to_bytes(), double.to_bytes()
        except (MicrotomeError, RuntimeError, IndexError) as error:
            raise BadQuery(
                f"batch={self.options.batch} needs a batch of two examples, which the stages before the last cannot "
                f"compute here: {describe_error(error)}; leave out batch="
            ) from error
        return found

    def _run_head(self, count: int, *args: Any, **kwargs: Any) -> Boundary:
        """Run the first stages on inputs of the model."""
        if count == 0:
            return pack_inputs(Inputs(*args, **kwargs), self.spec.inputs, self.model.fingerprint)
        first = self._stages[0](*args, **kwargs)
        return reduce(lambda boundary, number: self._stages[number](boundary), range(1, count), first)

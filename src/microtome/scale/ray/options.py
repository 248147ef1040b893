"""The options of an application, checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self

from torch import nn

from microtome.endpoints import explain_endpoint
from microtome.errors import BadQuery
from microtome.remote.security import ServerSecurity
from microtome.results.cuts import Cut
from microtome.scale.ray.arguments import check_names, is_count
from microtome.scale.ray.resources import Demand, is_amount
from microtome.units import plural

#: Batches that a replica holds: one that is computed, and one that arrives meanwhile.
BATCHES_PER_REPLICA = 2
#: The options of every deployment of Ray Serve. It notices a dead replica by its health checks, whose default period is
#: 10 s. A log line for each call would take longer than the call.
_COMMON: dict[str, Any] = {
    "health_check_period_s": 2.0,
    "graceful_shutdown_wait_loop_s": 0.1,
    "max_constructor_retry_count": 2,
    "logging_config": {"enable_access_log": False},
}


@dataclass(frozen=True)
class DeployOptions:
    """The options of `microtome.scale.ray.deploy`.

    `replicas`, `autoscaling`, `num_cpus`, `num_gpus` and `resources` may be lists with one value for each stage that is
    deployed.

    Attributes:
        model: A class or function that builds the model of a folder.
        inputs: Example inputs for a folder, which batching needs.
        only: The stages to deploy, in a row: their numbers, or the cuts where they begin. None: all. Clients run those
            before them and, if the last one is left out, those after them.
        replicas: The replicas of each stage.
        autoscaling: The fewest and the most replicas of a stage, in place of `replicas`; Ray Serve chooses by the load.
        batch: The most requests that a replica computes together, if nothing that its stage returns depends on another
            request. Outputs then equal those of each request alone to the precision of the kernels.
        batch_window: How long the first request of a batch waits for others.
        num_cpus: The CPUs that Ray reserves for each replica; `num_gpus`: the GPUs, of which a fraction is allowed, and
            on which the stage then runs; `resources`: others, by name.
        listen: The address on which an ingress listens, on the node where it runs; port 0 picks a free one.
        ingresses: The number of gRPC servers; with a port other than 0, each on a node of its own.
        ingress_resources: Resources that the nodes of ingresses must have, such as `{"edge": 0.01}`.
        tls_cert: As for `mt.serve`, as are `tls_key`, `client_ca`, `token` and `max_message`. The files are at the same
            path here and on the nodes of the ingresses.
        retry: How long a request is sent again after a replica died, or waits for one, before the client is told that
            none can be reached.
    """

    model: Callable[[], nn.Module] | None = None
    inputs: Any = None
    only: Sequence[int | str | Cut] | None = None
    replicas: int | list[int] = 1
    autoscaling: tuple[int, int] | list[tuple[int, int] | None] | None = None
    batch: int = 1
    batch_window: float | str = "2ms"
    num_cpus: float | list[float] = 1
    num_gpus: float | list[float] = 0
    resources: dict[str, float] | list[dict[str, float] | None] | None = None
    listen: str = "127.0.0.1:7070"
    ingresses: int = 1
    ingress_resources: dict[str, float] | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None
    token: str | None = field(default=None, repr=False)
    max_message: int | str = "256MB"
    retry: float | str = "10s"

    def __post_init__(self) -> None:
        if error := explain_endpoint(self.listen, "an address to listen on such as 0.0.0.0:7070"):
            raise BadQuery(error)
        for name, number in (("batch", self.batch), ("ingresses", self.ingresses)):
            if not is_count(number):
                raise BadQuery(f"expected {name} of 1 or more, got {number!r:.200}")
        if not _is_resources(self.ingress_resources):
            raise BadQuery(
                f"expected ingress_resources as a dict such as {{'edge': 1}}, got {self.ingress_resources!r:.200}"
            )

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """Return the options of a call.

        Raises:
            BadQuery: There is no such option, or it is invalid.
        """
        check_names("deploy", options, [option.name for option in fields(cls)])
        return cls(**options)

    @property
    def security(self) -> ServerSecurity:
        return ServerSecurity(self.tls_cert, self.tls_key, self.client_ca, self.token)

    def of_stages(self, count: int) -> list[StageOptions]:
        """Return the options of each of so many stages: an option is one value for all, or a list with one for each.

        Raises:
            BadQuery: One is not what it should be.
        """
        a_number, resources = "a number of 0 or more", "a dict such as {'edge': 1}, or None"
        fixed = _per_stage("replicas", self.replicas, count, is_count, "a number of 1 or more")
        ranges = _per_stage("autoscaling", self.autoscaling, count, _is_range, "a pair such as (1, 4), or None")
        cpus = _per_stage("num_cpus", self.num_cpus, count, is_amount, a_number)
        gpus = _per_stage("num_gpus", self.num_gpus, count, is_amount, a_number)
        others = _per_stage("resources", self.resources, count, _is_resources, resources)
        numbers = [(one, one) if pair is None else pair for one, pair in zip(fixed, ranges, strict=True)]
        rows = zip(numbers, cpus, gpus, others, strict=True)
        return [StageOptions(number, cpu, gpu, dict(other or {})) for number, cpu, gpu, other in rows]

    def ingress_for_serve(self, name: str) -> dict[str, Any]:
        """Return the options of the deployment of the gRPC servers."""
        actor = {"num_cpus": 0, "resources": dict(self.ingress_resources or {})}
        options = {**_COMMON, "name": name, "num_replicas": self.ingresses, "ray_actor_options": actor}
        if self._has_one_port:
            options["max_replicas_per_node"] = 1
        return options

    @property
    def _has_one_port(self) -> bool:
        """Whether all ingresses have the same port, so that each needs a node of its own."""
        return not self.listen.endswith(":0")

    @property
    def ingress_demand(self) -> Demand:
        """The resources of the gRPC servers."""
        return Demand("ingresses", dict(self.ingress_resources or {}), self.ingresses, self._has_one_port)


class StageOptions(NamedTuple):
    """The resources of the replicas of one stage.

    Attributes:
        replicas: The fewest and the most of them; equal without autoscaling.
    """

    replicas: tuple[int, int]
    num_cpus: float
    num_gpus: float
    resources: Mapping[str, float]

    def demand(self, index: int) -> Demand:
        """Return the resources of the replicas of a stage."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return Demand(f"replicas of stage {index}", amounts, self.replicas[0])

    @property
    def device(self) -> str:
        return "cuda" if self.num_gpus else "cpu"

    def for_serve(self, name: str, batch: int) -> dict[str, Any]:
        """Return the options of the deployment of the stage."""
        fewest, most = self.replicas
        scale: dict[str, Any] = {"num_replicas": fewest}
        if fewest != most:
            scale = {"autoscaling_config": {"min_replicas": fewest, "max_replicas": most}}
        actor = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "resources": dict(self.resources)}
        ongoing = BATCHES_PER_REPLICA * batch  # single requests through a handle are batched in the replica
        return {**_COMMON, **scale, "name": name, "ray_actor_options": actor, "max_ongoing_requests": ongoing}


def _per_stage(name: str, value: Any, count: int, is_valid: Callable[[Any], bool], expected: str) -> list[Any]:
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise BadQuery(f"expected {name} for each of {plural(count, 'stage')}, got {len(values)}: {value!r:.200}")
    for one in values:
        if not is_valid(one):
            raise BadQuery(f"expected {expected} as {name}, or a list with one for each stage, got {one!r:.200}")
    return values


def _is_range(value: Any) -> bool:
    if value is None:
        return True
    is_pair = isinstance(value, tuple) and len(value) == 2 and all(map(is_count, value))
    return is_pair and value[0] <= value[1]


def _is_resources(value: Any) -> bool:
    if value is None:
        return True
    is_named = isinstance(value, dict) and all(isinstance(name, str) for name in value)
    return is_named and all(map(is_amount, value.values()))

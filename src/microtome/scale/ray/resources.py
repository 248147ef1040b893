"""Whether the nodes of a cluster have room for what a call starts: otherwise Ray waits, and does not say so."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from time import monotonic, sleep
from typing import Any, NamedTuple

from microtome.errors import BadQuery
from microtome.units import plural

#: Resources by name, such as `{"CPU": 2}`.
Resources = Mapping[str, float]

#: Seconds until resources of processes that have just ended are reported as free, and between looking.
_RELEASED_S, _POLL_S = 3.0, 0.2
#: Amounts of resources are sums of fractions.
_ROUNDING = 1e-9


class Demand(NamedTuple):
    """The processes of one kind that a call starts.

    Attributes:
        name: What they are, in the plural.
        resources: What each of them reserves.
        number: How many of them there are.
        one_per_node: Whether two of them cannot be on one node.
    """

    name: str
    resources: Resources
    number: int = 1
    one_per_node: bool = False

    def places(self, node: Resources) -> float:
        """Return how many of them a node has room for."""
        rooms = [node.get(name, 0.0) / amount for name, amount in self.resources.items() if amount]
        places = min((int(room + _ROUNDING) for room in rooms), default=inf)
        return min(places, 1) if self.one_per_node else places


def task_demand(name: str, num_cpus: Any, num_gpus: Any) -> Demand:
    """Return the resources of tasks.

    Raises:
        BadQuery: One is not a number of 0 or more.
    """
    for option, amount in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
        if not is_amount(amount):
            raise BadQuery(f"expected a number of 0 or more as {option}, got {amount!r:.200}")
    return Demand(name, {"CPU": num_cpus, "GPU": num_gpus})


def is_amount(value: Any) -> bool:
    """Whether a value can be an amount of a resource."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < inf


def check_room(ray: Any, demands: Sequence[Demand]) -> None:
    """Raise if the nodes can never have all processes at once; warn if they cannot now, since others use them.

    Raises:
        BadQuery: They can never.
    """
    check_totals(demands, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    deadline = monotonic() + _RELEASED_S
    while (waiting := find_waiting(demands, _free_resources())) is not None:
        if monotonic() > deadline:
            warnings.warn(
                f"the {waiting.name} wait until other work in the cluster ends: they need {_describe(waiting)} each, "
                "and the nodes have less that is free; see `ray status`",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        sleep(_POLL_S)


def _free_resources() -> list[Resources]:
    """Return what is free on each node."""
    from ray._private.state import available_resources_per_node  # public functions have sums over the nodes alone

    return list(available_resources_per_node().values())


def count_places(ray: Any, demand: Demand) -> int:
    """Return how many processes the cluster has room for at once; one if they reserve nothing."""
    places = sum(demand.places(node["Resources"]) for node in ray.nodes() if node["Alive"])
    return 1 if places == inf else int(places)


def check_totals(demands: Iterable[Demand], nodes: Sequence[Resources]) -> None:
    """Raise if the nodes can never have all processes at once.

    Raises:
        BadQuery: They can never.
    """
    needed = Counter[str]()
    for demand in demands:
        places = [demand.places(node) for node in nodes]
        if not any(places):
            names = [name for name, amount in demand.resources.items() if amount]
            most = ", ".join(f"{max((node.get(name, 0.0) for node in nodes), default=0.0):g} {name}" for name in names)
            raise BadQuery(
                f"expected a node with {_describe(demand)} for each of the {demand.name}, got nodes with at most "
                f"{most}: start another node first, or ask for less"
            )
        if sum(places) < demand.number:
            alone = ", each on a node of its own since they share a port" if demand.one_per_node else ""
            raise BadQuery(
                f"expected nodes with room for {demand.number} {demand.name}{alone}, got room for {sum(places)} on "
                f"{plural(len(nodes), 'node')}: start more nodes first, or ask for fewer {demand.name} or less for each"
            )
        for name, amount in demand.resources.items():
            needed[name] += amount * demand.number  # type: ignore[assignment]  # counters also count fractions
    for name, amount in needed.items():
        total = sum(node.get(name, 0.0) for node in nodes)
        if amount > total + _ROUNDING:
            raise BadQuery(
                f"expected nodes with {amount:g} {name} in all, got {total:g}: start more nodes first, or ask for "
                "fewer replicas, or less for each"
            )


def find_waiting(demands: Iterable[Demand], free: Iterable[Resources]) -> Demand | None:
    """Return the processes for which no room is left when they are placed one after the other; None: all have room."""
    left = [dict(node) for node in free]
    for demand in sorted(demands, key=lambda demand: -sum(demand.resources.values())):
        used = set[int]()
        for _ in range(demand.number if any(demand.resources.values()) or demand.one_per_node else 0):
            place = next(
                (number for number, node in enumerate(left) if number not in used and demand.places(node)), None
            )
            if place is None:
                return demand
            if demand.one_per_node:
                used.add(place)
            for name, amount in demand.resources.items():
                left[place][name] = left[place].get(name, 0.0) - amount
    return None


def _describe(demand: Demand) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in demand.resources.items() if amount)

"""Processes that nodes have no room for are errors or warnings before Ray waits for ever."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from microtome.errors import BadQuery
from microtome.scale.ray import resources
from microtome.scale.ray.options import DeployOptions
from microtome.scale.ray.resources import Demand, check_room, check_totals, count_places, find_waiting, task_demand


class Cluster:
    """The part of `ray` that lists nodes."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self._nodes = [{"Alive": True, "Resources": node} for node in nodes]
        self._nodes.append({"Alive": False, "Resources": {"CPU": 100.0, "GPU": 100.0}})

    def nodes(self) -> list[dict[str, Any]]:
        return self._nodes


PAIR = [{"CPU": 2.0}, {"CPU": 2.0, "edge": 1.0}]


@pytest.mark.parametrize(
    ("demands", "message"),
    [
        ([Demand("tasks", {"CPU": 1, "GPU": 1})], "a node with 1 CPU, 1 GPU for each of the tasks, .* 2 CPU, 0 GPU: "),
        ([Demand("replicas", {"CPU": 3})], "expected a node with 3 CPU for each of the replicas, .* at most 2 CPU"),
        ([Demand("replicas", {"CPU": 1.5}, 3)], "room for 3 replicas, got room for 2 on 2 nodes: start more nodes"),
        ([Demand("ingresses", {}, 3, True)], "room for 3 ingresses, each on a node .* share a port, got room for 2"),
        ([Demand("ingresses", {"edge": 0.1}, 2, True)], "room for 2 ingresses, each on .*, got room for 1"),
        (
            [Demand("ingresses", {"gate": 1})],
            "expected a node with 1 gate for each .* at most 0 gate",
        ),
        ([Demand("a", {"CPU": 1}, 3), Demand("b", {"CPU": 0.5}, 4)], "expected nodes with 5 CPU in all, got 4"),
    ],
)
def test_what_can_never_start_is_an_error(demands: list[Demand], message: str) -> None:
    with pytest.raises(BadQuery, match=message):
        check_totals(demands, PAIR)


def test_what_fits_is_accepted() -> None:
    check_totals([Demand("a", {"CPU": 0.1}, 20), Demand("b", {"CPU": 1}, 2), Demand("c", {}, 2, True)], PAIR)
    check_totals([Demand("d", {"CPU": 0, "GPU": 0}, 100)], PAIR)


def test_what_has_to_wait_for_other_work_is_found() -> None:
    half = Demand("halves", {"CPU": 0.5}, 3)
    assert find_waiting([half], [{"CPU": 1.0}, {"CPU": 0.5}]) is None
    assert find_waiting([half], [{"CPU": 0.9}, {"CPU": 0.9}]) is half
    assert find_waiting([half, Demand("ones", {"CPU": 1})], [{"CPU": 1.5}]) is half
    assert find_waiting([Demand("ingresses", {}, 2, True)], [{}, {}]) is None


def test_a_call_that_will_wait_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [{"CPU": 1.0}]
    monkeypatch.setattr(resources, "_free_resources", lambda: free)
    monkeypatch.setattr(resources, "_RELEASED_S", 0.0)
    monkeypatch.setattr(resources, "_POLL_S", 0.0)
    with pytest.warns(RuntimeWarning, match="the replicas wait until other work in the cluster ends: they need 2 CPU"):
        check_room(Cluster(*PAIR), [Demand("replicas", {"CPU": 2})])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_room(Cluster(*PAIR), [Demand("replicas", {"CPU": 1})])
        monkeypatch.setattr(resources, "_RELEASED_S", 60.0)
        monkeypatch.setattr(resources, "sleep", lambda _: free.append({"CPU": 2.0}))  # other work ends
        check_room(Cluster(*PAIR), [Demand("replicas", {"CPU": 2})])


@pytest.mark.parametrize(("cpus", "gpus", "count"), [(1, 0, 5), (2, 0, 2), (1, 1, 1), (0, 0.5, 2), (0, 0, 1)])
def test_there_are_as_many_workers_as_nodes_have_room_for(cpus: float, gpus: float, count: int) -> None:
    cluster = Cluster({"CPU": 3.0, "GPU": 1.0}, {"CPU": 2.0})
    assert count_places(cluster, task_demand("tasks", cpus, gpus)) == count


@pytest.mark.parametrize("amount", [-1, "1", True, None, float("nan")])
def test_amounts_that_are_no_numbers_are_refused(amount: Any) -> None:
    with pytest.raises(BadQuery, match="expected a number of 0 or more as num_cpus, got"):
        task_demand("tasks", amount, 0)
    with pytest.raises(BadQuery, match="expected a number of 0 or more as num_gpus, got"):
        task_demand("tasks", 1, amount)


def test_the_demand_of_an_application_is_that_of_its_stages_and_ingresses() -> None:
    options = DeployOptions(num_cpus=[3, 0], num_gpus=[0, 1], replicas=[1, 2], ingresses=2)
    stages = [stage.demand(index) for index, stage in enumerate(options.of_stages(2))]
    assert stages[0] == Demand("replicas of stage 0", {"CPU": 3, "GPU": 0})
    assert stages[1] == Demand("replicas of stage 1", {"CPU": 0, "GPU": 1}, 2)
    assert options.ingress_demand == Demand("ingresses", {}, 2, one_per_node=True)
    anywhere = DeployOptions(listen="127.0.0.1:0", ingress_resources={"edge": 1})
    assert anywhere.ingress_demand == Demand("ingresses", {"edge": 1})

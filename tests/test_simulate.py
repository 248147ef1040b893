"""The simulation of requests on their way over machines, compared with closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate import WORKLOADS, Costs, Step, engines, intervals, simulate
from tests.marks import examples

#: Seconds of processor time as measured on two cores, see `benchmarks/results/simulate.md`.
COSTS = Costs(1.71e-3, 1.74e-3, 5.58e-3, 6.44e-3)


def test_a_pipeline_has_the_rate_of_its_slowest_stage() -> None:
    steps = [Step(("a",), 1.0), Step(("b",), 3.0), Step(("c",), 2.0)]
    found = simulate(steps, dict.fromkeys("abc", 1), requests=100, window=8)
    assert (found.interval_s, found.bottleneck) == (3.0, "b")
    assert found.utilization == pytest.approx({"a": 1 / 3, "b": 1.0, "c": 2 / 3}, rel=0.02)
    assert found.latency_s == 8 * 3.0  # the window is full: each request waits for seven others


def test_one_request_at_once_takes_the_sum_of_its_steps() -> None:
    steps = [Step(("a",), 1.0), Step(("b",), 3.0)]
    found = simulate(steps, {"a": 1, "b": 1}, requests=100, window=1)
    assert found.interval_s == pytest.approx(4.0, rel=0.02)
    assert found.latency_s == 4.0


def test_processes_that_share_a_core_take_the_sum_of_their_stages() -> None:
    steps = [Step(("first", "core"), 1.0), Step(("second", "core"), 2.0)]
    found = simulate(steps, {"first": 1, "second": 1, "core": 1}, requests=100, window=8)
    assert (found.interval_s, found.bottleneck) == (3.0, "core")


def test_several_machines_of_a_stage_share_its_requests() -> None:
    steps = [Step(("sender",), 1.0), Step(("machines",), 6.0)]
    for machines, expected in ((2, 3.0), (3, 2.0), (6, 1.0), (12, 1.0)):
        found = simulate(steps, {"sender": 1, "machines": machines}, requests=60 * machines, window=4 * machines)
        assert found.interval_s == pytest.approx(expected, rel=0.01)


@st.composite
def systems(draw: st.DrawFn) -> tuple[list[Step], dict[str, int]]:
    capacities = {name: draw(st.integers(1, 5)) for name in "abc"}
    held = st.sets(st.sampled_from("abc"), min_size=1).map(sorted).map(tuple)
    steps = draw(st.lists(st.builds(Step, held, st.floats(0.01, 2.0)), min_size=1, max_size=4))
    return steps, capacities


@given(systems(), st.integers(1, 12))
@settings(max_examples=examples(60))
def test_no_rate_is_above_the_capacity_of_a_resource(system: tuple[list[Step], dict[str, int]], window: int) -> None:
    steps, capacities = system
    found = simulate(steps, capacities, requests=150, window=window)
    shortest = max(intervals(steps, capacities).values())
    assert found.interval_s >= shortest * (1 - 1e-9)
    assert all(0 <= busy <= 1 + 1e-9 for busy in found.utilization.values())
    # The window is never empty, so that at least one request advances at any time.
    assert found.interval_s <= 1.1 * sum(step.seconds for step in steps)
    assert found.latency_s >= sum(step.seconds for step in steps) * (1 - 1e-9)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("senders", [1, 10, 50])
def test_the_machines_of_the_table_are_never_busier_than_they_can_be(workload: object, senders: int) -> None:
    machines = 100
    for _, steps, capacities in engines(COSTS, workload, machines, senders):  # type: ignore[arg-type]
        found = simulate(steps, capacities, requests=40 * machines + 200, window=4 * machines)
        shortest = max(intervals(steps, capacities).values())
        assert shortest * (1 - 1e-9) <= found.interval_s <= 1.05 * shortest

"""Properties of every plan, against an exhaustive search."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise, product
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import microtome as mt
from microtome.errors import BadQuery
from microtome.plan.cost import DeviceChain, Placement
from microtome.plan.device_costs import DeviceCosts, cut_points
from microtome.plan.search import best_placements
from microtome.results.codec_costs import CodecCosts
from microtome.results.plan import Candidate, Objective
from tests.marks import examples
from tests.plan import synthetic

objectives = st.sampled_from(["latency", "throughput", "energy"])
amounts = st.floats(0.001, 10)
bandwidths = st.floats(1, 1e6)


@st.composite
def problems(draw: st.DrawFn, devices: int = 2, most: int = 6) -> dict[str, Any]:
    """A chain of layers, devices of all speeds, links of all kinds, and limits."""
    count = draw(st.integers(1, most))
    several = st.lists(amounts, min_size=count, max_size=count)
    cuts = synthetic.cuts([4 * size for size in draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count))])
    peaks = st.lists(st.integers(0, 1000), min_size=count, max_size=count)
    profiles = {
        f"d{at}": synthetic.profile(
            draw(several),
            device=draw(st.none() | several),
            joules=draw(several),
            peaks=draw(peaks),
        )
        for at in range(devices)
    }
    links = [
        mt.Link(draw(bandwidths), draw(st.floats(0, 5)), joules_per_byte=draw(st.none() | st.floats(0, 1)))
        for _ in range(devices - 1)
    ]
    limits = draw(st.dictionaries(st.sampled_from(sorted(profiles)), st.integers(300, 2000)))
    costs = synthetic.costs(
        cuts, ratio=draw(st.floats(0.1, 1)), encode_s=draw(st.floats(0, 1e-3)), decode_s=draw(st.floats(0, 1e-3))
    )
    return {"cuts": cuts, "devices": profiles, "links": links, "limits": limits, "costs": costs}


def planned(problem: dict[str, Any], **options: Any) -> mt.Plan | None:
    """The plan; None where nothing is within the limits."""
    try:
        return mt.plan(**{"codec": ("raw", "zstd"), **problem, **options})
    except BadQuery as error:
        if "within the limits" not in str(error):
            raise
        return None


def chain_of(problem: dict[str, Any], energy_of: tuple[str, ...] = ("d0",)) -> DeviceChain:
    cuts, profiles = problem["cuts"], problem["devices"]
    points = cut_points(cuts, list(profiles.values()))
    sides = [DeviceCosts(name, profile, points) for name, profile in profiles.items()]
    both = ("raw", "zstd")
    costs: list[CodecCosts] = [problem["costs"]] * len(sides)
    return DeviceChain(
        sides, problem["links"], points, cuts.output_bytes, both, both, costs, problem["limits"], energy_of
    )


def everything(chain: DeviceChain) -> list[Candidate]:
    """Every way to place the model, one by one."""
    found: list[Candidate] = []
    for used in range(len(chain.devices)):
        for where in combinations_with_replacement(range(chain.end), used):
            for codecs in product(("raw", "zstd"), repeat=used):
                crossings = list(zip(where, codecs, strict=True))
                again = [a == b or a[0] < b[0] for a, b in pairwise(crossings)]
                if all(again):  # the same place in another codec is no better than in the first of them
                    by_name = {(one.point, one.codec): one for one in chain.crossings}
                    placement: Placement = tuple(by_name[one] for one in crossings)
                    found.append(chain.price(placement))
    return [candidate for candidate in found if candidate.refused is None]


@given(problems(), objectives)
@settings(deadline=None, max_examples=examples(80))
def test_no_candidate_is_better_than_the_winner(problem: dict[str, Any], objective: Objective) -> None:
    plan = planned(problem, objective=objective)
    able = everything(chain_of(problem))
    assert (plan is None) == (not able)
    if plan is not None:
        assert plan.winner.rank(objective) == min(candidate.rank(objective) for candidate in able)
        assert [c.rank(objective) for c in plan if not c.refused] == sorted(
            candidate.rank(objective) for candidate in able
        )
        assert {c.name for c in plan.baselines} >= {"all on d0", "all on d1, raw input", "all on d1, input by zstd"}


@given(st.integers(2, 4).flatmap(lambda devices: problems(devices, most=3)), objectives)
@settings(deadline=None, max_examples=examples(80))
def test_dynamic_programming_finds_what_trying_everything_does(problem: dict[str, Any], objective: Objective) -> None:
    chain = chain_of(problem, energy_of=tuple(problem["devices"])[:2])
    able = everything(chain)
    found = [chain.price(placement) for placement in best_placements(chain, objective)]
    assert bool(found) == bool(able)
    for used in range(len(chain.devices)):
        of_all = [candidate.rank(objective) for candidate in able if len(candidate.at) == used]
        of_best = [candidate.rank(objective) for candidate in found if len(candidate.at) == used]
        assert len(of_best) == bool(of_all)
        for rank in of_best:  # of those that are the best but for rounding, one
            assert rank[0] == pytest.approx(min(of_all)[0])
            assert any(rank == pytest.approx(other) for other in of_all)


@given(problems(3, most=4), objectives)
@settings(deadline=None, max_examples=examples(30))
def test_a_plan_over_several_devices_has_the_best_of_all(problem: dict[str, Any], objective: Objective) -> None:
    plan = planned(problem, objective=objective)
    able = everything(chain_of(problem))
    assert (plan is None) == (not able)
    if plan is not None:
        assert plan.winner.rank(objective)[0] == pytest.approx(min(candidate.rank(objective) for candidate in able)[0])


@given(problems(), objectives, st.lists(bandwidths, min_size=1, max_size=20))
@settings(deadline=None, max_examples=examples(80))
def test_who_wins_at_a_bandwidth_is_who_wins_there(
    problem: dict[str, Any], objective: Objective, tried: list[float]
) -> None:
    plan = planned(problem, objective=objective)
    if plan is None:
        return
    spans = plan.over_bandwidths()
    assert (spans[0].from_bytes_per_s, spans[-1].until_bytes_per_s) == (0, inf)
    assert all(a.until_bytes_per_s == b.from_bytes_per_s for a, b in pairwise(spans))
    assert all(span.from_bytes_per_s < span.until_bytes_per_s for span in spans)
    edges = [8 * span.from_bytes_per_s * by for span in spans[1:] for by in (0.999, 1.0, 1.001)]
    link = problem["links"][0]
    for bandwidth in (*tried, *edges):
        there = mt.Link(bandwidth, link.rtt_s, joules_per_byte=link.joules_per_byte)
        at = planned({**problem, "links": [there]}, objective=objective)
        assert at is not None
        span = next(span for span in spans if bandwidth / 8 <= span.until_bytes_per_s)
        same = next(c for c in at if (c.at, c.codecs) == (span.candidate.at, span.candidate.codecs))
        assert same.score(objective) == pytest.approx(at.winner.score(objective))


@given(problems(), bandwidths, st.floats(1, 100))
@settings(deadline=None, max_examples=examples(50))
def test_a_faster_link_never_makes_the_best_latency_longer(
    problem: dict[str, Any], bandwidth: float, times: float
) -> None:
    rtt = problem["links"][0].rtt_s
    slow, fast = (planned({**problem, "links": [mt.Link(by * bandwidth, rtt)]}) for by in (1, times))
    if slow is not None and fast is not None:
        assert fast.winner.latency_s <= slow.winner.latency_s * (1 + 1e-12)


@given(problems(3))
@settings(deadline=None, max_examples=examples(30))
def test_steps_sum_up_to_the_latency_and_bytes_to_what_is_sent(problem: dict[str, Any]) -> None:
    chain = chain_of(problem)
    for candidate in everything(chain):
        assert sum(step.seconds for step in candidate.steps) == pytest.approx(candidate.latency_s)
        assert candidate.slowest_s <= candidate.latency_s * (1 + 1e-12)
        assert len(candidate.at) == len(candidate.codecs) == len(candidate.sent_bytes)

"""Plans of synthetic chains, whose costs can be computed by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadFile, BadQuery, NoMatch
from microtome.plan import arguments
from microtome.plan.codec_benchmark import codec_costs
from microtome.results.codec_costs import CodecCosts
from microtome.results.cuts import Cuts
from microtome.results.rows import Tensor
from tests.plan import synthetic

SIZES = [4000, 400, 40]
EDGE = synthetic.profile([1.0, 2.0, 4.0], joules=[10.0, 20.0, 40.0])
CLOUD = synthetic.profile([0.1, 0.2, 0.4])
LINK = mt.Link("800bps", rtt="2s")  # 100 bytes a second
CUTS = synthetic.cuts(SIZES)
COSTS = synthetic.costs(CUTS)
MODEL = nn.Sequential(nn.Linear(1, 1))


def planned(cuts: Cuts = CUTS, edge: Any = EDGE, cloud: Any = CLOUD, link: Any = LINK, **options: Any) -> mt.Plan:
    return mt.plan(cuts, edge=edge, cloud=cloud, link=link, **{"costs": COSTS, **options})


def test_a_latency_is_the_sum_of_its_terms() -> None:
    plan = planned(codec=("raw", "zstd"), costs=synthetic.costs(CUTS, encode_s=0.01, decode_s=0.001))
    raw = next(c for c in plan if c.at == ("l1",) and c.codecs == ("raw",))
    # l0 and l1 on the edge: 3 s; 400 bytes: 1 + 4 s; l2 on the cloud: 0.4 s; 40 bytes back: 1 + 0.4 s
    assert [(step.what, step.where, round(step.seconds, 9)) for step in raw.steps] == [
        ("run", "edge", 3.0),
        ("encode", "edge", 0.0),
        ("send", "cloud", 5.0),
        ("decode", "cloud", 0.0),
        ("run", "cloud", 0.4),
        ("back", "cloud", 1.4),
    ]
    assert raw.latency_s == pytest.approx(9.8)
    assert raw.slowest_s == pytest.approx(4.0)  # the link: the way there takes longer than the way back
    # half of the bytes: 1 + 2 s; 400 bytes encoded: 4 s; decoded: 0.4 s
    packed = next(c for c in plan if c.at == ("l1",) and c.codecs == ("zstd",))
    assert packed.latency_s == pytest.approx(3 + 4 + 3 + 0.4 + 0.4 + 1.4)
    assert packed.slowest_s == pytest.approx(7.0)  # the edge, which runs and encodes
    assert packed.name == "l1 by zstd"


def test_the_time_of_a_measured_stage_takes_the_place_of_the_profile() -> None:
    plan = planned(stages={"edge": {(None, "l1"): 0.5}, "cloud": {("l1", None): 0.1}}, slower={"edge": 2})
    at = {c.at: [step.seconds for step in c.steps if step.what == "run"] for c in plan if c.codecs == ("raw",)}
    assert at[("l1",)] == pytest.approx([1.0, 0.1])  # 2 x 0.5 s
    assert at[("l0",)] == pytest.approx([2.0, 0.6])  # as in the profile
    assert any("time of edge from the input to l1 is that of a stage that was measured" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": {"phone": {(None, "l1"): 1.0}}}, "expected stages of edge or cloud, got those of 'phone'"),
        ({"stages": {"edge": {(None, "l9"): 1.0}}}, "no plan can cut at 'l9', where a stage begins or ends"),
        ({"stages": {"edge": {"l1": 1.0}}}, r"expected where a stage begins and ends, such as \(None, 'layer1'\)"),
        ({"stages": {"edge": {(None, "l1"): 0}}}, "expected the seconds of the stage .*, more than 0, got 0"),
        ({"stages": {"edge": {(None, "l1"): 1.0}}, "objective": "energy"}, "energy of compiled and exported stages"),
    ],
)
def test_mistakes_in_measured_stages_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadQuery, match=message):
        planned(**options)


def test_a_bandwidth_is_a_link_without_delay() -> None:
    assert planned(link="800bps") == planned(link=mt.Link("800bps", rtt=0.0))


def test_the_whole_model_on_one_device_is_always_listed() -> None:
    plan = planned()
    baselines = {candidate.name: candidate for candidate in plan.baselines}
    assert list(baselines) == ["all on edge", "all on cloud, input by zstd", "all on cloud, raw input"]
    assert baselines["all on edge"].latency_s == pytest.approx(7.0)
    # 1000 bytes: 1 + 10 s, half of them: 1 + 5 s; 0.7 s on the cloud; 1.4 s back
    assert baselines["all on cloud, raw input"].latency_s == pytest.approx(13.1)
    assert baselines["all on cloud, input by zstd"].latency_s == pytest.approx(8.1)
    assert all(name in [c.name for c in planned(limits={"edge": 150})] for name in baselines)


@pytest.mark.parametrize("codec", ["raw", ["raw", "fp16"], ["zstd"], "fp16+zstd"])
@pytest.mark.parametrize("measured", [False, True])
def test_named_codecs_are_the_only_ones(codec: Any, measured: bool) -> None:
    names = [codec] if isinstance(codec, str) else codec
    costs = codec_costs(CUTS, ["raw", "zstd", "fp16", "fp16+zstd"]) if measured else None
    plan = planned(codec=codec, costs=costs)
    assert {name for candidate in plan for name in candidate.codecs} == {*names}
    inputs = {"raw": "raw input"} | {name: f"input by {name}" for name in ("zstd", "fp16", "fp16+zstd")}
    expected = {"all on edge", *(f"all on cloud, {inputs[name]}" for name in names)}
    assert {candidate.name for candidate in plan.baselines} == expected
    assert not any("no codec was named" in note for note in plan.notes)


def test_inputs_are_also_compressed_if_no_codec_is_named() -> None:
    plan = planned(costs=None)
    assert {name for candidate in plan for name in candidate.codecs if any(candidate.at)} == {"raw"}
    assert "no codec was named: cuts are tried raw, and the inputs raw and by zstd" in plan.notes


def test_the_winner_depends_on_the_link() -> None:
    assert planned(link=mt.Link("8bps")).winner.name == "all on edge"
    slow_codec = synthetic.costs(CUTS, encode_s=1e-3)
    assert planned(link=mt.Link("1Gbps"), costs=slow_codec).winner.name == "all on cloud, raw input"
    slow_start = synthetic.profile([0.01, 2.0, 4.0])
    small = synthetic.cuts([40, 400, 40])
    middle = planned(small, slow_start, link=mt.Link("800bps"), costs=synthetic.costs(small))
    assert (middle.winner.name, middle.at) == ("l0", "l0")


def test_a_gpu_takes_the_longer_of_its_work_and_its_launches() -> None:
    cloud = synthetic.profile([0.1, 0.2, 0.4], device=[0.3, 0.1, 0.1])
    plan = planned(cloud=cloud)
    # from l1 on: host 0.4, device 0.1; from the beginning: host 0.7, device 0.5; from l0 on: host 0.6, device 0.2
    assert plan["l1"].seconds("run", where="cloud") == pytest.approx(0.4)
    assert plan["all on cloud, raw input"].seconds("run", where="cloud") == pytest.approx(0.7)
    slow = planned(cloud=synthetic.profile([0.1, 0.2, 0.4], device=[0.1, 0.1, 1.0]))
    assert slow["l1"].seconds("run", where="cloud") == pytest.approx(1.0)
    assert any("on a GPU" in note for note in slow.notes)


def test_energy_is_that_of_the_edges_part_and_of_its_radio() -> None:
    plan = planned(objective="energy", link=mt.Link("800bps", joules_per_byte=0.5))
    energies = {candidate.name: candidate.energy_j for candidate in plan}
    assert energies["all on edge"] == pytest.approx(70)
    assert energies["l1"] == pytest.approx(30 + (400 + 40) * 0.5)
    assert energies["all on cloud, input by zstd"] == pytest.approx((500 + 40) * 0.5)
    assert plan.winner.name == "all on edge"
    free = planned(objective="energy")
    assert free.winner.name == "all on cloud, input by zstd"  # both take nothing: the faster one
    assert any("set joules_per_byte of the link" in note for note in free.notes)
    assert free["l1"].energy_j == pytest.approx(30)


def test_energy_above_idle_is_taken_where_it_is_known() -> None:
    edge = synthetic.profile([1.0, 2.0, 4.0], joules=[10.0, 20.0, 40.0], net=[1.0, 2.0, 4.0])
    plan = planned(edge=edge, objective="energy")
    assert plan["l1"].energy_j == pytest.approx(3)
    assert any("without idle power" in note for note in plan.notes)


def test_energy_of_both_devices_may_count() -> None:
    cloud = synthetic.profile([0.1, 0.2, 0.4], joules=[100.0, 200.0, 400.0])
    plan = planned(cloud=cloud, objective="energy", energy_of=("edge", "cloud"))
    assert plan["l1"].energy_j == pytest.approx(30 + 400)
    assert plan.winner.name == "all on edge"


def test_energy_of_a_call_around_a_cut_is_shared_by_its_time() -> None:
    """The root has 8 J of its own beside its layers': half of its time is over at the cut."""
    edge = synthetic.profile([1.0, 1.0], joules=[10.0, 20.0])
    root = replace(edge.total, own=replace(edge.total.own, energy_j=8.0), energy_j=38.0)
    two = synthetic.cuts([40, 40])
    whole = replace(edge, calls=(root, *edge.calls[1:]))
    plan = planned(two, whole, synthetic.profile([1.0, 1.0]), costs=synthetic.costs(two))
    assert plan["l0"].energy_j == pytest.approx(10 + 4)
    assert plan["all on edge"].energy_j == pytest.approx(38)


def test_memory_is_the_parameters_of_a_part_and_its_peak() -> None:
    edge = synthetic.profile([1.0, 2.0, 4.0], peaks=[5000, 50, 500])
    plan = planned(edge=edge, cloud=edge)
    assert plan["all on edge"].memory_bytes == (300 + 5000, 0)
    assert plan["l0"].memory_bytes == (100 + 5000, 200 + 500)
    assert plan["l1"].memory_bytes == (200 + 5000, 100 + 500)
    measured = replace(edge, calls=tuple(replace(row, measured_peak_bytes=row.peak_bytes + 7) for row in edge))
    assert planned(edge=measured, cloud=edge)["l1"].memory_bytes == (200 + 5007, 100 + 500)


def test_limits_refuse_candidates_and_keep_them_listed() -> None:
    plan = planned(link=mt.Link("1bps"), limits={"edge": "150B"})
    refused = {candidate.name: candidate.refused for candidate in plan if candidate.refused}
    assert "edge would need 300 B, above its limit of 150 B" in str(refused["all on edge"])
    assert set(refused) == {"all on edge", "l1", "l2"}
    assert plan.winner.refused is None
    assert [candidate.refused is None for candidate in plan] == sorted(
        [candidate.refused is None for candidate in plan], reverse=True
    )
    assert plan.limits == {"edge": 150}
    with pytest.raises(BadQuery, match="no placement of the model is within the limits: for the best, edge would need"):
        planned(limits={"edge": 1, "cloud": 1})


def test_a_slower_device_multiplies_the_times_of_its_profile() -> None:
    plan = planned(slower={"edge": 10})
    assert plan["l1"].seconds("run", where="edge") == pytest.approx(30.0)  # 10 times 1 + 2 s
    assert plan["l1"].seconds("run", where="cloud") == pytest.approx(0.4)
    assert plan["l1"].energy_j == planned()["l1"].energy_j
    assert "edge: measured times multiplied by 10; its energy stays as measured" in plan.notes
    assert "cloud: measured times multiplied by 2" in planned(slower={"cloud": 2}).notes
    with pytest.raises(BadQuery, match="expected slower of 'edge', 'cloud', got one of 'phone'"):
        planned(slower={"phone": 2})
    with pytest.raises(BadQuery, match="expected a factor above 0 on the times of 'edge', got 0"):
        planned(slower={"edge": 0})


def test_a_plan_without_a_cut_names_the_device_that_runs_the_model() -> None:
    def named(name: str) -> mt.Plan:
        return planned(strategy=lambda candidates: next(one for one in candidates if one.name == name))

    assert (named("all on edge").at, named("all on edge").sole_device) == (None, "edge")
    assert (named("all on cloud, raw input").at, named("all on cloud, raw input").sole_device) == (None, "cloud")
    assert (named("l1").at, named("l1").sole_device) == ("l1", None)


def test_jitter_is_said_beside_the_latency() -> None:
    plan = planned(link=mt.Link("800bps", jitter="30ms"))
    assert plan["l1"].late_s == pytest.approx(0.06)
    assert plan["all on edge"].late_s == 0


def test_throughput_is_that_of_the_slowest_step() -> None:
    plan = planned(link=mt.Link("8000bps", rtt="10s"), objective="throughput")  # 1000 bytes a second
    # all on the edge: 7 s; l0: max(1, 4000 / 1000, 0.6); l1: max(3, 0.4, 0.4); raw input: max(0, 1, 0.7)
    assert plan["l0"].slowest_s == pytest.approx(4)
    assert plan["l1"].slowest_s == pytest.approx(3)
    assert plan.winner.name == "all on cloud, input by zstd"  # max(0.5, 0.7)
    assert plan.winner.throughput_per_s == pytest.approx(1 / 0.7)


def test_lossy_codecs_are_used_if_they_are_asked_for() -> None:
    assert all(set(candidate.codecs) <= {"raw", "zstd"} for candidate in planned(costs=None))
    asked = planned(costs=None, codec=("raw", "fp16"))
    half = next(c for c in asked if c.at == ("l0",) and c.codecs == ("fp16",))
    assert half.sent_bytes[0] == pytest.approx(2000, abs=128)  # parts begin at a multiple of 64


def test_a_strategy_chooses_among_those_that_limits_allow() -> None:
    seen: list[Any] = []

    def fewest_bytes(candidates: tuple[Any, ...]) -> Any:
        seen.extend(candidates)
        return min((c for c in candidates if c.at and c.at[0]), key=lambda c: sum(c.sent_bytes))

    plan = planned(strategy=fewest_bytes, limits={"edge": 250})
    assert plan.at == "l1"
    assert plan.strategy == "fewest_bytes"
    assert all(candidate.refused is None for candidate in seen)
    assert seen[0].latency_s == min(candidate.latency_s for candidate in seen)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (lambda candidates: None, "expected one of its candidates from the strategy, got None"),
        (lambda candidates: candidates[99], "the strategy raised IndexError"),
    ],
)
def test_a_strategy_that_fails_is_named(strategy: Any, message: str) -> None:
    with pytest.raises(BadQuery, match=message):
        planned(strategy=strategy)


def test_plans_and_costs_are_written_and_read(tmp_path: Path) -> None:
    for name, profile in {"edge": EDGE, "cloud": CLOUD}.items():
        profile.to_json(tmp_path / f"{name}.json")
    COSTS.to_json(tmp_path / "codecs.json")
    CUTS.to_json(tmp_path / "cuts.json")
    assert mt.plan(tmp_path / "cuts.json", edge=EDGE, cloud=CLOUD, link=LINK, costs=COSTS) == planned()
    plan = planned(edge=tmp_path / "edge.json", cloud=str(tmp_path / "cloud.json"), costs=tmp_path / "codecs.json")
    assert plan == planned()
    plan.to_json(tmp_path / "plan.json")
    assert mt.load(tmp_path / "plan.json") == plan
    assert mt.load(tmp_path / "plan.json").over_bandwidths() == plan.over_bandwidths()
    assert mt.load(tmp_path / "codecs.json") == COSTS
    assert planned(costs={"edge": COSTS, "cloud": tmp_path / "codecs.json"}).winner == plan.winner
    broken = (tmp_path / "plan.json").read_text().replace('"chosen": 0', '"chosen": 99')
    (tmp_path / "plan.json").write_text(broken)
    with pytest.raises(BadFile, match="plan.json. is corrupt: ValueError: its winner is candidate 99"):
        mt.load(tmp_path / "plan.json")


def test_cuts_below_the_depth_of_a_profile_are_left_out_and_counted() -> None:
    shallow = replace(CLOUD, calls=tuple(replace(row, elapsed_s=None) if row.path == "l1" else row for row in CLOUD))
    plan = planned(cloud=shallow)
    assert {candidate.at for candidate in plan} == {(), (None,), ("l0",), ("l2",)}
    assert "1 of 3 cuts are left out: a profile has no times so deep" in plan.notes


def test_refused_cuts_are_no_candidates() -> None:
    plan = planned(synthetic.cuts(SIZES, refused=["l0"]))
    assert ("l0",) not in {candidate.at for candidate in plan}
    assert any("the model cannot be cut at 1 calls" in note for note in plan.notes)


def test_a_plan_is_asked_by_address_or_name() -> None:
    plan = planned(codec=("raw", "zstd"))
    assert plan["l1"] == next(c for c in plan if c.at == ("l1",))
    assert plan["l1#0"] == plan["l1"]
    assert plan["all on edge"].at == ()
    assert len(plan) == len(list(plan)) == 9
    with pytest.raises(NoMatch, match="l9"):
        plan["l9"]
    with pytest.raises(BadQuery, match="expected the address of a cut"):
        plan[3]  # type: ignore[index]


def test_a_module_that_ran_again_is_said_with_its_index() -> None:
    """As `microtome.split` takes it."""
    import torch
    from torch import nn

    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(8, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 8))
    with torch.no_grad():
        p = mt.profile(model, "1x8", measure="time", repeat=3)
    plan = mt.plan(mt.cuts(model, "1x8"), edge=p, cloud=p, link=LINK, strategy=lambda them: them[1])
    first, again = plan["1#0"], plan["1#1"]
    assert (first.at, again.at) == (("1#0",), ("1#1",))
    assert first.seconds("run", where="edge") < again.seconds("run", where="edge")
    with pytest.raises(NoMatch, match=r"'1' ran 2 times: say which of '1#[01]', '1#[01]'"):
        plan["1"]
    head, tail = mt.split(model, "1x8", at=first.at[0])
    assert torch.equal(tail(head(torch.ones(1, 8))), model(torch.ones(1, 8)))


@pytest.mark.parametrize("name", zoo.names())
def test_every_cut_of_a_real_model_is_a_candidate(name: str) -> None:
    import torch

    model, inputs = zoo.build(name)
    with torch.no_grad():
        p = mt.profile(model, inputs, measure="time", repeat=3)
    cuts = mt.cuts(model, inputs)
    plan = mt.plan(cuts, edge=p, cloud=p, link=mt.Link("100Mbps", rtt="5ms"))
    at = {candidate.at[0]: candidate for candidate in plan if candidate.at and candidate.at[0]}
    assert at.keys() == {cut.at for cut in cuts}
    assert all(at[cut.at].sent_bytes == (cut.nbytes,) for cut in cuts)
    heads = [at[cut.at].seconds("run", where="edge") for cut in cuts]
    assert 0 < heads[0] < heads[-1]
    assert all(sum(candidate.memory_bytes) > 0 for candidate in plan)
    assert plan.winner.name == "all on edge"


def without_times(profile: Any, **change: Any) -> Any:
    return replace(profile, calls=tuple(replace(row, elapsed_s=None, **change) for row in profile))


def but(address: str, **change: Any) -> Any:
    """The profile of the cloud, with one call that is another."""
    return replace(CLOUD, calls=tuple(replace(row, **change) if row.address == address else row for row in CLOUD))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"edge": None}, "a plan needs edge, cloud and link, or devices and links: there is no edge"),
        ({"link": None}, "there is no link"),
        ({"link": 20}, "expected a microtome.Link, such as Link"),
        ({"link": "20"}, "expected a bandwidth, such as 20Mbps"),
        ({"devices": [EDGE, CLOUD]}, "expected edge, cloud and link, or devices and links, got both"),
        ({"cuts": 5}, r"expected the cuts as a Cuts of mt\.cuts\(model, x\), or a file of one, got 5"),
        ({"cuts": MODEL}, "of mt.cuts.*, got a Sequential$"),
        ({"edge": 5}, "expected 'edge' as a Profile of mt.profile.*, or a file of one, got 5"),
        ({"cloud": MODEL}, r"'cloud' as a Profile of mt\.profile\(model, x, measure=.time.\), .*, got a Sequential$"),
        ({"link": MODEL}, "expected a microtome.Link, such as .*, got a Sequential$"),
        (
            {"edge": without_times(EDGE, time_s=None)},
            r"'edge' has no times: .* with measure=\[\"time\"\]$",
        ),
        ({"cloud": without_times(CLOUD)}, "'cloud' is of an older microtome"),
        ({"edge": replace(EDGE, model="Other")}, "the cuts are of a Chain, and the profile of 'edge' is of a Other"),
        ({"cloud": synthetic.profile([1.0, 1.0])}, "the profile of 'cloud' has no call 'l2'"),
        (
            {"cloud": synthetic.profile([1.0, 1.0, 1.0], inputs=2000)},
            "expected inputs of 250 float32, .*got inputs of 500 float32 in the profile of 'cloud': .*same batch",
        ),
        ({"objective": "speed"}, "expected objective 'latency', 'energy', 'throughput' or 'training', got 'speed'"),
        (
            {"objective": "energy", "edge": CLOUD},
            r"'edge' has no energy: .* with measure=\[\"energy\"\], or estimate",
        ),
        (
            {"objective": "energy", "edge": replace(CLOUD, unavailable={"energy": "no sensor"})},
            "has no energy .no sensor.: profile the model there",
        ),
        ({"energy_of": ["moon"]}, "expected energy_of 'edge', 'cloud', got 'moon'"),
        ({"energy_of": ["cloud"]}, "the profile of 'cloud' has no energy"),
        ({"limits": {"moon": 1}}, "expected limits of 'edge', 'cloud', got one of 'moon'"),
        ({"limits": {"edge": "much"}}, "got 'much'"),
        ({"codec": ()}, "a plan needs a codec"),
        ({"codec": "lz4"}, "expected a codec whose costs were measured .'raw', 'zstd'., got 'lz4'"),
        ({"costs": {"edge": COSTS}}, "the costs of codecs on 'cloud' are missing"),
        ({"costs": 7}, "expected the costs of codecs as a CodecCosts of .*, or a file of one, got 7"),
        ({"codec": 7}, r"expected a codec or several, such as 'raw' or \['raw', 'zstd'\], got 7"),
        ({"energy_of": "edge"}, r"expected energy_of as names of devices, such as \['edge'\], got 'edge'"),
        ({"energy_of": 1}, "expected energy_of as names of devices, .*, got 1"),
        (
            {"costs": synthetic.costs(synthetic.cuts([SIZES[0]]))},
            "codec costs of these cuts of Chain, got none for 'l1'",
        ),
        (
            {"costs": synthetic.costs(synthetic.cuts([4]))},
            "expected .* bytes of 'l0', as in the cuts; got 4 in the costs of codecs on 'edge': measure",
        ),
        ({"costs": replace(COSTS, model="Other")}, "a Chain, and the costs of codecs on 'edge' are of a Other"),
        (
            {"cloud": synthetic.profile([1.0] * 4)},
            "the profile of 'cloud' has 5 calls, and the Chain that was cut has 4",
        ),
        ({"cloud": but("l1", type="Conv2d")}, "expected a Linear at 'l1', .*got a Conv2d at 'l1' in .*'cloud'"),
        ({"cloud": but("l1", outputs=(Tensor((7,), "float32"),))}, "from 'l1', as in the cuts; got 7 from 'l1' in"),
        (
            {"cloud": but("l1", macs=2)},
            "expected at most 1 MACs in 'l1', as in the cuts; got 2 in the profile of 'cloud'",
        ),
        (
            {"cuts": replace(CUTS, params=7)},
            "expected 7 parameters, as in the cuts; got 75 parameters in the profile of 'edge'",
        ),
        (
            {"cuts": replace(CUTS, param_bytes=7)},
            "expected 7 bytes of parameters, as in the cuts; got .* in the profile of 'edge'",
        ),
        ({"cloud": but("", macs=8)}, "expected 3 MACs, as in the cuts; got 8 MACs in the profile of 'cloud'"),
    ],
)
def test_what_is_missing_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NoMatch if "has no call" in message or "calls, and" in message else BadQuery, match=message):
        planned(**options)


#: Each argument of `plan` that has a value by device, with an example.
BY_DEVICE = {"slower": '{"edge": 10}', "limits": '{"edge": "512MB"}', "devices": '{"phone": profile, "cloud": profile}'}


@pytest.mark.parametrize("name", BY_DEVICE)
@pytest.mark.parametrize(
    ("value", "got"), [(10, "10"), ("512MB", "'512MB'"), (EDGE, "a Profile"), ({10}, "a set"), (MODEL, "a Sequential")]
)
def test_an_argument_by_device_that_is_no_dict_is_refused(name: str, value: Any, got: str) -> None:
    options = {"devices": value, "links": [LINK], "edge": None, "cloud": None, "link": None}
    expected = f"expected {name} as a dict by device, such as {BY_DEVICE[name]}, got {got}"
    with pytest.raises(BadQuery, match=f"^{re.escape(expected)}$"):
        planned(**(options if name == "devices" else {name: value}))


@pytest.mark.parametrize(("links", "got"), [(LINK, "a Link"), ("20Mbps", "'20Mbps'"), (5, "5")])
def test_links_that_are_no_list_are_refused(links: Any, got: str) -> None:
    with pytest.raises(BadQuery, match=rf"expected links as a list, such as \['20Mbps', '1Gbps'\], got {got}$"):
        mt.plan(CUTS, devices=[EDGE, CLOUD], links=links)


@pytest.mark.parametrize("devices", [[EDGE], {"edge": EDGE}, {}])
def test_a_chain_of_less_than_two_devices_is_refused(devices: Any) -> None:
    expected = f"expected a chain of two devices or more, got {len(devices)}: pass two devices or more"
    with pytest.raises(BadQuery, match=expected):
        mt.plan(CUTS, devices=devices, links=[])


def net(width: int = 4, layers: int = 2, kernel: int = 3, bias: bool = True, act: Any = nn.ReLU) -> nn.Module:
    first = nn.Conv2d(3, width, kernel, padding=kernel // 2, bias=bias)
    others = [nn.Conv2d(width, width, 3, padding=1) for _ in range(layers)]
    return nn.Sequential(first, act(), *others, nn.Flatten(), nn.Linear(64 * width, 10)).eval()


X = torch.zeros(1, 3, 8, 8)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("model", "x"),
    [
        (net(layers=3), X),
        (net(layers=1), X),
        (net(width=8), X),
        (net(kernel=5), X),
        (net(kernel=1), X),
        (net(bias=False), X),
        (net(act=nn.GELU), X),
        (net().double(), X.double()),
        (net(), torch.zeros(2, 3, 8, 8)),
    ],
)
def test_times_of_another_model_or_of_other_inputs_are_refused(
    model: nn.Module, x: torch.Tensor, old: bool, tmp_path: Path
) -> None:
    cuts, ours = mt.cuts(net(), X), mt.profile(net(), X, measure="time", repeat=3)
    if old:  # a file of a microtome that did not write how many parameters there are
        data = json.loads(cuts.to_json())
        del data["calls"], data["params"], data["param_bytes"]
        (tmp_path / "cuts.json").write_text(json.dumps(data))
        cuts = mt.load(tmp_path / "cuts.json")
    mt.plan(cuts, edge=ours, cloud=ours, link=LINK)
    theirs = mt.profile(model, x, measure="time", repeat=3)
    for edge, cloud in ((theirs, ours), (ours, theirs)):
        with pytest.raises((BadQuery, NoMatch), match="the profile of '(edge|cloud)'"):
            mt.plan(cuts, edge=edge, cloud=cloud, link=LINK)


class Repeated(nn.Module):
    """However often it repeats, it has the same calls, parameters and MACs."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=times, dilation=times), nn.Conv2d(4, 4, 3, padding=1)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        for _ in range(self.times):
            y = y.sin()
        out: torch.Tensor = self.last(y)
        return out


def test_other_work_with_equal_parameters_and_macs_is_refused(tmp_path: Path) -> None:
    cuts = mt.cuts(Repeated(1).eval(), X)
    ours, theirs = (mt.profile(Repeated(times).eval(), X, measure="time", repeat=3) for times in (1, 10))
    assert (ours.total.params, ours.total.macs) == (theirs.total.params, theirs.total.macs)
    assert ours.total.flops is not None
    assert theirs.total.flops == ours.total.flops + 9 * 4 * 8 * 8  # a sine is one operation
    (tmp_path / "cuts.json").write_text(cuts.to_json())
    for one in (cuts, mt.load(tmp_path / "cuts.json")):
        mt.plan(one, edge=ours, cloud=ours, link=LINK)
        with torch.no_grad():  # as a server profiles
            mt.plan(one, edge=ours, cloud=mt.profile(Repeated(1).eval(), X, measure="time", repeat=3), link=LINK)
        with pytest.raises(BadQuery, match="expected .* FLOPs, as in the cuts; got .* FLOPs in the profile of 'cloud'"):
            mt.plan(one, edge=ours, cloud=theirs, link=LINK)


def test_an_unknown_codec_lists_those_there_are() -> None:
    with pytest.raises(NoMatch, match="no codec 'zip'.*raw, zstd"):
        planned(codec="zip")


def test_devices_need_links_between_them() -> None:
    with pytest.raises(BadQuery, match="3 devices, 1 links"):
        mt.plan(CUTS, devices=[EDGE, CLOUD, CLOUD], links=[LINK])


def test_codecs_are_measured_on_noise_or_on_what_a_model_gives() -> None:
    import torch
    from torch import nn

    from microtome.split.cuts.cuts import cuts as cuts_of

    model, x = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8)), torch.randn(4, 64)
    found = cuts_of(model.eval(), x)
    noise = codec_costs(found, ("raw", "zstd"))
    real = codec_costs(found, ("raw", "zstd"), model=model, inputs=x)
    assert isinstance(real, CodecCosts)
    assert noise.costs["raw"]["1"].nbytes == real.costs["raw"]["1"].nbytes == 4 * 4096 * 4
    assert real.costs["zstd"]["1"].nbytes < 0.8 * noise.costs["zstd"]["1"].nbytes  # half of it are zeros
    assert all(cost.encode_s > 0 and cost.decode_s > 0 for cost in real.costs["zstd"].values())
    assert (noise.values, real.values) == ("noise in the shapes that cross", "what a run of the model gave")
    assert "with noise" in planned(costs=None).codec_costs
    assert planned().codec_costs == "measured on one machine for all devices (a CPU, with made values)"
    each = planned(costs={"edge": COSTS, "cloud": COSTS}).codec_costs
    assert each == "measured on each device (edge: a CPU, with made values; cloud: a CPU, with made values)"
    with pytest.raises(
        mt.MicrotomeError, match="expected float32 of 4x64 for .* in the run, got none: use the inputs that the cuts"
    ):
        codec_costs(found, "raw", model=model, inputs=torch.randn(5, 64))


@pytest.mark.parametrize(
    "options", [{"energy_of": ["moon"]}, {"objective": "energy", "edge": CLOUD}, {"limits": {"edge": "much"}}]
)
def test_invalid_options_raise_before_codecs_are_measured(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(arguments, "codec_costs", lambda *args: measured.append(args))
    with pytest.raises(BadQuery):
        planned(costs=None, **options)
    assert not measured


def test_candidates_of_a_chain_that_cut_at_the_same_place_are_told_apart() -> None:
    cuts = synthetic.cuts([4000, 400, 40])
    devices = dict.fromkeys(("a", "b", "c"), synthetic.profile([0.1, 2.0, 4.0]))
    link = mt.Link("8Kbps")
    plan = mt.plan(cuts, devices=devices, links=[link, link], costs=synthetic.costs(cuts), codec=["raw"])
    # Devices are equally fast, so that the fewest bytes are best: those after the last layer.
    assert [candidate.name for candidate in plan if not candidate.is_baseline] == ["l2 to b", "l2 to c"]

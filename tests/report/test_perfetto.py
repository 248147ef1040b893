"""Files for Perfetto and speedscope."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadQuery
from microtome.report.trace_events.profile import device_slices, host_slices
from microtome.results.link import LinkMeasurement
from microtome.results.measurements import Load
from microtome.results.plan import Plan
from microtome.results.requests import HopRecord, RequestLog, RequestRecord
from microtome.results.rows import Row
from microtome.results.sweep import CutTiming, Sweep
from tests.report.timed import check_chrome, check_speedscope


@pytest.fixture(scope="module")
def p() -> mt.Profile:
    return mt.profile(*zoo.build("tiny-vit"), measure=["time"], repeat=3, warmup=1)


def timed(profile: mt.Profile, times: Iterator[float], ends: Iterator[float]) -> mt.Profile:
    """The profile with other times, whatever they are."""
    rows = tuple(
        replace(row, time_s=next(times), elapsed_s=next(ends), device_s=next(times), elapsed_device_s=next(ends))
        for row in profile
    )
    return replace(profile, calls=rows)


def test_calls_are_slices_in_each_other(p: mt.Profile, tmp_path: Path) -> None:
    p.to_perfetto(tmp_path / "p.json")
    events = check_chrome((tmp_path / "p.json").read_text())
    slices = [event for event in events if event["ph"] == "X"]
    assert sorted(event["name"] for event in slices) == sorted(row.address or row.type for row in p)
    (root,) = [event for event in slices if event["name"] == "ViT"]
    assert root["ts"] == 0
    assert root["dur"] == pytest.approx(1e6 * (p.total.time_s or 0), abs=1e-3)


def test_a_slice_begins_as_long_before_its_end_as_the_call_took() -> None:
    rows = (
        Row(address="", type="Net", height=2, time_s=10e-6, elapsed_s=10e-6),
        Row(address="a", parent="", depth=1, time_s=2e-6, elapsed_s=3e-6),
        Row(address="b", parent="", depth=1, time_s=5e-6, elapsed_s=9e-6),
        Row(address="c", parent="", depth=1, time_s=4e-6, elapsed_s=12e-6),  # as if it ended after the run
    )
    p = replace(mt.profile(*zoo.build("tiny-resnet")), calls=rows)
    assert [(one.begin_ns, one.end_ns) for one in host_slices(p)] == [
        (0, 10000),
        (1000, 3000),
        (4000, 9000),
        (9000, 10000),
    ]
    assert device_slices(p) == []


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_slices_nest_whatever_was_measured(p: mt.Profile, data: st.DataObject) -> None:
    seconds = st.floats(0, 1e-2)
    drawn = data.draw(st.lists(seconds, min_size=4 * len(p), max_size=4 * len(p)))
    half = len(drawn) // 2
    odd = timed(p, iter(drawn[:half]), iter(drawn[half:]))
    check_chrome(odd.to_perfetto())
    assert len(check_speedscope(odd.to_speedscope())["profiles"]) == 2


def test_live_bytes_are_a_curve_that_reaches_the_peak(p: mt.Profile) -> None:
    curve = [event["args"]["bytes"] for event in check_chrome(p.to_perfetto()) if event["name"] == "live"]
    assert max(curve) == p.total.peak_bytes
    bare = replace(p, timeline=None)  # as in files of before: of each layer, the most that lives in it
    curve = [event["args"]["bytes"] for event in check_chrome(bare.to_perfetto()) if event["name"] == "live"]
    assert max(curve) == max(row.peak_bytes for row in p if row.height == 1)


def test_power_is_a_curve_where_it_was_sampled(p: mt.Profile) -> None:
    load = Load(cpu=0.5, gpu=None, memory=0.1, gpu_memory=None, watts=7.5, samples=3)
    sampled = replace(p, calls=tuple(replace(row, load=load, measured_peak_bytes=100) for row in p))
    events = check_chrome(sampled.to_perfetto())
    assert {event["args"]["watts"] for event in events if event["name"] == "power"} == {7.5}
    assert {event["args"]["bytes"] for event in events if event["name"] == "measured peak"} == {100}
    assert {event["args"]["fraction"] for event in events if event["name"] == "CPU"} == {0.5}
    assert not [event for event in events if event["name"] == "GPU"]


def test_names_are_written_as_they_are(tmp_path: Path) -> None:
    model = nn.Sequential()
    for name in ("smile \U0001f600", "half of one \ud800"):
        model.add_module(name, nn.Linear(4, 4))
    p = mt.profile(model.eval(), "2x4", measure=["time"], repeat=3, warmup=1)
    p.to_perfetto(tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text("utf-8")
    assert "\\ud83d" not in text  # Perfetto does not read such pairs
    names = {event["name"] for event in check_chrome(text) if event["ph"] == "X"}
    assert names == {"Sequential", "smile \U0001f600", "half of one ?"}


def test_calls_that_were_not_timed_are_left_out() -> None:
    p = mt.profile(*zoo.build("tiny-vit"), measure=["time"], depth=1, repeat=3, warmup=1)
    slices = [event["name"] for event in check_chrome(p.to_perfetto()) if event["ph"] == "X"]
    assert sorted(slices) == sorted(row.address or row.type for row in p if row.time_s is not None)
    check_speedscope(p.to_speedscope())


def test_a_profile_without_times_says_what_to_do() -> None:
    p = mt.profile(*zoo.build("tiny-resnet"))
    for write in (p.to_perfetto, p.to_speedscope):
        with pytest.raises(BadQuery, match='has no times.*make it with measure=\\["time"\\]'):
            write()


def test_speedscope_opens_and_closes_every_call(p: mt.Profile, tmp_path: Path) -> None:
    p.to_speedscope(tmp_path / "p.json")
    data = check_speedscope((tmp_path / "p.json").read_text())
    assert len(data["profiles"][0]["events"]) == 2 * len(p)
    assert data["shared"]["frames"][1]["name"].endswith(f"({p.calls[1].type})")


# -- over several devices ----------------------------------------------------------------------------------------------


def sent(began: float, **more: Any) -> RequestRecord:
    parts = {"head_s": 0.002, "encode_s": 0.001, "wire_s": 0.004, "queue_s": 0.001, "tail_s": 0.003, "decode_s": 0.001}
    return RequestRecord("layer1", **{"total_s": 0.013, **parts, **more}, began=began, attempts=1)


def ran(*requests: RequestRecord) -> RequestLog:
    return RequestLog("Net", "host:7070", "cuda", 4, 2.0, len(requests), requests)


def test_a_request_goes_over_and_comes_back() -> None:
    events = check_chrome(ran(sent(100.0)).to_perfetto())
    arrows = [event for event in events if event["ph"] in "sf"]
    # 2 ms of the head, 1 ms to encode, half of 4 ms on the wire: there after 5 ms; 4 ms there and 2 ms back.
    assert [(event["ph"], event["pid"], event["ts"]) for event in arrows] == [
        ("s", 1, 3000),
        ("f", 2, 5000),
        ("s", 2, 9000),
        ("f", 1, 11000),
    ]
    assert [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 2] == ["queue", "tail", "back"]


def test_requests_that_overlap_are_in_lanes_of_their_own() -> None:
    events = check_chrome(ran(sent(1.0), sent(1.001), sent(2.0)).to_perfetto())
    lanes = [event["tid"] for event in events if event["ph"] == "X" and event["name"].startswith("request")]
    assert lanes == [1, 2, 1]


def test_a_request_that_ended_here_has_no_arrow() -> None:
    late = sent(0.0, where="edge", total_s=0.5, tail_s=0.1, reason="late")
    events = check_chrome(ran(late).to_perfetto())
    assert not [event for event in events if event["ph"] in "sf"]
    (wait,) = [event for event in events if event["name"] == "wait"]
    assert wait["dur"] == pytest.approx(1e6 * (0.5 - 0.1 - 0.003))


def test_a_request_over_a_chain_visits_the_server_of_each_stage() -> None:
    hops = HopRecord("a:1", "stem", 0.0, 0.001, 0.004, 0.0), HopRecord("b:1", "layer1", 0.0, 0.0, 0.005, 0.0)
    log = ran(sent(0.0, wire_s=0.006, total_s=0.025, last_s=0.002, later=("layer1", "layer2"), hops=hops))
    events = check_chrome(log.to_perfetto())
    # 3 ms here, 2 ms to the first server, 5 ms there, 2 ms to the second one, 5 ms there, and 2 ms back.
    assert [(event["ph"], event["pid"], event["ts"]) for event in events if event["ph"] in "sf"] == [
        ("s", 1, 3000),
        ("f", 2, 5000),
        ("s", 2, 10000),
        ("f", 3, 12000),
        ("s", 3, 17000),
        ("f", 1, 19000),
    ]
    (last,) = [event for event in events if event["name"] == "last stage"]
    assert (last["pid"], last["ts"], last["dur"]) == (1, 20000, 2000)
    every = json.loads(log.to_perfetto())["traceEvents"]
    names = [event["args"]["name"] for event in every if event["name"] == "process_name"]
    assert names == ["edge, Net", "from stem, a:1", "from layer1, b:1"]


def test_when_requests_began_is_kept_in_files(tmp_path: Path) -> None:
    made = ran(sent(7.0), sent(7.5))
    made.to_json(tmp_path / "run.json")
    assert mt.load(tmp_path / "run.json").to_perfetto() == made.to_perfetto()
    data = json.loads((tmp_path / "run.json").read_text())
    for one in data["requests"]:
        del one["began_s"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    old = mt.load(tmp_path / "old.json")
    with pytest.raises(BadQuery, match="does not say when its requests began"):
        old.to_perfetto()
    assert "began_s" not in old.as_dict()["requests"][0]


def test_a_sweep_is_one_request_after_the_other() -> None:
    rows = (
        CutTiming("", "raw", wire_s=0.004, tail_s=0.01, total_s=0.015),
        CutTiming("layer1", "raw", head_s=0.002, wire_s=0.002, tail_s=0.008, codec_there_s=0.001, total_s=0.014),
        CutTiming("layer2", "raw", failed="it could not be cut"),
        CutTiming(None, "raw", tail_s=0.03, total_s=0.03),
    )
    link = LinkMeasurement(*[0.0] * len(LinkMeasurement._fields))
    sweep = Sweep("Net", "1x3", "host:7070", "cpu", "raw", 5, link, rows, "", "", {})
    events = check_chrome(sweep.to_perfetto())
    names = [event["name"] for event in events if event["ph"] == "X" and "sent_bytes" in event.get("args", {})]
    assert names == ["(input)", "layer1", "all here"]
    assert sum(event["ph"] == "s" for event in events) == 4


def test_a_plan_has_a_process_for_each_device(p: mt.Profile) -> None:
    model, x = zoo.build("tiny-vit")
    plan: Plan = mt.plan(mt.cuts(model, x), edge=p, cloud=p, link=mt.Link("1Gbps", rtt="1us"))
    events = check_chrome(plan.to_perfetto())
    whole = [event for event in events if event["ph"] == "X" and "energy_j" in event.get("args", {})]
    assert whole[0]["name"] == plan.winner.name
    assert whole[0]["dur"] == pytest.approx(1e6 * plan.winner.latency_s, rel=1e-3)
    assert {event["pid"] for event in events} == {1, 2}
    crossing = [event for event in events if event["ph"] == "X" and event["name"] in ("send", "back")]
    assert sum(event["ph"] == "s" for event in events) == len(crossing) >= 2

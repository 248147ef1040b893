"""`remote.sweep`, against a server in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import microtome as mt
from microtome import zoo
from microtome.devices.meters import Meter, MeterReading, register_meter, unregister_meter
from microtome.errors import BadQuery, RemoteError, Unsupported
from microtome.remote.server import Server
from microtome.remote.sweep import sweep


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with mt.serve(*zoo.build("tiny-resnet"), listen="127.0.0.1:0") as server:
        yield server


def test_all_cuts_are_measured_with_no_cut_at_both_ends(server: Server) -> None:
    model, x = zoo.build("tiny-resnet")
    steps: list[tuple[str, int, int]] = []
    found = sweep(model, x, server.address, "all", repeat=1, progress=lambda *step: steps.append(step))
    assert [row.at for row in found] == ["", *(cut.at for cut in mt.cuts(model, x)), None]
    assert not [row.failed for row in found if row.failed]
    assert all(row.planned_s for row in found)
    assert all(done < whole for _, done, whole in steps)
    here, there = found[None], found[""]
    assert here.wire_s == here.tail_s == here.sent_bytes == 0
    assert there.tail_s > 0
    assert there.sent_bytes > mt.cuts(model, x).input_bytes


def test_dominating_cuts_are_those_that_send_less_than_all_before(server: Server) -> None:
    model, x = zoo.build("tiny-resnet")
    found = sweep(model, x, server.address, repeat=1, codec="fp16")
    assert [row.at for row in found][1:-1] == [cut.at for cut in mt.cuts(model, x) if cut.dominates]
    assert {row.codec for row in found if row.at is not None} == {"fp16"}


def test_a_cut_that_the_server_does_not_take_fails_alone() -> None:
    model, x = zoo.build("tiny-resnet")
    with mt.serve(model, x, listen="127.0.0.1:0", max_message=40_000) as small:  # 64 KiB cross at layer1
        found = sweep(model, x, small.address, ["layer1", "pool"], repeat=1)
    assert "accepts 39.1 KiB: raise --max-message there, or cut elsewhere" in (found["layer1"].failed or "")
    assert found["pool"].failed is None


def test_a_server_of_one_stage_is_swept_at_its_cut_without_a_plan() -> None:
    model, x = zoo.build("tiny-resnet")
    _, tail = mt.split(model, x, at="layer1")
    with mt.serve(tail, listen="127.0.0.1:0") as server:
        found = sweep(model, x, server.address, ["layer1", "pool"], repeat=1)
    assert [row.at for row in found] == ["layer1", None]
    assert "the server has one stage of the model" in found.no_plan
    assert found.planned is None


def test_a_server_of_one_stage_is_swept_at_a_cut_that_does_not_dominate() -> None:
    model, x = zoo.build("tiny-resnet")
    assert not mt.cuts(model, x)["layer1"].dominates
    _, tail = mt.split(model, x, at="layer1")
    with mt.serve(tail, listen="127.0.0.1:0") as server:
        assert [row.at for row in sweep(model, x, server.address, repeat=1)] == ["layer1", None]
        with pytest.raises(RemoteError, match="serves the cuts 'layer1', and none of 'pool'") as caught:
            sweep(model, x, server.address, ["pool"], repeat=1)
    assert caught.value.kind == "NO_CUT"


def test_energy_is_measured_where_there_is_a_meter(server: Server) -> None:
    class Steady(Meter):
        name, kind, what, every_s = "steady", "power", "a steady supply", 0.005

        def read(self) -> MeterReading:
            return MeterReading(time.perf_counter(), watts=10.0)

    model, x = zoo.build("tiny-resnet")
    register_meter("steady", Steady)
    try:
        found = sweep(model, x, server.address, ["layer1"], repeat=1)
    finally:
        unregister_meter("steady")
    assert found.energy.startswith("a steady supply")
    assert all(row.energy_j is not None and row.energy_j > 0 for row in found)


def test_what_cannot_be_swept_is_refused(server: Server) -> None:
    model, x = zoo.build("tiny-resnet")
    with pytest.raises(BadQuery, match="expected a repeat of 1 or more requests at each cut, got 0"):
        sweep(model, x, server.address, repeat=0)
    with pytest.raises(BadQuery, match="expected cuts of 'all', 'dominating', or addresses"):
        sweep(model, x, server.address, [])
    with pytest.raises(Unsupported, match="a sweep needs the whole model on this side"):
        sweep(mt.split(model, x, at="layer1")[0], x, server.address)
    other, _ = zoo.build("tiny-resnet", seed=1)
    with pytest.raises(RemoteError, match="the weights of ResNet here and of ResNet at"):
        sweep(other, x, server.address)

"""What became of many requests, by hand-made ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import microtome as mt
from microtome.report.formats import csv, markdown, text
from microtome.results.requests import CutMove, RequestLog, RequestRecord

LATE = "host:7070 did not answer in 0.5 s"


def request_log(energy_j: float | None = None) -> RequestLog:
    cloud = [
        RequestRecord("a", head_s=0.001 * at, tail_s=0.002, total_s=0.01, sent_bytes=100, attempts=1)
        for at in range(1, 6)
    ]
    edge = [RequestRecord("a", where="edge", head_s=0.003, tail_s=0.5, total_s=0.6, attempts=2, reason=LATE)]
    moves = (CutMove(0.0, "a", "zstd", "planned"), CutMove(1.0, None, "raw", "the link is slow"))
    return RequestLog("Net", "host:7070", "cuda", 4, 2.0, 12, (*cloud, *edge), moves, energy_j, "the meter")


def test_phases_of_the_server_are_of_what_it_answered() -> None:
    phases = request_log().phases()
    # Heads of 1 to 5 ms and of 3 ms; tails there of 2 ms each, and one here of 500 ms.
    assert phases["head"] is not None
    assert phases["head"].median == pytest.approx(0.003)
    assert phases["head"].p95 == pytest.approx(0.00475)
    assert phases["tail"] == (0.002, 0.002)
    assert phases["tail here"] == (0.5, 0.5)
    assert list(phases)[-1] == "total"
    assert request_log().sizes()["sent"] == (100, 100)


def test_what_was_never_sent_has_no_phases_of_the_server() -> None:
    alone = RequestLog(
        "Net", "host:7070", "cpu", 1, 1.0, 1, (RequestRecord(None, where="edge", tail_s=0.1, total_s=0.1),)
    )
    assert alone.phases()["wire"] is None
    assert alone.reasons == {}
    assert "rows of servers" not in text(alone)
    assert "all here: 1 request in 1 s" in text(alone)
    assert "waiting for another counts in the total" in text(alone)
    assert "waiting for another counts as wire" in text(request_log())


def test_rates_and_energies_are_a_request() -> None:
    assert request_log().rate_per_s == 3.0
    assert request_log().energy_per_request_j is None
    assert request_log(energy_j=12.0).energy_per_request_j == 2.0
    assert "energy of this device: 2 J a request (the meter)" in text(request_log(energy_j=12.0))


def test_the_text_says_what_ended_here_and_where_the_cut_moved() -> None:
    shown = text(request_log())
    for words in ("1 request of 6 ended here", f"1 of them: {LATE}", "a, zstd: planned", "all here: the link is slow"):
        assert words in shown
    assert "1 request had to be sent again" in shown
    assert "rows of servers, such as wire, run and sent, are of 5 requests: those they answered" in shown
    assert "| tail here | 500 ms | 500 ms |" in markdown(request_log())
    assert len(csv(request_log()).splitlines()) == 7


def test_large_numbers_of_requests_are_written_alike() -> None:
    many = request_log()
    shown = text(replace(many, requests=many.requests * 500))
    assert "500 requests of 3,000 ended here" in shown


def test_it_is_read_from_json_as_it_was(tmp_path: Path) -> None:
    made = request_log(energy_j=1.5)
    made.to_json(tmp_path / "run.json")
    found = mt.load(tmp_path / "run.json")
    assert found.as_dict() == made.as_dict()
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["summary"]["seconds"]["tail"] == {"median": 0.002, "p95": 0.002}
    assert "began" not in data["requests"][0]


def test_requests_that_were_never_encoded_have_no_time_to_encode() -> None:
    sent = RequestRecord("a", encode_s=0.002, total_s=0.01, sent_bytes=100, attempts=1)
    down = RequestRecord("a", where="edge", head_s=0.003, tail_s=0.5, total_s=0.6, reason="connection refused")
    log = RequestLog("Net", "host:7070", "cpu", 1, 1.0, 4, (sent, down, down, down))
    assert log.phases()["encode"] == (0.002, 0.002)
    assert RequestLog("Net", "host:7070", "cpu", 1, 1.0, 1, (down,)).phases()["encode"] is None

"""Plans and costs of codecs, as people read them."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

import microtome as mt
from microtome.report.formats import describe, text
from microtome.report.plan import CandidateSelection, records
from tests.plan import synthetic

CUTS = synthetic.cuts([4000, 400, 40])
EDGE = synthetic.profile([0.1, 2.0, 4.0], joules=[1.0, 20.0, 40.0])
CLOUD = synthetic.profile([0.1, 0.2, 0.4])


def planned(**options: Any) -> mt.Plan:
    given: dict[str, Any] = {
        "edge": EDGE,
        "cloud": CLOUD,
        "link": mt.Link("8Kbps", rtt="200ms"),
        "costs": synthetic.costs(CUTS),
    }
    return mt.plan(CUTS, **(given | options))


GOLDEN = """\
Chain on Inputs(x): all on cloud, input by zstd (best latency; edge to cloud 8
Kbps, rtt 200 ms)
cut                           ┃     sent ┃   edge ┃  cloud ┃   wire ┃ latency
━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━╇━━━━━━━━╇━━━━━━━━
* all on cloud, input by zstd │    500 B │    0 s │ 700 ms │ 740 ms │  1.44 s
  all on cloud, raw input     │  1,000 B │    0 s │ 700 ms │ 1.24 s │  1.94 s
  l1                          │    400 B │ 2.10 s │ 400 ms │ 640 ms │  3.14 s
  l0                          │ 3.91 KiB │ 100 ms │ 600 ms │ 4.24 s │  4.94 s
  all on edge                 │        – │ 6.10 s │    0 s │    0 s │  6.10 s
  l2                          │     40 B │ 6.10 s │    0 s │ 280 ms │  6.38 s

latency, in execution order: █ edge ▓ cloud ░ codec, link
* all on cloud, input by zstd   1.44 s ░░░░▓▓▓▓░
  l0                            4.94 s █░░░░░░░░░░░░░░░░░░░░░░░░░▓▓▓▓░
  l1                            3.14 s █████████████░░░▓▓▓░
  l2                            6.38 s ██████████████████████████████████████░░
  all on edge                   6.10 s ██████████████████████████████████████
"""  # noqa: RUF001


def test_a_small_plan_is_drawn_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    drawn = str(planned())
    # l0: 0.1 s on the edge, 0.1 + 4 s to send 4000 bytes, 0.6 s on the cloud, 0.1 + 0.04 s back
    assert drawn.startswith(GOLDEN)
    assert all(len(line) <= 80 for line in drawn.splitlines())


def test_columns_that_are_left_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "no room for: codec, passes/s, energy" in str(planned())
    monkeypatch.setenv("COLUMNS", "140")
    assert "no room for" not in str(planned())


def test_the_winner_is_said_with_its_terms_and_what_else_there_was() -> None:
    drawn = str(planned())
    assert (
        "all on cloud, input by zstd: 1.44 s = send to cloud 600 ms + cloud 700 ms + result from cloud 140 ms" in drawn
    )
    assert "latency relative to the winner: all on cloud, raw input 1.35×, all on edge 4.24×" in drawn  # noqa: RUF001
    assert "best cut by bandwidth: " in drawn
    assert "codecs: measured on one machine for all devices (a CPU, with made values)" in drawn
    assert "energy of edge: with idle power, by share; without codecs" in drawn


def test_the_bandwidths_that_are_listed_have_that_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    # Each cut sends half of what the one before sends, and takes twice as long: each is the best for some bandwidths.
    cuts = synthetic.cuts([512 >> at for at in range(10)])
    edge, cloud = synthetic.profile([2.0**at / 1000 for at in range(10)]), synthetic.profile([1e-6] * 10)
    plan = mt.plan(cuts, edge=edge, cloud=cloud, link="1Kbps", costs=synthetic.costs(cuts), codec="raw")
    spans = plan.over_bandwidths()
    assert len(spans) > 8
    for at, span in enumerate(spans):
        low, high = span.from_bytes_per_s or span.until_bytes_per_s / 2, min(span.until_bytes_per_s, 1e12)
        shown = str(replace(plan, links=(mt.Link(4.0 * (low + high)),)))
        (line,) = (line for line in shown.splitlines() if line.startswith("best cut by bandwidth: "))
        names = [part.split(" from ")[0].split(" up to ")[0] for part in line.partition(": ")[2].split("; ")]
        assert span.candidate.name in names
        assert [name != "…" for name in names].count(True) == 8
        assert (names[0] == "…", names[-1] == "…") == (at >= 8, spans[-1].candidate.name not in names)


def test_a_bar_has_a_part_for_each_device_and_one_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    bars = {}
    for line in str(planned(link=mt.Link("8Kbps"))).partition("latency, in")[2].splitlines()[1:]:
        if any(ink in line for ink in "█▓░"):
            bars[line[2:].split("  ")[0]] = line.split()[-1]
    assert set(bars["all on edge"]) == {"█"}
    assert set(bars["l1"]) == {"█", "░", "▓"}
    # l1: 2.1 s on the edge, 0.4 + 0.04 s between, 0.4 s on the cloud
    assert bars["l1"].count("█") == pytest.approx(2.1 / 0.4 * bars["l1"].count("▓"), abs=6)
    assert "█" not in bars["all on cloud, input by zstd"]


def chart(plan: mt.Plan) -> list[str]:
    """The lines of the chart."""
    lines = str(plan).partition("latency, in")[2].splitlines()[1:]
    return [line for line in lines if any(ink in line for ink in "█▓░")]


def test_a_bar_that_is_much_longer_than_most_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cuts = synthetic.cuts([400_000, 400, 40])  # the first takes 400 s to send, and nothing else as much as 10 s
    bars = chart(mt.plan(cuts, edge=EDGE, cloud=CLOUD, link=mt.Link("8Kbps"), costs=synthetic.costs(cuts)))
    assert [line[2:4] for line in bars if line.endswith("░→")] == ["l0"]


def test_where_the_best_is_far_ahead_the_others_have_all_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    fast = synthetic.profile([0.01, 0.02, 0.04])  # 70 ms on the edge alone, and 10 s there and back
    bars = chart(planned(edge=fast, cloud=fast, link=mt.Link("8Kbps", rtt="10s")))
    assert all(len(line) <= 80 for line in bars)
    assert not any("→" in line for line in bars)
    (middle,) = [line for line in bars if line[2:4] == "l1"]
    assert {"█", "▓", "░"} <= set(middle)


def test_many_cuts_are_sampled_in_the_chart_with_the_winner() -> None:
    sizes = [400] * 99
    cuts = synthetic.cuts(sizes)
    edge, cloud = synthetic.profile([0.01] * 99), synthetic.profile([0.02] * 99)
    plan = mt.plan(
        cuts, edge=edge, cloud=cloud, link=mt.Link("1Kbps"), costs=synthetic.costs(cuts), strategy=lambda them: them[37]
    )
    chart = str(plan).partition("latency, in")[2].partition(" = ")[0]
    assert 15 <= sum("█" in line for line in chart.splitlines()) <= 24
    assert f"* {plan.winner.name} " in chart
    assert f"* {plan.winner.name} " in str(plan).partition("latency, in")[0]
    assert "chosen by <lambda>" in str(plan)


def test_passes_a_second_share_a_unit_and_are_in_front_if_they_are_the_objective() -> None:
    slow, fast = synthetic.profile([100.0, 100.0, 100.0]), synthetic.profile([1e-4, 1e-4, 1e-4])
    plan = planned(edge=slow, cloud=fast, link=mt.Link("8Mbps"), objective="throughput")
    # 3 layers take 300 s on the edge; the link takes a millisecond for 1000 bytes, a half for 500.
    cells = {line.split("│")[0].strip("* "): line.split("│")[-1].strip() for line in str(plan).splitlines()}
    assert [cells[f"all on {where}"] for where in ("edge", "cloud, raw input", "cloud, input by zstd")] == [
        "0.00333",
        "1,000",
        "2,000",
    ]
    figures = describe(plan, medium="html").figures
    assert figures[:2] == (("best", plan.winner.name), ("throughput", "2,000 passes/s"))
    assert "throughput" not in dict(describe(planned(), medium="html").figures)


def test_a_lossy_codec_of_the_winner_is_noted() -> None:
    known = synthetic.costs(CUTS)
    costs = replace(known, costs={"raw": known.costs["raw"], "fp16": known.costs["zstd"]})
    note = "fp16: lossy, so the output changes; Stages.try_codec measures by how much"
    assert note in str(planned(codec=["raw", "fp16"], costs=costs))
    assert "lossy" not in str(planned())


def test_limits_and_chains_have_their_columns() -> None:
    drawn = str(planned(limits={"edge": 250}))
    assert "edge memory" in drawn
    assert "candidates are refused; all on edge: edge would need 300 B" in drawn
    assert "\n  l2 " not in drawn.partition("in execution order")[2]  # the chart has no cut that does not fit
    links = [mt.Link("8Kbps"), mt.Link("80Kbps")]
    chain = mt.plan(CUTS, devices={"a": EDGE, "b": CLOUD, "c": CLOUD}, links=links, costs=synthetic.costs(CUTS))
    words = str(chain)
    assert "a to b 8 Kbps, rtt 0 s, b to c 80 Kbps" in words
    assert "█ a ▓ b ▒ c ░ codec, link" in words
    assert "bandwidths" not in words
    with pytest.raises(mt.MicrotomeError, match="expected a plan with one link to compare bandwidths, got 2 links"):
        chain.over_bandwidths()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_rich_draws_it_in_the_width_there_is(width: int) -> None:
    file = io.StringIO()
    Console(file=file, width=width).print(planned())
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert sum("all on edge" in line for line in lines) >= 2


def test_markdown_and_csv_have_every_candidate() -> None:
    plan = planned(codec=("raw", "zstd"), limits={"edge": 250})
    lines = [line for line in plan.to_markdown().splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + sum(c.refused is None or c.is_baseline for c in plan)
    rows = list(csv.DictReader(io.StringIO(plan.to_csv())))
    assert len(rows) == len(plan)
    assert sum(
        float(rows[0][f"{what}_s"]) for what in ("edge_run", "encode", "send", "decode", "cloud_run", "back")
    ) == (pytest.approx(plan.candidates[0].latency_s))
    assert {row["chosen"] for row in rows} == {"True", "False"}


def test_costs_of_codecs_are_a_row_each() -> None:
    costs = synthetic.costs(CUTS, encode_s=1e-3)
    assert [line.split("│")[0].strip() for line in str(costs).splitlines() if "│" in line] == ["raw", "zstd"]
    assert "50.0 %" in str(costs)
    assert "measured on a CPU, with made values" in costs.to_markdown()
    assert costs.to_csv().splitlines()[1] == "raw,args[0],1000,0.0,0.0"


def test_top_limits_the_table_and_the_chart() -> None:
    drawn = text(planned(), CandidateSelection(top=2))
    table, _, bars = drawn.partition("latency, in execution order")
    assert [line.split("│")[0].strip("* ") for line in table.splitlines() if "│" in line] == [
        "all on cloud, input by zstd",
        "all on cloud, raw input",
    ]
    assert sum(any(ink in line for ink in "█▓░") for line in bars.splitlines()[1:]) == 2
    assert "2 of 6 candidates shown" in drawn
    assert len(records(planned(), CandidateSelection(top=2))) == 2


def test_the_chart_draws_the_objective() -> None:
    plan = planned(objective="throughput", link=mt.Link("8Kbps"))
    drawn = str(plan)
    # 500 bytes take 0.5 s of the link, and the cloud 0.7 s: 1.43 passes per second. The edge alone takes 6.1 s.
    chart = drawn.partition("passes per second, by the slowest device or link, in execution order: ")[2]
    bars = {line[2:].split("  ")[0]: line.split()[-2:] for line in chart.splitlines()[1:6]}
    assert bars["all on cloud, input by zstd"][0] == "1.43"
    assert set(bars["all on cloud, input by zstd"][1]) == {"▓"}
    assert bars["all on edge"][0] == "0.164"
    assert set(bars["all on edge"][1]) == {"█"}
    assert set(bars["l0"][1]) == {"░"}  # 4000 bytes take 4 s
    # 0.7 s and 6.1 s between results
    assert "throughput relative to the winner: all on cloud, raw input 0.7×, all on edge 0.115×" in drawn  # noqa: RUF001
    energy = str(planned(objective="energy"))
    assert "energy, in execution order\n" in energy
    assert "latency, in execution order" not in energy


def test_the_whole_model_on_a_device_that_it_does_not_fit_is_marked_so() -> None:
    # The parameters of 3 layers are 300 bytes.
    notes = describe(planned(limits={"edge": "250B"})).notes_with()
    (beside,) = (note for note in notes if "relative to the winner" in note)
    assert beside == "latency relative to the winner: all on cloud, raw input 1.35×, all on edge 4.24× (does not fit)"  # noqa: RUF001

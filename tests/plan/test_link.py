"""Links, and how their speeds are written."""

from __future__ import annotations

from typing import Any

import pytest

import microtome as mt
from microtome.errors import BadQuery
from microtome.units import parse_rate, parse_seconds, rate


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("8bps", 1),
        ("8Kbps", 1e3),
        ("8kbps", 1e3),
        ("20Mbps", 2.5e6),
        ("20 Mbit/s", 2.5e6),
        ("1Gbps", 1.25e8),
        ("2.5MB/s", 2.5e6),
        ("1KiB/s", 1024),
        ("3MBps", 3e6),
        (80.0, 10),
        (8000, 1000),
    ],
)
def test_speeds_are_bits_with_b_and_bytes_with_a_capital_b(text: Any, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s
    assert mt.Link(text).bytes_per_s == bytes_per_s


@pytest.mark.parametrize(
    "text", ["20", "20MHz", "fast", "", "0Mbps", 0, -5, "-5Mbps", float("inf"), float("nan"), "20MB"]
)
def test_what_is_no_speed_is_said(text: Any) -> None:
    with pytest.raises(BadQuery, match="expected a bandwidth, such as 20Mbps"):
        mt.Link(text)


@pytest.mark.parametrize(("text", "seconds"), [("15ms", 0.015), ("2 s", 2), ("30us", 3e-5), (0.5, 0.5), (0, 0)])
def test_times_have_units_or_are_seconds(text: Any, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["15", "15 m", "-1ms", -1, float("nan"), float("inf")])
def test_what_is_no_time_is_said(text: Any) -> None:
    with pytest.raises(BadQuery, match="expected a time, such as 15ms"):
        mt.Link("1Mbps", rtt=text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((20,), "expected a bandwidth with its unit, such as '20Mbps', got 20"),
        (("20Mbps", 15), "expected rtt with its unit, such as '15ms', or in seconds as a float, got 15"),
        (("20Mbps", 0, 2), "expected jitter with its unit, such as '2ms', or in seconds as a float, got 2"),
    ],
)
def test_small_integers_are_refused_since_their_unit_is_unclear(words: Any, message: str) -> None:
    with pytest.raises(BadQuery, match=message):
        mt.Link(*words)


@pytest.mark.parametrize("joules", [-1.0, float("nan"), float("inf")])
def test_a_radio_takes_nothing_or_more(joules: float) -> None:
    with pytest.raises(BadQuery, match="expected joules_per_byte of 0 or more"):
        mt.Link("1Mbps", joules_per_byte=joules)


def test_a_message_takes_half_the_round_trip_and_its_bytes() -> None:
    # 15 ms / 2 = 7.5 ms; 25,000 bytes = 200,000 bits at 20,000,000 a second = 10 ms
    assert mt.Link("20Mbps", rtt="15ms", jitter="4ms").seconds(25_000) == pytest.approx(0.0175)
    assert mt.Link("20Mbps").seconds(0) == 0


def test_a_link_says_what_it_is() -> None:
    assert repr(mt.Link("20Mbps", "15ms", "2ms", 1e-7)) == (
        "Link('20 Mbps', rtt='15 ms', jitter='2 ms', joules_per_byte=1e-07)"
    )
    assert [rate(bytes_per_s) for bytes_per_s in (None, 1, 125, 124_999, 12.5e9)] == [
        *("–", "8 bps", "1 Kbps", "1 Mbps", "100 Gbps")  # noqa: RUF001
    ]

"""Edge, link and cloud have the same colours wherever they are drawn."""

from __future__ import annotations

import pytest

import microtome as mt
from microtome import zoo
from microtome.report.formats import describe
from microtome.report.html import document
from microtome.report.html.sweep import html as sweep_page
from microtome.report.palette import CLOUD, EDGE, LINK
from microtome.results.base import Result
from tests.report.pages import timed
from tests.report.test_foreign_text import RESULTS, sweep_result

THREE = (EDGE, LINK, CLOUD)


@pytest.fixture(scope="module")
def plan() -> mt.Plan:
    model, x = zoo.build("tiny-resnet")
    profile = timed(mt.profile(model, x))
    return mt.plan(mt.cuts(model, x), edge=profile, cloud=profile, link=mt.Link("20Mbps", rtt="15ms"))


def colours_in(result: Result) -> dict[str, str]:
    """The colour of each character in the chart that a terminal gets."""
    chart = describe(result).chart
    assert chart is not None
    text = chart(120)
    return {text.plain[span.start]: str(span.style) for span in text.spans}


def test_a_terminal_draws_edge_link_and_cloud_in_the_palette(plan: mt.Plan) -> None:
    expected = dict(zip("█░▓", THREE, strict=True))
    assert colours_in(plan) == expected
    assert colours_in(RESULTS["sweep"]()) == expected


def test_a_notebook_draws_edge_link_and_cloud_in_the_palette(plan: mt.Plan) -> None:
    html = plan._repr_html_()
    legend = html[: html.index("<table")]
    assert (
        legend.index(EDGE)
        < legend.index("edge&emsp;")
        < legend.index(CLOUD)
        < legend.index("cloud&emsp;")
        < legend.index(LINK)
    )


def test_pages_take_edge_link_and_cloud_from_the_palette() -> None:
    page = sweep_page(sweep_result())
    for name, colour in zip(("edge", "link", "cloud"), THREE, strict=True):
        assert f"--{name}:{colour}" in page
        assert f"--{name}:{colour}" in document.style()

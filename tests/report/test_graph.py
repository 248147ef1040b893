"""Pictures of the calls of a model."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import microtome as mt
from microtome import zoo
from microtome.errors import BadQuery, NoMatch
from microtome.report.graph.graph import Graph, build_graph
from microtome.report.graph.layout import lay_out, spaced
from microtome.units import size

SVG = "{http://www.w3.org/2000/svg}"


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.b = nn.Sequential(nn.Linear(4, 4), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.a(x))
        z: Tensor = self.b(y) + x
        return z


def test_calls_of_one_module_are_not_joined_by_its_weights() -> None:
    layer = nn.Linear(4, 4)
    drawn = build_graph(mt.trace(nn.Sequential(layer, layer, layer), torch.ones(2, 4)))
    assert [(edge.source, edge.target, edge.nbytes) for edge in drawn.edges] == [(at, at + 1, 32) for at in range(4)]


@pytest.fixture(scope="module")
def t() -> mt.Trace:
    with torch.no_grad():
        return mt.trace(Residual(), torch.ones(2, 4))


def joined(found: Graph) -> set[tuple[str, str, int]]:
    names = [node.name for node in found.nodes]
    return {(names[edge.source], names[edge.target], edge.nbytes) for edge in found.edges}


def test_edges_have_the_bytes_of_what_goes_from_one_to_the_other(t: mt.Trace) -> None:
    # Every value is 2 x 4 floats. What is changed in place comes from the one that changed it.
    assert joined(build_graph(t, 1)) == {
        ("x", "a", 32),
        ("a", "act", 32),
        ("act", "b", 32),
        ("b", "add", 32),
        ("x", "add", 32),
        ("add", "output", 32),
    }


def test_depth_says_what_is_opened(t: mt.Trace) -> None:
    assert [node.name for node in build_graph(t, 0).nodes] == ["x", "Residual", "output"]
    assert [node.name for node in build_graph(t, 2).nodes if node.kind == "call"] == ["a", "act", "b.0"]
    assert [node.name for node in build_graph(t).nodes] == [node.name for node in build_graph(t, 2).nodes]


def test_what_contains_a_cut_is_opened_and_what_crosses_is_marked(t: mt.Trace) -> None:
    found = build_graph(t, 1, "b.0")
    assert [node.name for node in found.nodes if node.is_head] == ["x", "a", "act", "b.0"]
    crossing = {found.nodes[edge.source].name for edge in found.edges if edge.crosses}
    assert crossing == {"b.0", "x"}
    assert found.cut == "cut at b.0: 64 B on its edges"


@pytest.mark.parametrize("name", zoo.names())
def test_every_cut_can_be_drawn(name: str) -> None:
    model, x = zoo.build(name)
    with torch.no_grad():
        trace, cuts = mt.trace(model, x), mt.cuts(model, x)
    for cut in cuts:
        found = build_graph(trace, 1, cut)
        assert found.cut == f"cut at {cut.at}: {size(cut.nbytes)} cross"
        assert any(edge.crosses for edge in found.edges)


@pytest.mark.parametrize("name", zoo.names())
def test_a_graph_has_no_circle_and_all_is_reached(name: str) -> None:
    with torch.no_grad():
        trace = mt.trace(*zoo.build(name))
    for depth in range(4):
        found = build_graph(trace, depth)
        assert all(edge.source < edge.target for edge in found.edges)
        read = {edge.source for edge in found.edges}
        assert all(node.index in read or node.kind == "output" for node in found.nodes)


def test_the_picture_is_xml_with_every_node_and_edge(t: mt.Trace, tmp_path: Path) -> None:
    t.to_svg(tmp_path / "g.svg", depth=1, cut="a")
    root = ElementTree.parse(tmp_path / "g.svg").getroot()
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"a", "act", "b", "add", "output", "cut at a: 64 B on its edges"} <= texts
    assert len([one for one in root.iter(f"{SVG}path") if "edge" in one.get("class", "")]) == 6
    assert len(list(root.iter(f"{SVG}line"))) == 1
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert x + w <= width
        assert y + h <= height


def test_nodes_of_a_picture_do_not_overlap() -> None:
    with torch.no_grad():
        trace = mt.trace(*zoo.build("tiny-vit"))
    root = ElementTree.fromstring(trace.to_svg(depth=3))
    boxes = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") != "paper"]
    rows: dict[str, list[tuple[float, float]]] = {}
    for rect in boxes:
        rows.setdefault(rect.get("y", ""), []).append((float(rect.get("x", 0)), float(rect.get("width", 0))))
    for row in rows.values():
        assert all(x + w < other for (x, w), (other, _) in pairwise(sorted(row)))


def test_hostile_names_are_escaped() -> None:
    name = '</text><script>"\\'
    model = nn.Sequential()
    model.add_module(name, nn.Linear(2, 2))
    trace = mt.trace(model, "1x2")
    root = ElementTree.fromstring(trace.to_svg(depth=1))
    assert any(text.text == name for text in root.iter(f"{SVG}text"))
    assert not list(root.iter(f"{SVG}script"))
    (line,) = [line for line in trace.to_dot(depth=1).splitlines() if "script" in line]
    assert 'label="</text><script>\\"\\\\\\nLinear 1x2"' in line


def test_dot_names_every_node_and_edge(t: mt.Trace, tmp_path: Path) -> None:
    t.to_dot(tmp_path / "g.dot", depth=1, cut="a")
    text = (tmp_path / "g.dot").read_text()
    assert text.count("->") == 6
    assert len(re.findall(r"^ +n\d+ \[", text, re.MULTILINE)) == 6
    assert text.count(" color=red") == 2
    assert text.count("{") == text.count("}") == 3


def test_wrong_words_are_told(t: mt.Trace) -> None:
    with pytest.raises(BadQuery, match="expected depth of 0 or more, got -1"):
        t.to_svg(depth=-1)
    with pytest.raises(BadQuery, match="expected cut to be an address or a Cut, got 3"):
        t.to_dot(cut=3)
    with pytest.raises(NoMatch, match="'c'"):
        t.to_dot(cut="c")


# -- the layout --------------------------------------------------------------------------------------------------------

ordered = st.lists(st.floats(-100, 100), min_size=1, max_size=8)


@given(ordered)
def test_places_keep_their_order_and_their_gaps(wanted: list[float]) -> None:
    gaps = [5.0] * (len(wanted) - 1)
    placed = spaced(wanted, gaps, [1.0] * len(wanted))
    assert all(b - a >= 5.0 - 1e-6 for a, b in pairwise(placed))
    if all(b - a >= 5.0 for a, b in pairwise(wanted)):
        assert placed == pytest.approx(wanted)


def test_layers_go_down_and_long_edges_bend_in_each() -> None:
    found = lay_out([10.0] * 4, [(0, 1), (1, 2), (2, 3), (0, 3)])
    assert found.ranks == [0, 1, 2, 3]
    assert [len(bends) for bends in found.bends] == [0, 0, 0, 2]
    assert lay_out([10.0] * 3, [(0, 1), (0, 2)], below=[2]).ranks == [0, 1, 2]

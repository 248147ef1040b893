"""Draw a graph of calls: as DOT for Graphviz, and as one SVG file without a script, for light and dark."""

from __future__ import annotations

import math
from html import escape
from itertools import pairwise
from typing import Any

from microtome.report.graph.graph import Edge, Graph, Node, build_graph
from microtome.report.graph.layout import Layout, lay_out
from microtome.report.text import shorten
from microtome.results.trace import Trace

_DOT_SHAPES = {"input": "ellipse", "output": "ellipse", "call": "box", "glue": "box"}
#: Pixels: of a node's height and of a letter's width, between layers, around the picture, and where a cut goes through.
_HEIGHT, _LETTER, _BETWEEN, _MARGIN, _CUT = 36, 7.2, 34, 24, 30
_LONGEST = 34
_STYLE = """
.paper{fill:#fff}.call{fill:#eaf1fb;stroke:#2f6db5}.glue{fill:#f4f4f4;stroke:#8a929b;stroke-dasharray:3 2}
.input,.output{fill:#eef7ee;stroke:#3a8a4d}.name{fill:#1b1f24;font-weight:600}.type,.bytes{fill:#626b76}
.edge{fill:none;stroke:#7d8792}.tip{fill:#7d8792}.bytes{paint-order:stroke;stroke:#fff;stroke-width:3px}
.crossing{stroke:#c2410c}.red{fill:#c2410c}.cut{stroke:#c2410c;stroke-width:2;stroke-dasharray:8 5}
text{font:12px system-ui,sans-serif}.small{font-size:10.5px}
@media (prefers-color-scheme:dark){.paper{fill:#14181c}.call{fill:#1b2a3d;stroke:#6aa5ea}
.glue{fill:#22272d;stroke:#79838e}.input,.output{fill:#1b2c22;stroke:#5fcf8d}.name{fill:#e4e8ec}
.type,.bytes{fill:#97a1ac}.bytes{stroke:#14181c}.edge{stroke:#6d7782}.tip{fill:#6d7782}.crossing{stroke:#fb923c}
.red{fill:#fb923c}.cut{stroke:#fb923c}}
"""


def draw_dot(trace: Trace, depth: int | None, cut: Any) -> str:
    """Draw a digraph; the two sides of a cut are clusters, and what crosses is red."""
    graph = build_graph(trace, depth, cut)
    lines = ["digraph microtome {", '  node [fontname="sans-serif", fontsize=11];', "  edge [fontsize=9];"]
    if graph.cut:
        lines.append(f"  label={_dot_string(graph.cut)}; labelloc=t;")
        for name, is_head in (("head", True), ("tail", False)):
            nodes = (f"  {_dot_node(node)}" for node in graph.nodes if node.is_head == is_head)
            lines += [f"  subgraph cluster_{name} {{", f"    label={name}; style=dashed;", *nodes, "  }"]
    else:
        lines += map(_dot_node, graph.nodes)
    for edge in graph.edges:
        red = ', color=red, fontcolor=red, style="bold"' if edge.crosses else ""
        label, tooltip = _dot_string(edge.label), _dot_string(edge.detail)
        lines.append(f"  n{edge.source} -> n{edge.target} [label={label}, tooltip={tooltip}{red}];")
    return "\n".join([*lines, "}"]) + "\n"


def _dot_node(node: Node) -> str:
    label = "\n".join(filter(None, (node.name, " ".join(filter(None, (node.type, node.detail))))))
    style = {"call": "rounded", "glue": "dashed"}.get(node.kind, "solid")
    return f'  n{node.index} [label={_dot_string(label)}, shape={_DOT_SHAPES[node.kind]}, style="{style}"];'


def _dot_string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def draw_svg(trace: Trace, depth: int | None, cut: Any) -> str:
    """Draw nodes in layers, the bytes of values on the edges, and a dashed line at the cut."""
    graph = build_graph(trace, depth, cut)
    widths = [_width(node) for node in graph.nodes]
    tail = [node.index for node in graph.nodes if not node.is_head] if graph.cut else []
    layout = lay_out(widths, [(edge.source, edge.target) for edge in graph.edges], tail)
    border = min((layout.ranks[node] for node in tail), default=None)
    return _Drawing(graph, layout, widths, border).text()


class _Drawing:
    def __init__(self, graph: Graph, layout: Layout, widths: list[float], border: int | None) -> None:
        self._graph = graph
        self._layout = layout
        self._widths = widths
        self._border = border
        beside = max(len(graph.cut) * _LETTER, 60)  # the label of the cut, or labels at the rim
        self._width = math.ceil(layout.right - layout.left + 2 * _MARGIN + beside)
        self._height = math.ceil(self._top(max(layout.ranks, default=0)) + _HEIGHT + _MARGIN)

    def text(self) -> str:
        size = f'width="{self._width}" height="{self._height}" viewBox="0 0 {self._width} {self._height}"'
        label = escape(self._graph.cut or "The calls of a model, and what they make for each other")
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{_xml(label)}">',
            f"<style>{_STYLE}</style>",
            _marker("tip", "tip"),
            _marker("red", "red"),
            f'<rect class="paper" width="{self._width}" height="{self._height}"/>',
            *(self._edge(at, edge) for at, edge in enumerate(self._graph.edges)),
            *(self._node(node) for node in self._graph.nodes),
            *(self._label(at, edge) for at, edge in enumerate(self._graph.edges)),
            self._cut(),
            "</svg>",
        ]
        return "\n".join(filter(None, parts)) + "\n"

    def _top(self, rank: int) -> float:
        """Return the y of a layer."""
        through = _CUT if self._border is not None and rank >= self._border else 0
        return _MARGIN + rank * (_HEIGHT + _BETWEEN) + through

    def _x(self, x: float) -> float:
        return x - self._layout.left + _MARGIN

    def _node(self, node: Node) -> str:
        width, top = self._widths[node.index], self._top(self._layout.ranks[node.index])
        x = self._x(self._layout.x[node.index])
        round_ = 16 if node.kind in ("input", "output") else 6
        under = _under(node)
        lines = [(node.name, "name", 15.0 if under else 22.0), (under, "type small", 29.0)]
        texts = "".join(
            f'<text class="{kind}" x="{x:.1f}" y="{top + down:.1f}" text-anchor="middle">'
            f"{_text(shorten(line, _LONGEST))}</text>"
            for line, kind, down in lines
            if line
        )
        title = _text(" · ".join(filter(None, (node.name, node.type, node.detail))))
        return (
            f'<g><title>{title}</title><rect class="{node.kind}" x="{x - width / 2:.1f}" y="{top:.1f}" '
            f'width="{width:.1f}" height="{_HEIGHT}" rx="{round_}"/>{texts}</g>'
        )

    def _points(self, at: int, edge: Edge) -> list[tuple[float, float]]:
        """Return the path of an edge: out of the node, through the layers between, and into the other."""
        first, last = self._layout.ranks[edge.source], self._layout.ranks[edge.target]
        points = [(self._x(self._layout.x[edge.source]), self._top(first) + _HEIGHT)]
        for rank, x in enumerate(self._layout.bends[at], first + 1):
            points += [(self._x(x), self._top(rank)), (self._x(x), self._top(rank) + _HEIGHT)]
        return [*points, (self._x(self._layout.x[edge.target]), self._top(last) - 2)]

    def _edge(self, at: int, edge: Edge) -> str:
        points = self._points(at, edge)
        path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
        for (x, y), (to_x, to_y) in pairwise(points):
            half = (y + to_y) / 2
            path += f" C{x:.1f},{half:.1f} {to_x:.1f},{half:.1f} {to_x:.1f},{to_y:.1f}"
        thick = 1 + min(math.log10(max(edge.nbytes, 1)) / 4, 2)
        kind, tip = ("edge crossing", "red") if edge.crosses else ("edge", "tip")
        title = f"<title>{_text(f'{edge.label}: {edge.detail}')}</title>"
        return f'<path class="{kind}" d="{path}" stroke-width="{thick:.1f}" marker-end="url(#{tip})">{title}</path>'

    def _label(self, at: int, edge: Edge) -> str:
        points = self._points(at, edge)
        (x, y), (to_x, to_y) = points[1:3] if len(points) > 2 else points  # of a long edge where it goes straight down
        kind = "bytes small red" if edge.crosses else "bytes small"
        place = f'x="{(x + to_x) / 2 + 5:.1f}" y="{y + (to_y - y) * 0.45 + 3:.1f}"'
        return f'<text class="{kind}" {place}>{_text(edge.label)}</text>'

    def _cut(self) -> str:
        if self._border is None:
            return ""
        y = self._top(self._border) - _CUT / 2 - 6
        return (
            f'<line class="cut" x1="0" x2="{self._width}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="bytes red" x="{self._width - 8}" y="{y - 6:.1f}" text-anchor="end">'
            f"{_text(self._graph.cut)}</text>"
        )


def _under(node: Node) -> str:
    """Return the second line of a node."""
    return " ".join(filter(None, (node.type if node.type != node.name else "", node.detail)))


def _width(node: Node) -> float:
    longest = max(len(shorten(line, _LONGEST)) for line in (node.name, _under(node)))
    return max(longest * _LETTER + 20, 60.0)


def _marker(name: str, kind: str) -> str:
    return (
        f'<defs><marker id="{name}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path class="{kind}" d="M0,0L8,4L0,8z"/></marker></defs>'
    )


def _text(text: str) -> str:
    return _xml(escape(text))


def _xml(text: str) -> str:
    """Replace the characters that XML cannot hold."""
    return "".join(letter if letter >= " " else "\N{REPLACEMENT CHARACTER}" for letter in text)

"""The layout of a directed acyclic graph: nodes in layers, from top to bottom.

The Sugiyama method: each node is one layer below the lowest node that it reads from; an edge over several layers has a
bend in each; layers are ordered by barycenters; and each node is placed as near to its neighbours as the others permit.
Graphviz does it better, but is a program of its own: `to_dot` is for those who have it, and SVG needs no program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

#: The number of sweeps over the layers: for the order in them, and for the positions.
_ORDERS, _PLACES = 8, 40
_GAP = 24.0
#: The weight of a short edge relative to a segment of a long one, so that sequences are drawn in a column.
_SHORT = 16.0


@dataclass(frozen=True)
class Layout:
    """The positions of nodes and edges.

    Attributes:
        ranks: The layer of each node.
        x: The middle of each node.
        bends: Of each edge, the middles at which it goes through the layers between its ends.
        left: The least x of the drawing; `right`: the greatest.
    """

    ranks: list[int]
    x: list[float]
    bends: list[list[float]]
    left: float
    right: float


def lay_out(widths: Sequence[float], edges: Sequence[tuple[int, int]], below: Sequence[int] = ()) -> Layout:
    """Lay out nodes in topological order.

    Args:
        widths: The width of each node.
        below: Nodes to place below all others.
    """
    ranks = _ranks(_neighbours(len(widths), edges)[0], set(below))
    layers: list[list[int]] = [[] for _ in range(max(ranks, default=0) + 1)]
    for node, rank in enumerate(ranks):
        layers[rank].append(node)
    sizes = list(widths)
    links: list[tuple[int, int]] = []
    bends: list[list[int]] = []
    for source, target in edges:
        chain = []
        for rank in range(ranks[source] + 1, ranks[target]):
            chain.append(len(sizes))
            layers[rank].append(len(sizes))
            sizes.append(0.0)
        bends.append(chain)
        links += zip([source, *chain], [*chain, target], strict=True)
    up, down = _neighbours(len(sizes), links)
    _order(layers, up, down)
    x = _place(layers, sizes, up, down, len(widths))
    return Layout(
        ranks=ranks,
        x=x[: len(widths)],
        bends=[[x[bend] for bend in chain] for chain in bends],
        left=min((at - width / 2 for at, width in zip(x, sizes, strict=True)), default=0.0),
        right=max((at + width / 2 for at, width in zip(x, sizes, strict=True)), default=0.0),
    )


def _ranks(up: list[list[int]], below: set[int]) -> list[int]:
    """Return the layer of each node: one below the lowest that it reads from, and `below` under all others."""
    ranks = [0] * len(up)
    above = [node for node in range(len(up)) if node not in below]
    for node in above:
        ranks[node] = max((ranks[source] + 1 for source in up[node]), default=0)
    border = max((ranks[node] + 1 for node in above), default=0)
    for node in sorted(below):
        ranks[node] = max([border, *(ranks[source] + 1 for source in up[node])])
    return ranks


def _neighbours(count: int, links: Sequence[tuple[int, int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the neighbours of each node above it, and those below it."""
    up: list[list[int]] = [[] for _ in range(count)]
    down: list[list[int]] = [[] for _ in range(count)]
    for above, under in links:
        up[under].append(above)
        down[above].append(under)
    return up, down


def _order(layers: list[list[int]], up: list[list[int]], down: list[list[int]]) -> None:
    """Sort each layer by the barycenters of the neighbours above, then below, and so on."""
    at: dict[int, float] = {}
    for layer in layers:
        at |= {node: float(place) for place, node in enumerate(layer)}
    for sweep in range(_ORDERS):
        near = up if sweep % 2 == 0 else down
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            barycenters = {node: fmean([at[one] for one in near[node]] or [at[node]]) for node in layer}
            layer.sort(key=lambda node: barycenters[node])
            at |= {node: float(place) for place, node in enumerate(layer)}


def _place(
    layers: list[list[int]], sizes: list[float], up: list[list[int]], down: list[list[int]], real: int
) -> list[float]:
    """Return the middle of each node, moved towards its neighbours sweep by sweep; nodes from `real` on are bends."""
    x = [0.0] * len(sizes)
    for layer in layers:
        edge = 0.0
        for node in layer:
            x[node] = edge + sizes[node] / 2
            edge += sizes[node] + _GAP
    for sweep in range(_PLACES):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = [_pull(node, x, up[node] + down[node], real) for node in layer]
            gaps = [(sizes[a] + sizes[b]) / 2 + _GAP for a, b in pairwise(layer)]
            weights = [_SHORT if node < real else 1.0 for node in layer]
            for node, place in zip(layer, spaced(wanted, gaps, weights), strict=True):
                x[node] = place
    return x


def _pull(node: int, x: list[float], near: list[int], real: int) -> float:
    """Return the weighted mean of the positions of a node's neighbours."""
    weights = [_SHORT if node < real and other < real else 1.0 for other in near]
    return fmean([x[other] for other in near], weights) if near else x[node]


def spaced(wanted: Sequence[float], gaps: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the positions nearest to the wanted ones, in least squares, that keep the order and the gaps.

    >>> spaced([0.0, 0.0, 10.0], [4.0, 4.0], [1.0, 1.0, 1.0])
    [-2.0, 2.0, 10.0]
    """
    before = [0.0]
    for gap in gaps:
        before.append(before[-1] + gap)
    groups: list[tuple[float, float, int]] = []  # nodes that touch: their mean, weight and number
    for want, shift, weight in zip(wanted, before, weights, strict=False):
        groups.append((want - shift, weight, 1))
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (a, one, m), (b, two, n) = groups[-2:]
            groups[-2:] = [((a * one + b * two) / (one + two), one + two, m + n)]
    flat = [mean for mean, _, number in groups for _ in range(number)]
    return [place + shift for place, shift in zip(flat, before, strict=False)]

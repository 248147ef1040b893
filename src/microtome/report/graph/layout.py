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
    """The layout of nodes, each before those that read from it.

    Args:
        widths: Of each node.
        below: Nodes that are to be below all others.
    """
    ranks = _ranks(len(widths), edges, set(below))
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


def _ranks(count: int, edges: Sequence[tuple[int, int]], below: set[int]) -> list[int]:
    """One below the lowest that it reads from; those that are to be below, below all others."""
    into: dict[int, list[int]] = {}
    for source, target in edges:
        into.setdefault(target, []).append(source)
    ranks = [0] * count
    for node in [node for node in range(count) if node not in below]:
        ranks[node] = max((ranks[source] + 1 for source in into.get(node, ())), default=0)
    border = max((ranks[node] + 1 for node in range(count) if node not in below), default=0)
    for node in sorted(below):
        ranks[node] = max([border, *(ranks[source] + 1 for source in into.get(node, ()))])
    return ranks


def _neighbours(count: int, links: Sequence[tuple[int, int]]) -> tuple[list[list[int]], list[list[int]]]:
    up: list[list[int]] = [[] for _ in range(count)]
    down: list[list[int]] = [[] for _ in range(count)]
    for above, under in links:
        up[under].append(above)
        down[above].append(under)
    return up, down


def _order(layers: list[list[int]], up: list[list[int]], down: list[list[int]]) -> None:
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
    x = [0.0] * len(sizes)
    for layer in layers:
        edge = 0.0
        for node in layer:
            x[node] = edge + sizes[node] / 2
            edge += sizes[node] + _GAP
    for sweep in range(_PLACES):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = [_pulled(node, x, up[node] + down[node], real) for node in layer]
            gaps = [(sizes[a] + sizes[b]) / 2 + _GAP for a, b in pairwise(layer)]
            weights = [_SHORT if node < real else 1.0 for node in layer]
            for node, place in zip(layer, spaced(wanted, gaps, weights), strict=True):
                x[node] = place
    return x


def _pulled(node: int, x: list[float], near: list[int], real: int) -> float:
    """The position that the edges of a node pull it to."""
    pulls = [_SHORT if node < real and other < real else 1.0 for other in near]
    drawn = sum(pull * x[other] for pull, other in zip(pulls, near, strict=True))
    return drawn / sum(pulls) if near else x[node]


def spaced(wanted: Sequence[float], gaps: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The places nearest to those wanted, by the squares of the distances, that keep their order and their gaps.

    >>> spaced([0.0, 0.0, 10.0], [4.0, 4.0], [1.0, 1.0, 1.0])
    [-2.0, 2.0, 10.0]
    """
    before = [0.0]
    for gap in gaps:
        before.append(before[-1] + gap)
    groups: list[tuple[float, float, int]] = []  # those that touch: their middle, their weight, how many
    for want, shift, weight in zip(wanted, before, weights, strict=False):
        groups.append((want - shift, weight, 1))
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (a, one, m), (b, two, n) = groups[-2:]
            groups[-2:] = [((a * one + b * two) / (one + two), one + two, m + n)]
    flat = [middle for middle, _, many in groups for _ in range(many)]
    return [place + shift for place, shift in zip(flat, before, strict=False)]

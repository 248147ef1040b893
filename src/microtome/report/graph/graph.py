"""A trace as a dataflow graph of calls, down to a depth.

A node is a call that is not expanded, or consecutive operators that an expanded call runs itself between its children.
Every node is an interval of the run, so the graph is acyclic.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

from microtome.errors import BadQuery
from microtome.results.cuts import Cut
from microtome.results.trace import Trace, TracedCall, Value
from microtome.units import shape, size, some

#: The most nodes, about, of a graph without an explicit depth.
_NODES = 60


@dataclass
class Node:
    """An interval of the run.

    Attributes:
        name: The address of the call; of operators between calls, their names; of an input its name.
        type: The type of the module.
        detail: The shapes of its outputs.
        is_head: Whether it runs before the cut.
    """

    index: int
    kind: Literal["input", "call", "glue", "output"]
    name: str
    type: str = ""
    detail: str = ""
    is_head: bool = False


@dataclass
class Edge:
    """Values that one node produces and another reads.

    Attributes:
        values: The bytes of each value, by its index in the trace.
        detail: The shapes.
        crosses: Whether the cut goes through it.
    """

    source: int
    target: int
    values: dict[int, int] = field(default_factory=dict)
    detail: str = ""
    crosses: bool = False

    @property
    def nbytes(self) -> int:
        return sum(self.values.values())

    @property
    def label(self) -> str:
        return (f"{len(self.values)} values, " if len(self.values) > 1 else "") + size(self.nbytes)


@dataclass
class Graph:
    """Nodes in the order of the run, and the edges between them.

    Attributes:
        cut: The label of the cut; empty: there is none.
    """

    nodes: list[Node]
    edges: list[Edge]
    cut: str = ""


def build_graph(trace: Trace, depth: int | None = None, cut: str | Cut | None = None) -> Graph:
    """Build the graph of the forward.

    Args:
        depth: Expand the calls above this depth; None: as deep as there is room for.
        cut: Where to cut; the calls that contain it are expanded as far as needed.
    """
    if depth is not None and (not isinstance(depth, int) or depth < 0):
        raise BadQuery(f"expected depth of 0 or more, got {depth!r}")
    if cut is not None and not isinstance(cut, str | Cut):
        raise BadQuery(f"expected cut to be an address or a Cut, got {cut!r}")
    if depth is None:
        deepest = max(call.depth for call in trace.calls)
        fitting = (d for d in range(deepest, 1, -1) if len(_GraphBuilder(trace, d, cut).nodes) <= _NODES)
        depth = next(fitting, 1)
    return _GraphBuilder(trace, depth, cut).graph()


class _GraphBuilder:
    def __init__(self, trace: Trace, depth: int, cut: str | Cut | None) -> None:
        self._trace = trace
        self._depth = depth
        self._cut = cut
        at = None if cut is None else trace[cut if isinstance(cut, str) else cut.at]
        self._cut_call = at
        self._above = set() if at is None else {call.index for call in _path(trace, at)}
        self.nodes: list[Node] = []
        self._of_op: dict[int, int] = {}
        self._inputs: dict[int, int] = {}
        # A view of a weight is not the output of the call that made it first: others read it too.
        self._weights = {value.memory for value in trace.values if value.origin in ("parameter", "buffer")}
        self._writers: dict[int, list[int]] = {}
        self._make_nodes()

    def graph(self) -> Graph:
        edges: dict[tuple[int, int], Edge] = {}
        for op in self._trace.ops:
            if op.index in self._of_op:
                for value in dict.fromkeys((*op.inputs, *op.mutates)):
                    self._join(edges, value, op.index, self._of_op[op.index])
        root = self._trace.calls[0]
        end = Node(len(self.nodes), "output", "output")
        self.nodes.append(end)
        for value in dict.fromkeys(root.outputs):
            self._join(edges, value, root.ends, end.index)
        for edge in edges.values():
            edge.crosses = self.nodes[edge.source].is_head and not self.nodes[edge.target].is_head
            edge.detail = ", ".join(shape(self._trace.values[value].shape) for value in edge.values)
        return Graph(self.nodes, list(edges.values()), self._cut_label(list(edges.values())))

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _make_nodes(self) -> None:
        border = None if self._cut_call is None else self._cut_call.ends
        for value in self._trace.values:
            if value.origin == "input":
                self._inputs[value.index] = len(self.nodes)
                self.nodes.append(
                    Node(len(self.nodes), "input", value.name or "input", "", shape(value.shape), border is not None)
                )
        last: tuple[int | None, bool, bool] | None = None
        names: list[str] = []
        for op in self._trace.ops:
            if op.phase != "forward":
                continue
            for mutated in op.mutates:
                self._writers.setdefault(self._trace.values[mutated].memory, []).append(op.index)
            owner, is_glue = self._owner(op.call)
            is_head = border is not None and op.index < border
            if (owner, is_glue, is_head) != last:
                last, names = (owner, is_glue, is_head), []
                self.nodes.append(self._node(owner, is_glue, is_head))
            node = self.nodes[-1]
            self._of_op[op.index] = node.index
            if is_glue:
                names.append(op.name.removeprefix("aten.").partition(".")[0])
                written = [shape(self._trace.values[index].shape) for index in op.outputs or op.mutates]
                node.name, node.detail = some(names, 3, " +{}"), ", ".join(written[:2])

    def _owner(self, call: int | None) -> tuple[int | None, bool]:
        """Return the call that an operator is drawn in, and whether that call is expanded."""
        if call is None:
            return None, True
        for above in _path(self._trace, self._trace.calls[call]):
            if not self._is_expanded(above):
                return above.index, False
        return call, True

    def _is_expanded(self, call: TracedCall) -> bool:
        holds_cut = call.index in self._above and call is not self._cut_call
        return holds_cut or (call.depth < self._depth and bool(call.children))

    def _node(self, owner: int | None, is_glue: bool, is_head: bool) -> Node:
        if is_glue or owner is None:
            return Node(len(self.nodes), "glue", "", is_head=is_head)
        call = self._trace.calls[owner]
        returned = ", ".join(shape(self._trace.values[value].shape) for value in call.outputs[:2])
        return Node(len(self.nodes), "call", call.address or call.type, call.type, returned, is_head)

    # -- edges ---------------------------------------------------------------------------------------------------------

    def _join(self, edges: dict[tuple[int, int], Edge], index: int, reader: int, target: int) -> None:
        source = self._source(self._trace.values[index], reader)
        if source is not None and source != target:
            edge = edges.setdefault((source, target), Edge(source, target))
            edge.values[index] = self._trace.values[index].nbytes

    def _source(self, value: Value, reader: int) -> int | None:
        """Return the node that last wrote a value before an operator; None for weights."""
        if value.memory in self._weights:
            return None
        writers = self._writers.get(value.memory, [])
        before = bisect_left(writers, reader)
        producer = -1 if value.producer is None else value.producer
        last = max(producer, writers[before - 1] if before else -1)
        if last >= 0:
            return self._of_op.get(last)
        first = value.index if value.alias_of is None else value.alias_of
        return self._inputs.get(value.index, self._inputs.get(first))

    # -- the cut -------------------------------------------------------------------------------------------------------

    def _cut_label(self, edges: list[Edge]) -> str:
        if self._cut_call is None:
            return ""
        where = f"cut at {self._cut_call.address}"
        if isinstance(self._cut, Cut):
            return f"{where}: {size(self._cut.nbytes)} cross"
        # These include what the tail can recompute from less: only a Cut knows what crosses.
        drawn = {value: nbytes for edge in edges if edge.crosses for value, nbytes in edge.values.items()}
        return f"{where}: {size(sum(drawn.values()))} on its edges"


def _path(trace: Trace, call: TracedCall) -> list[TracedCall]:
    """Return the calls that contain a call, the outermost first, and the call."""
    path = [call]
    while path[-1].parent is not None:
        path.append(trace.calls[path[-1].parent])
    return path[::-1]

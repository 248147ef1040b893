"""A graph of calls in the language of Graphviz."""

from __future__ import annotations

from collections.abc import Iterable

from microtome.report.graph.graph import Edge, Graph, Node

_SHAPES = {"input": "ellipse", "output": "ellipse", "call": "box", "glue": "box"}


def dot(graph: Graph) -> str:
    """A digraph; the two sides of a cut are clusters, and what crosses is red."""
    lines = ["digraph microtome {", '  node [fontname="sans-serif", fontsize=11];', "  edge [fontsize=9];"]
    if graph.cut:
        lines.append(f"  label={_quoted(graph.cut)}; labelloc=t;")
        for name, is_head in (("head", True), ("tail", False)):
            inside = (f"  {line}" for line in _nodes(node for node in graph.nodes if node.is_head == is_head))
            lines += [f"  subgraph cluster_{name} {{", f"    label={name}; style=dashed;", *inside, "  }"]
    else:
        lines += _nodes(graph.nodes)
    lines += map(_edge, graph.edges)
    return "\n".join([*lines, "}"]) + "\n"


def _nodes(nodes: Iterable[Node]) -> list[str]:
    return [_node(node) for node in nodes]


def _node(node: Node) -> str:
    said = [node.name, " ".join(filter(None, (node.type, node.detail)))]
    label = _quoted("\n".join(filter(None, said)))
    style = {"call": "rounded", "glue": "dashed"}.get(node.kind, "solid")
    return f'  n{node.index} [label={label}, shape={_SHAPES[node.kind]}, style="{style}"];'


def _edge(edge: Edge) -> str:
    red = ', color=red, fontcolor=red, style="bold"' if edge.crosses else ""
    return f"  n{edge.source} -> n{edge.target} [label={_quoted(edge.label)}, tooltip={_quoted(edge.detail)}{red}];"


def _quoted(text: str) -> str:
    """A string of the language; a name may hold anything."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'

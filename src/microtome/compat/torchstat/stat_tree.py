"""The modules of a model as a tree, whose nodes sum the quantities of those below them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from microtome.errors import BadQuery


class _Summed:
    """A quantity that is set for a node itself, and read summed with those of all nodes below it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, node: StatNode, owner: type | None = None) -> Any:
        total = getattr(node, self._name)
        for child in node.children:
            value = self.__get__(child)
            total = total + value if self._name != "_Memory" else [total[0] + value[0], total[1] + value[1]]
        return total

    def __set__(self, node: StatNode, value: Any) -> None:
        setattr(node, self._name, value)


class StatNode:
    """A module. Its own quantities are set; read, they include those of its children.

    Attributes:
        parameter_quantity: The number of parameters.
        inference_memory: The size of its outputs in MB.
        MAdd: Multiplications and additions.
        Flops: Multiply-accumulates.
        Memory: Bytes read and bytes written.
        duration: Seconds.
        granularity: The largest query that returns it, 0 for the root; set by `StatTree.update_stat_nodes_granularity`.
    """

    parameter_quantity = _Summed()
    inference_memory = _Summed()
    MAdd = _Summed()
    Flops = _Summed()
    Memory = _Summed()
    duration = _Summed()

    def __init__(self, name: str = "", parent: StatNode | None = None) -> None:
        self.name = name
        self.parent = parent
        self.children: list[StatNode] = []
        self.granularity = 1
        self.parameter_quantity = self.MAdd = self.Flops = 0
        self.inference_memory = self.duration = 0.0
        self.Memory = (0, 0)
        self._input_shape: Sequence[int] | None = None
        self._output_shape: Sequence[int] | None = None

    @property
    def input_shape(self) -> Sequence[int] | None:
        """The shape without the batch; by default that of the first child that ran, None if none did."""
        return _shape(self._input_shape, (child.input_shape for child in self.children))

    @input_shape.setter
    def input_shape(self, shape: Sequence[int]) -> None:
        self._input_shape = shape

    @property
    def output_shape(self) -> Sequence[int] | None:
        """The shape without the batch; by default that of the last child that ran, None if none did."""
        return _shape(self._output_shape, (child.output_shape for child in reversed(self.children)))

    @output_shape.setter
    def output_shape(self, shape: Sequence[int]) -> None:
        self._output_shape = shape

    @property
    def depth(self) -> int:
        """The height: 1 for a leaf, otherwise one more than that of the tallest child."""
        return 1 + max((child.depth for child in self.children), default=0)

    def find_child_index(self, child_name: str) -> int:
        """Return the index of the child with this name in `children`; -1 if there is none."""
        return next((index for index, child in enumerate(self.children) if child.name == child_name), -1)

    def add_child(self, node: StatNode) -> None:
        """Add a child, unless there is one with the same name."""
        if self.find_child_index(node.name) == -1:
            self.children.append(node)

    def __repr__(self) -> str:
        return f"<StatNode {self.name!r}, height {self.depth}>"


def _shape(own: Sequence[int] | None, below: Iterator[Sequence[int] | None]) -> Sequence[int] | None:
    if own is not None:
        return own
    shapes = [shape for shape in below if shape]
    return next((shape for shape in shapes if any(shape)), shapes[0] if shapes else None)


class StatTree:
    """The tree of nodes below a root.

    >>> root, block = StatNode("root"), StatNode("block")
    >>> root.add_child(block)
    >>> for name in ("block.conv", "block.relu"):
    ...     block.add_child(StatNode(name, block))
    >>> root.add_child(StatNode("fc", root))
    >>> tree = StatTree(root)
    >>> [[node.name for node in tree.get_collected_stat_nodes(q)] for q in (1, 2, 3)]
    [['block.conv', 'block.relu', 'fc'], ['block', 'fc'], ['root']]
    """

    def __init__(self, root_node: StatNode) -> None:
        self.root_node = root_node

    def get_same_level_max_node_depth(self, query_node: StatNode) -> int:
        """Return the height of the tallest child of the node's parent; 0 for the root."""
        parent = query_node.parent
        return 0 if query_node is self.root_node or parent is None else parent.depth - 1

    def update_stat_nodes_granularity(self) -> None:
        """Set the `granularity` of every node."""
        nodes = [self.root_node]
        for node in nodes:
            node.granularity = self.get_same_level_max_node_depth(node)
            nodes.extend(node.children)

    def get_collected_stat_nodes(self, query_granularity: int) -> list[StatNode]:
        """Return nodes that cover every leaf once: the highest above each that are no taller than this."""
        try:
            height = operator.index(query_granularity)
        except TypeError:
            height = 0
        if height < 1:
            raise BadQuery(
                f"expected query_granularity to be an integer of at least 1 (the leaves), got {query_granularity!r}"
            )
        self.update_stat_nodes_granularity()
        return list(_cover(self.root_node, height))


def _cover(node: StatNode, height: int) -> Iterator[StatNode]:
    if node.depth <= height:
        yield node
        return
    for child in node.children:
        yield from _cover(child, height)

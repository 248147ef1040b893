"""Take the part of a graph between some of its values and others."""

from __future__ import annotations

from collections.abc import Sequence
from keyword import iskeyword
from typing import Any

import torch
from torch import fx

from microtome.errors import Unsupported

_aten = torch.ops.aten
#: Operators that return their argument, or a copy of it: in a graph without side effects, the same value.
_COPIES = (_aten.detach.default, _aten.detach_copy.default, _aten.alias.default, _aten.clone.default)


class HiddenSize(Unsupported):
    """A size of an input of the model that no input of the part has.

    Attributes:
        symbol: The symbol.
    """

    def __init__(self, symbol: Any) -> None:
        super().__init__(f"the size {symbol} of an input of the model does not cross the cut")
        self.symbol = symbol


def source_of(node: fx.Node) -> fx.Node:
    """The node whose value a node copies."""
    while node.target in _COPIES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


class Partition:
    """The operators that compute some values of a graph from others.

    Args:
        inputs: The nodes of the values that are known; none is computed.
        names: Their names.
    """

    def __init__(self, inputs: Sequence[fx.Node], names: Sequence[str]) -> None:
        self.graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._sizes: dict[Any, tuple[fx.Node, int]] = {}
        self.placeholders = []
        for node, name in zip(inputs, names, strict=True):
            placeholder = self.graph.placeholder(to_identifier(name))
            placeholder.meta = {"val": node.meta["val"]}
            self.placeholders.append(placeholder)
            self._copies.setdefault(node, placeholder)
            for dim, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt):
                    self._sizes.setdefault(size.node.expr, (placeholder, dim))

    def finish(self, outputs: dict[str, fx.Node]) -> fx.Graph:
        """Add what computes these values, and return them by name."""
        nodes = {name: self._add(node) for name, node in outputs.items()}
        self.graph.output(nodes)
        return self.graph

    def _add(self, target: fx.Node) -> fx.Node:
        """Copy a node, after those that it depends on; without recursion, since graphs are deep."""
        pending = [target]
        while pending:
            node = pending[-1]
            if node in self._copies:
                pending.pop()
                continue
            size = node.meta.get("val")
            if isinstance(size, torch.SymInt) and size.node.expr in self._sizes:
                self._copies[node] = self.graph.call_function(_aten.sym_size.int, self._sizes[size.node.expr])
                self._copies[node].meta = {"val": size}
                continue
            if isinstance(size, torch.SymInt) and _reads_input(node):
                raise HiddenSize(size.node.expr)
            if node.op == "placeholder":
                raise Unsupported(f"an input of the model ({node.name}) is read after the cut, and does not cross it")
            missing = [argument for argument in node.all_input_nodes if argument not in self._copies]
            if missing:
                pending += missing
                continue
            self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
        return self._copies[target]


def _reads_input(node: fx.Node) -> bool:
    return node.target is _aten.sym_size.int and getattr(node.args[0], "op", "") == "placeholder"


def to_identifier(name: str) -> str:
    """A name of Python for an address or an argument.

    >>> to_identifier("layer1.0.relu#1"), to_identifier("0"), to_identifier("attn[0]")
    ('layer1_0_relu_1', 'x_0', 'attn_0')
    """
    text = "".join(char if char.isalnum() else "_" for char in name).strip("_")
    return text if text.isidentifier() and not iskeyword(text) else f"x_{text}"

"""The memory that an autograd graph holds for its backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from microtome.engine.autograd_owners import Node, nodes_of

_RAW = "_raw_saved_"


#: Bytes of a node beside the tensors that it saved, roughly, as measured on chains of linear layers, norms and ReLUs.
_NODE_BYTES = 1024


def graph_bytes(outputs: Iterable[Tensor]) -> int:
    """Estimate the bytes of the nodes of a graph, without the tensors that they saved."""
    return sum(_NODE_BYTES for _ in _graph_of(outputs))


def saved_bytes(outputs: Iterable[Tensor], others: Iterable[Tensor] = ()) -> int:
    """Count the bytes of memory that the graph of some tensors saved for its backward.

    What an activation checkpoint computes again is not counted, nor what a function keeps in Python attributes.

    Args:
        others: Tensors whose memory is not counted, such as parameters.
    """
    seen = {tensor.untyped_storage().data_ptr() for tensor in others}
    total = 0
    for tensor in _saved_tensors(_graph_of(outputs)):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _graph_of(outputs: Iterable[Tensor]) -> Iterator[Node]:
    """Each node of the graph of some tensors, once."""
    visited: set[Node] = set()
    pending = nodes_of(list(outputs))
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        pending.extend(below for below, _ in node.next_functions if below is not None)
        yield node


def _saved_tensors(nodes: Iterable[Node]) -> Iterator[Tensor]:
    for node in nodes:
        for name in dir(node):
            if name.startswith(_RAW):
                saved = getattr(node, name)
                for one in saved if isinstance(saved, list | tuple) else (saved,):
                    value: Any = getattr(one, "data", None)  # as packed: unpacking may compute it again
                    if isinstance(value, Tensor) and not value.is_meta:
                        yield value

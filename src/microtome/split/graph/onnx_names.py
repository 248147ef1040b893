"""The names of values and sizes in an ONNX model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, count
from typing import Any

from microtome.engine.symbolic_shapes import SYMBOL
from microtome.split.graph.stage_graph import StageGraph


def name_values(model: Any, graph: StageGraph) -> None:
    """Name the outputs of an ONNX model as the stage does, and nothing else as its inputs or outputs.

    No two values of ONNX have the same name: an output that is also an input gets another one.
    """
    taken = {*graph.inputs, *graph.outputs}
    outputs = list(model.graph.outputs)
    for value in (*_computed_values(model), *model.graph.initializers.values()):
        if value.name in taken and value not in outputs:
            value.name = _name_apart(value.name, taken)
    for value, name in zip(outputs, graph.outputs, strict=True):
        value.name = _name_apart(name, taken) if name in graph.inputs else name


def _computed_values(model: Any) -> Iterator[Any]:
    return (value for node in model.graph for value in node.outputs)


def _name_apart(name: str, taken: set[str]) -> str:
    """Return a name that is not taken, and add it."""
    unique = next(f"{name}.out{number or ''}" for number in count() if f"{name}.out{number or ''}" not in taken)
    taken.add(unique)
    return unique


def name_sizes(model: Any, graph: StageGraph) -> None:
    """Name the sizes in an ONNX model as the metadata of the stage does, such as `s0`."""
    names = {
        dim.value: name
        for value, spelled in zip(model.graph.inputs, graph.shapes.spelled, strict=True)
        for dim, name in zip(value.shape, spelled, strict=True)
        if isinstance(getattr(dim, "value", None), str)
    }

    def rename(match: re.Match[str]) -> str:
        name = names.get(match[0], match[0])
        return name if name.isidentifier() or match[0] == match.string else f"({name})"

    for value in chain(model.graph.inputs, _computed_values(model)):
        for position, dim in enumerate(value.shape or ()):
            if isinstance(text := getattr(dim, "value", None), str):
                value.shape[position] = SYMBOL.sub(rename, text)

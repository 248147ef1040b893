"""Capture a run of a model as a graph of operators without side effects, on fake tensors."""

from __future__ import annotations

import operator
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from microtome.engine.fingerprint import named_weights
from microtome.engine.meta_run import substitute_tensors
from microtome.engine.pytree import map_tensors, tensors_in
from microtome.engine.symbolic_shapes import ShapeCheck, SymbolicShapes
from microtome.engine.torch_internals import interpret_sizes, keep_interpolations, make_fx
from microtome.errors import MicrotomeError, Unsupported, describe_error
from microtome.inputs import Inputs

_aten = torch.ops.aten
#: The folders whose code is not the user's.
_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


class CapturedRun(NamedTuple):
    """A run as a graph.

    Attributes:
        graph: The operators; its inputs are the tensors among the inputs of the model, each once, and its output is
            what the run returned. It has no side effects: in-place operators are replaced.
        weights: The names of the weights that it reads, by the targets of its `get_attr` nodes. Other targets are
            constants.
    """

    graph: fx.GraphModule
    weights: dict[str, str]


def capture_run(
    model: nn.Module, inputs: Inputs, run: Callable[[Inputs], Sequence[Sequence[Tensor]]], shapes: SymbolicShapes
) -> CapturedRun:
    """Run a function of a model on fake tensors, and record the operators.

    Args:
        run: Runs the model on inputs like these, and returns groups of tensors.

    Raises:
        Unsupported: The control flow depends on values of tensors, or an operator cannot run on fake tensors.
    """
    with (
        warnings.catch_warnings(),
        substitute_tensors(model, inputs, "fake", shapes=shapes) as fakes,
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")  # of torch's own tracing
        tensors = list(tensors_in((fakes.args, fakes.kwargs)))
        names = {id(tensor): name for name, tensor in named_weights(model)}

        def run_on(*proxies: Tensor) -> Any:
            replaced = dict(zip(map(id, tensors), proxies, strict=True))
            args, kwargs = map_tensors(lambda tensor: replaced[id(tensor)], (fakes.args, fakes.kwargs))
            return tuple(map(tuple, run(Inputs(*args, **kwargs))))

        try:
            with keep_interpolations():
                recorded = make_fx(run_on)(*tensors)
                functional = make_fx(torch.func.functionalize(recorded, remove="mutations"))(*tensors)
        except MicrotomeError:
            raise
        except Exception as error:  # whatever the code of the model or of an operator raises on fake tensors
            raise Unsupported(f"{_describe_place(error)}{describe_error(error).splitlines()[0]:.300}") from error
        _generalize(functional.graph)
        targets = {str(node.target) for node in functional.graph.nodes if node.op == "get_attr"}
        constants = {target: getattr(functional, target) for target in sorted(targets)}
        weights = {target: names[id(tensor)] for target, tensor in constants.items() if id(tensor) in names}
    return CapturedRun(functional, weights)


def _generalize(graph: fx.Graph) -> None:
    """Replace what was chosen for the strides of this run, which may be others where the graph runs.

    The kernel of fused attention reads memory out of bounds where strides do not suit it, and a view is an error.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.view.default):
        node.target = _aten.reshape.default
    chosen, general = _aten._scaled_dot_product_flash_attention_for_cpu.default, _aten.scaled_dot_product_attention
    for node in graph.find_nodes(op="call_function", target=chosen):
        outputs = {user.args[1]: user for user in node.users}  # the second one is for the backward
        with graph.inserting_before(node):
            arguments = zip(("query", "key", "value", "dropout_p", "is_causal"), node.args, strict=False)
            attention = graph.call_function(general.default, kwargs={**dict(arguments), **node.kwargs})
        attention.meta = dict(outputs[0].meta)
        outputs[0].replace_all_uses_with(attention)
    graph.eliminate_dead_code()


def insert_checks(graph: fx.GraphModule, shapes: ShapeCheck, first: int = 0) -> None:
    """Make a graph raise if the sizes of its inputs do not meet the conditions.

    Args:
        first: The first of these conditions: the graph has the others already.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    with graph.graph.inserting_before(next(node for node in graph.graph.nodes if node.op != "placeholder")):
        tracer = fx.proxy.GraphAppendingTracer(graph.graph)
        sizes = {
            symbol: fx.Proxy(graph.graph.call_function(_aten.sym_size.int, (placeholders[tensor], dim)), tracer)
            for symbol, (tensor, dim) in shapes.positions().items()
        }
        for condition, text in list(zip(shapes.conditions, shapes.spell_conditions(), strict=True))[first:]:
            message = f"expected sizes with {text} in {shapes.describe()}"
            met = interpret_sizes(condition, sizes)
            if met is not True:  # for all sizes
                graph.graph.call_function(_aten._assert_scalar.default, (getattr(met, "node", met), message))
        for size in () if first else sizes.values():
            message = f"expected sizes of 1 or more in {shapes.describe()}"
            met = graph.graph.call_function(operator.ge, (size.node, 1))
            graph.graph.call_function(_aten._assert_scalar.default, (met, message))
    graph.recompile()


def _describe_place(error: Exception) -> str:
    """Name the last line of the user's code, or of a library other than torch, that an exception comes from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_LIBRARIES)]
    if not frames:
        return ""
    frame = frames[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}, in {frame.name}, {frame.line!r:.120}: "

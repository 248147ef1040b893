"""Capture a stage as a graph of operators, with its own weights alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from microtome.engine import Call, Session, Stop, Stopped
from microtome.engine.graph_capture import CapturedRun, capture_run, insert_checks
from microtome.engine.pytree import map_tensors, named_tensors, tensors_in
from microtome.engine.size_substitution import SizeSubstitution
from microtome.engine.symbolic_shapes import ShapeCheck, SymbolicShapes
from microtome.errors import Unsupported, describe_error
from microtome.inputs import Inputs
from microtome.split.analysis.randomness import is_random
from microtome.split.analysis.structure_spec import PLAIN, flatten
from microtome.split.execution.schedule import Schedule
from microtome.split.execution.stage_run import StageRun
from microtome.split.graph.comparison import compare_outputs
from microtome.split.graph.derived_facts import named_inputs
from microtome.split.graph.partition import HiddenSize, Partition, source_of
from microtome.split.graph.size_one import SizeOneTrial, dims_of, run_with_ones
from microtome.split.graph.stage_example import example_of, fill_inputs, run_example
from microtome.split.stage import Stage
from microtome.split.state.stage_state import StageState
from microtome.split.verification import BIT_EQUAL
from microtome.split.weights import tensor_at

#: Of more symbols than these, no combinations are tried.
_MAX_COMBINED = 4


class StageGraph(NamedTuple):
    """A stage as a graph.

    Attributes:
        module: The graph, which takes the tensors of `inputs` by position and returns a dict of those of `outputs`.
        inputs: The names of the tensors that it takes: those of a boundary, or of the model's arguments.
        outputs: The names of those that it returns: of a boundary, or paths in the model's output.
        shapes: The shapes that it accepts.
        dtypes: The dtypes that it accepts.
        results: The shapes, as text, and the dtypes of the tensors that it returns.
        plain: The numbers and strings of the model's output; None: some depend on shapes.
        order: The positions among the outputs of the last stage, of each tensor in the model's output.
        static: Why sizes are fixed, by dimension of a tensor of `inputs` or of the model's arguments, such as `x[0]`.
        excluded_ones: Why sizes may not be 1, by dimension of the model's arguments; by several, such as `x[0], x[1]`,
            if not all of these may be.
        trials: What the stage returns where symbols are 1, for all that may be.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shapes: ShapeCheck
    dtypes: tuple[torch.dtype, ...]
    results: list[tuple[list[str], torch.dtype]]
    plain: list[Any] | None
    order: list[int]
    static: dict[str, str]
    excluded_ones: dict[str, str]
    trials: list[SizeOneTrial]

    def exclude_ones(self, sizes: Iterable[Any], dims: Iterable[str], reason: str) -> None:
        """Accept no sizes of 1 for all of these together, which are those of dimensions of the model's arguments."""
        first = len(self.shapes.conditions)
        self.shapes.exclude_ones(sizes)
        self.excluded_ones[", ".join(dims)] = reason
        insert_checks(self.module, self.shapes, first)
        self.module.meta["conditions"] = self.shapes.spell_conditions()


class _SymbolChoice(NamedTuple):
    """A choice of the sizes of the inputs that are symbols.

    Attributes:
        dims: The number of leading dimensions of each input with sizes that may be symbols; None: all.
        reason: Why the others are fixed.
        static: Dimensions that are fixed nevertheless, by name, with the reason.
    """

    dims: int | None
    reason: str
    static: dict[str, str]

    def fixes(self, dim: int, name: str) -> str | None:
        """Why a dimension is fixed; None: it need not be."""
        if self.dims is not None and dim >= self.dims:
            return self.reason
        return self.static.get(name)


class _HiddenDims(Unsupported):
    """The stage needs sizes of the model's inputs that those of the tensors which cross do not determine.

    Attributes:
        dims: These dimensions, such as `x[0]`, with the reason.
    """

    def __init__(self, stage: Stage, dims: Iterable[str]) -> None:
        reason = f"the stage from {stage.begins_at!r} needs the size, which does not cross the cut"
        self.dims = dict.fromkeys(dims, reason)
        super().__init__(f"{', '.join(self.dims) or 'a size'}: {reason}")


#: Rejects a graph with a reason, or accepts it with None.
Check = Callable[["StageGraph"], str | None]


def capture_stage(stage: Stage, *, dynamic: bool = True, reject: Check = lambda _: None) -> StageGraph:
    """Capture a stage, with as many symbolic sizes as its code allows.

    The model is run on fake tensors to the end of the stage, and what lies between the two cuts is taken.

    Args:
        reject: Returns why a graph cannot be used; then fewer sizes are symbols. That with the sizes of the example is
            returned without asking.
    """
    own = _check_capturable(stage)
    larger = _enlarge_batch(fill_inputs(own, stage.device))
    reason = "dynamic=False"
    for dims in (None, 1) if dynamic else ():
        found = _capture_with_visible_sizes(stage, larger, _SymbolChoice(dims, reason, {}))
        if isinstance(found, Unsupported):
            reason = str(found)
        elif (rejected := reject(found)) is None:
            return found
        else:
            reason = rejected
    captured = _capture(stage, own, _SymbolChoice(0, reason, {}))
    captured.static.update(dict.fromkeys(captured.static, reason))  # also of the tensors that cross
    return captured


def capture_exact(stage: Stage, *, dynamic: bool = True) -> StageGraph:
    """Capture a stage with symbolic sizes, as far as the graph then computes the stage on the example bit for bit.

    A run for other sizes may choose other kernels. If no graph is bit-equal, that with the most symbols is returned.
    `meta["verified"]` of the module says how its outputs on the example compare with those of the stage.

    Raises:
        Unsupported: Outputs differ by more than rounding.
    """
    example = example_of(stage)
    if example is None:
        captured = capture_stage(stage, dynamic=dynamic)
        captured.module.meta["verified"] = "not verified: the example is not here"
        return captured
    expected, tensors = run_example(stage, example)
    close: list[StageGraph] = []  # equal but for rounding

    def reject(graph: StageGraph) -> str | None:
        try:
            verified = _compare(stage, graph, tensors, expected)
        except Unsupported as error:
            return str(error)
        graph.module.meta["verified"] = verified
        close.append(graph)
        return None if verified == BIT_EQUAL else f"with other sizes than those of the example, {verified}"

    captured = capture_stage(stage, dynamic=dynamic, reject=reject)
    if "verified" not in captured.module.meta:
        reason = reject(captured)
        if not close:
            raise Unsupported(reason or "")
    return captured if captured.module.meta.get("verified") == BIT_EQUAL else close[0]


def _compare(stage: Stage, graph: StageGraph, tensors: Sequence[Tensor], expected: dict[str, Tensor]) -> str:
    """Compare the outputs of a graph with those of the stage."""
    name = f"the graph of stage {stage.index}"
    try:
        with torch.no_grad():
            got = graph.module(*tensors)
    except RuntimeError as error:  # of an operator, for which the tensors have other strides than it expects
        raise Unsupported(f"{name} does not run on the example: {describe_error(error):.300}") from error
    return compare_outputs(got, expected, name)


def _capture_with_visible_sizes(stage: Stage, example: Inputs, attempt: _SymbolChoice) -> StageGraph | Unsupported:
    """Capture a stage; sizes that it needs and cannot see are fixed."""
    while True:
        try:
            return _capture(stage, example, attempt)
        except _HiddenDims as error:
            if not error.dims.keys() - attempt.static.keys():
                return error
            attempt.static.update(error.dims)
        except Unsupported as error:
            return error


def _check_capturable(stage: Stage) -> Inputs:
    """Raise if a stage cannot be captured; return its example."""
    if stage.example is None:
        raise Unsupported("the example that the model was split on is not here: split it, or load it with load_stage")
    stage.check_modes()
    if stage.grad:
        raise Unsupported(
            "a graph computes no gradient, so a stage of a model that was split with grad=True cannot be captured: "
            "split it without grad=True to run it, or train the stages as they are"
        )
    if stage.model.training and stage.state is not None:
        raise Unsupported(
            f"a stage of a model in training mode writes to {stage.state} in each run, and cannot be captured as a "
            "graph: split the model in eval mode, after model.eval()"
        )
    if stage.state is not None or stage.spec.states:
        raise Unsupported(
            "a stage that keeps state between runs, such as a KV cache, cannot be captured as a graph: split the model "
            "with inputs for a single pass, such as use_cache=False"
        )
    if stage.spec.inputs.num_arrays:
        raise Unsupported("a stage of a model that takes numpy arrays cannot be captured as a graph: pass tensors")
    if stage.draws_random_numbers:
        raise Unsupported(
            "a model that draws random numbers between calls before the cut cannot be captured as a graph: set the "
            "model to eval mode, or pass the random numbers as inputs"
        )
    return stage.example


def _enlarge_batch(inputs: Inputs) -> Inputs:
    """Repeat tensors of one row, since a size of 1 is always taken for a fixed one."""
    tensors = [tensor for tensor in tensors_in((inputs.args, inputs.kwargs)) if tensor.dim()]
    if not tensors or any(tensor.shape[0] != 1 for tensor in tensors):
        return inputs
    args, kwargs = map_tensors(
        lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() else tensor, (inputs.args, inputs.kwargs)
    )
    return Inputs(*args, **kwargs)


def _capture(stage: Stage, example: Inputs, attempt: _SymbolChoice) -> StageGraph:
    named = list(named_inputs(stage.model, example).items())
    dims = [(id(tensor), dim, f"{name}[{dim}]") for name, tensor in named for dim in range(tensor.dim())]
    fixed = {name: why for _, dim, name in dims if (why := attempt.fixes(dim, name)) is not None}
    dynamic = {
        id(tensor): [dim for key, dim, name in dims if key == id(tensor) and name not in fixed] for _, tensor in named
    }
    shapes = SymbolicShapes(dynamic, stage.device)
    groups: dict[str, Any] = {}
    captured = capture_run(stage.model, example, lambda inputs: _run(stage, inputs, shapes, groups), shapes)
    *boundaries, outputs = _output_nodes(captured.graph)
    inputs = [node for node in captured.graph.graph.nodes if node.op == "placeholder"]
    names = [name for name, _ in named]
    sizes = ShapeCheck(names, _sizes_of(inputs, shapes), shapes.conditions())
    if stage.begins_at is not None:
        inputs, names = list(map(source_of, boundaries[0])), groups["begins"]
    ends = boundaries[-1] if stage.ends_at is not None else outputs
    ends_names = groups["ends" if stage.ends_at is not None else "output"]
    partition = Partition(inputs, names)
    try:
        graph = partition.finish(dict(zip(ends_names, map(source_of, ends), strict=True)))
    except HiddenSize as error:
        raise _HiddenDims(stage, sizes.dims_of(error.symbol)) from error
    module = _bind(stage, graph, captured)
    _reject_random_operators(stage, module)
    substitution = SizeSubstitution(_sizes_of(inputs, shapes), shapes.conditions(groups["skipped"]), shapes.example)
    if substitution.hidden:
        raise _HiddenDims(stage, dims_of(sizes, sorted(substitution.hidden, key=str)))
    for name, tensor in named:
        fixed |= {f"{name}[{dim}]": reason for dim, reason in shapes.fixed_dims(tensor).items()}
    check = ShapeCheck(names, substitution.shapes, substitution.conditions)
    if stage.begins_at is not None:
        fixed = check.fixed_dims() | fixed
    dtypes = tuple(node.meta["val"].dtype for node in inputs)
    tensors = [_value_of(node, captured) for node in map(source_of, ends)]
    results = [([_spell(shapes.size(size), check, substitution) for size in one.shape], one.dtype) for one in tensors]
    found = StageGraph(
        module, tuple(names), tuple(ends_names), check, dtypes, results, groups["plain"], groups["order"], fixed, {}, []
    )
    insert_checks(module, check)
    _try_ones(stage, found, example, sizes, substitution.exact)
    module.meta |= {
        "inputs": found.inputs,
        "outputs": found.outputs,
        "shapes": check.describe(),
        "conditions": check.spell_conditions(),
        "static": fixed,
        "excluded_ones": found.excluded_ones,
    }
    return found


def _spell(size: Any, check: ShapeCheck, substitution: SizeSubstitution) -> str:
    """A size of an output as text; `?` if the sizes that the stage takes do not determine it."""
    expressed = size if isinstance(size, int) else substitution.express(size)
    return "?" if expressed is None else check.spell(expressed)


def _reject_random_operators(stage: Stage, module: fx.GraphModule) -> None:
    """Raise if operators of a graph draw random numbers: other ones than those of the stage."""
    nodes = (node for node in module.graph.nodes if node.op == "call_function")
    found = sorted({str(node.target) for node in nodes if is_random(node.target, node.args, node.kwargs)})
    if found:
        raise Unsupported(
            f"stage {stage.index} draws random numbers ({', '.join(found)}), and cannot be captured as a graph: set "
            "the model to eval mode, or pass the random numbers as inputs"
        )


def _value_of(node: fx.Node, captured: CapturedRun) -> Tensor:
    """The tensor of a node: a weight or a constant has no other description."""
    value: Tensor = getattr(captured.graph, str(node.target)) if node.op == "get_attr" else node.meta["val"]
    return value


def _sizes_of(nodes: Iterable[fx.Node], shapes: SymbolicShapes) -> list[list[Any]]:
    return [[shapes.size(size) for size in node.meta["val"].shape] for node in nodes]


def _try_ones(stage: Stage, graph: StageGraph, example: Inputs, shapes: ShapeCheck, sizes: Mapping[Any, Any]) -> None:
    """Compare a graph with the stage where symbols are 1, for all combinations; exclude those for which they differ.

    Args:
        shapes: Those of the tensors among the model's arguments.
        sizes: The symbols, in the sizes of the tensors that the stage takes.

    Raises:
        Unsupported: They differ, and the example that the model was split on has these sizes.
    """
    assert stage.example is not None
    own = [tuple(tensor.shape) for tensor in named_inputs(stage.model, stage.example).values()]
    symbols = sorted((one for one in sizes if shapes.dims_of(one) and sizes[one].free_symbols), key=shapes.spell)
    excluded: list[set[Any]] = []
    for number in range(1, len(symbols) + 1):
        for combination in itertools.combinations(symbols, number):
            if any(one <= {*combination} for one in excluded):
                continue
            dims, ones = dims_of(shapes, combination), tuple(sizes[symbol] for symbol in combination)
            try:
                if number > 1 and len(symbols) > _MAX_COMBINED:
                    raise Unsupported(f"not tried: {len(symbols)} sizes have too many combinations")
                expected, tensors = run_with_ones(stage, example, shapes, combination)
                if graph.shapes.find_mismatch(tensors) is None:
                    trial = SizeOneTrial(ones, dims, tensors, expected)
                    trial.compare(lambda tensors: graph.module(*tensors), f"the graph of stage {stage.index}")
                    graph.trials.append(trial)
            except Unsupported as error:
                if all(shapes.value_of(symbol, own) == 1 for symbol in combination):
                    raise
                excluded.append({*combination})
                graph.exclude_ones(ones, dims, str(error))


def _run(stage: Stage, inputs: Inputs, shapes: SymbolicShapes, groups: dict[str, Any]) -> list[list[Tensor]]:
    """Run the model to the end of a stage; return the tensors that cross its cuts, and the output; add their names."""
    schedules = {"begins": stage.begins, "ends": stage.ends}
    recorded = {name: schedule for name, schedule in schedules.items() if schedule is not None}
    with ExitStack() as stack:
        runs = {name: _record(stage, name, schedule, inputs, shapes, stack) for name, schedule in recorded.items()}
        output = _run_model(stage, inputs)
    tensors = {name: run.crossing for name, run in runs.items()}
    groups.update({name: list(found) for name, found in tensors.items()})
    paths = dict(named_tensors(output))
    groups["output"] = [path or "output" for path in paths]
    _, flat, plain = flatten(output, (inputs.args, inputs.kwargs))
    positions = {id(tensor): position for position, tensor in enumerate(paths.values())}
    groups["order"] = [positions[id(tensor)] for tensor in flat]
    groups["skipped"] = runs["begins"].skipped_guards if "begins" in runs else []
    groups["plain"] = plain if all(type(value) in PLAIN for value in plain) else None
    return [*(list(found.values()) for found in tensors.values()), list(paths.values())]


def _run_model(stage: Stage, inputs: Inputs) -> Any:
    """Run the model to the end of a stage; return its output, or None for a stage that ends at a cut."""
    try:
        output = inputs.run(stage.model)
    except Stopped:
        return None
    if stage.ends is not None:
        raise Unsupported(f"the model returned before the cut at {stage.ends.at!r}: its control flow depends on inputs")
    return output


class _CutRecorder(StageRun):
    """Records what crosses a cut, in a run that may go on after it.

    Attributes:
        crossing: Copies of the tensors, by name: the run may write to them after the cut.
        skipped_guards: The numbers of guards inside calls that the stage after the cut skips, and which return tensors
            alone: it takes these as they are, whatever led to them.
    """

    def __init__(self, ends: Schedule, shapes: SymbolicShapes) -> None:
        super().__init__(None, ends)
        self.crossing: dict[str, Tensor] = {}
        self.skipped_guards: list[range] = []
        self._shapes = shapes
        self._first_guards: dict[Call, int] = {}

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._first_guards[call] = self._shapes.num_guards
        super().enter(call, args, kwargs)

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        was_complete, num_skipped = self.is_complete(call), len(self.skipped_calls)
        super().exit(call, args, kwargs, output)
        if self.is_complete(call) and not was_complete:
            self.crossing = {name: tensor.clone() for name, tensor in self.boundary("").tensors.items()}
        first = self._first_guards.pop(call, None)
        returned = self.skipped_calls[num_skipped:]
        if first is not None and returned and not any(_has_numbers(record.plain) for record in returned):
            self.skipped_guards.append(range(first, self._shapes.num_guards))


def _has_numbers(plain: Iterable[Any]) -> bool:
    return any(isinstance(value, bool | int | float | str) for value in plain)


def _record(
    stage: Stage, name: str, schedule: Schedule, inputs: Inputs, shapes: SymbolicShapes, stack: ExitStack
) -> _CutRecorder:
    """Record what crosses a cut while the block is open; the run stops at the cut where the stage ends."""
    run = _CutRecorder(schedule, shapes)
    run.begin(StageState([]))
    run.record_inputs(stage.flatten_inputs(inputs))
    modules = stage.modules_of(schedule)
    last = stage.last_module if name == "ends" else None
    stops = [] if last is None else [Stop(last, when=run.is_complete)]
    session = Session(stage.model, [run], stops, at=modules, fast_paths=True, other_threads="ignore", backward=False)
    stack.enter_context(session)
    return run


def _output_nodes(graph: fx.GraphModule) -> Sequence[Sequence[fx.Node]]:
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    groups: Any = output.args[0]
    return list(groups)


def _bind(stage: Stage, graph: fx.Graph, captured: CapturedRun) -> fx.GraphModule:
    """Make a module of a graph, with the weights of the stage under their names in the model."""
    tensors: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op != "get_attr":
            continue
        name = captured.weights.get(node.target)
        if name is None:
            tensors[node.target] = getattr(captured.graph, node.target)
            continue
        node.target, tensors[name] = name, tensor_at(stage.model, name)
        if tensors[name] is None or tensors[name].is_meta:
            raise Unsupported(f"the weight {name!r} of the stage is not loaded: capture the stage where it is")
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(tensors, graph, class_name=f"{type(stage.model).__name__}Stage{stage.index}")

"""Stages that run a compiled graph."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from microtome.engine import Probe
from microtome.errors import BadBoundary, BadInputs, Unsupported, describe_error
from microtome.inputs import Inputs
from microtome.split.analysis.structure_spec import check_structure
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.schema import BoundaryRecord
from microtome.split.boundary.tensor_bytes import moved
from microtome.split.graph.comparison import compare_outputs
from microtome.split.graph.stage_example import copy_example, example_of
from microtome.split.graph.stage_graph import StageGraph, capture_stage
from microtome.split.stage import Stage
from microtome.split.state.stage_state import StageState

#: The most shapes of inputs whose facts are kept.
_MAX_SHAPES = 1000
#: Held while a compiled stage runs, eagerly or compiled: sessions make dynamo run all code eagerly meanwhile, also that
#: of other threads.
_lock = RLock()


class CompiledStage(Stage):
    """A stage that runs a compiled graph, with the same boundaries.

    The facts of a boundary depend on the shapes of the inputs alone: for shapes that are new, the stage runs eagerly.
    Several threads may run compiled stages; they take turns.

    Attributes:
        graph_info: The graph, before it was compiled.
        verified: `"bit-equal"` if the compiled graph returns on the example what the stage returns, otherwise the
            largest difference; or why that is not known.
    """

    def __init__(self, stage: Stage, graph: StageGraph, run: Callable[..., dict[str, Tensor]], example: Any) -> None:
        """Verify the compiled graph on an example: the model's inputs or a boundary; None: there is none."""
        schedules, weights = (stage.begins, stage.ends), stage.parameters_needed()
        super().__init__(
            stage.model, stage.index, *schedules, stage.spec, weights, stage.fingerprint, stage.state, stage.example
        )
        self._eager = stage
        self.graph_info = graph
        self._run_graph = run
        self._facts: OrderedDict[Any, BoundaryRecord] = OrderedDict()  # the least recently used first
        if stage.ends is None and graph.plain is None:
            raise Unsupported("the model returns numbers that depend on shapes, which a compiled stage cannot return")
        self.verified = "not verified: the example is not here" if example is None else self._verify(example)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        probes: Iterable[Probe] = (),
        *,
        state: StageState | None = None,
        release: bool = False,
    ) -> Any:
        """Run the compiled graph."""
        if tuple(probes):
            raise Unsupported("the calls of a compiled stage cannot be observed: use the stage that was compiled")
        self._eager.check_modes()
        boundary = self._check_boundary(args, kwargs)
        inputs = self._tensors_of(boundary, args, kwargs)
        self._check_tensors(inputs)
        if self.ends is None:
            outputs = self._call(inputs)
            if boundary is not None and release:
                boundary.tensors.clear()
            assert self.graph_info.plain is not None
            tensors = list(outputs.values())
            ordered = [tensors[position] for position in self.graph_info.order]
            return self.spec.output.unflatten(ordered, self.graph_info.plain, (args, kwargs))
        key = self._key(boundary, inputs)
        record = self._find_facts(key)
        if record is None:  # of shapes that are new
            with _lock:
                found: Boundary = self._eager.run(args, kwargs, release=release)
            self._keep_facts(key, found)
            return found
        outputs = self._call(inputs)
        if boundary is not None and release:
            boundary.tensors.clear()
        return Boundary(self.ends.at, self.fingerprint, outputs, record)

    def _find_facts(self, key: Any) -> BoundaryRecord | None:
        with _lock:
            if key in self._facts:
                self._facts.move_to_end(key)
            return self._facts.get(key)

    def _keep_facts(self, key: Any, found: Boundary) -> None:
        """Keep the facts of a boundary in place of those that were not used for longest."""
        if list(found.tensors) != list(self.graph_info.outputs):
            raise Unsupported(
                f"expected the tensors {', '.join(self.graph_info.outputs)} to cross at {found.at!r}, as on the "
                f"example, got {', '.join(found.tensors)}: use the stage that was compiled for these inputs"
            )
        assert isinstance(found.record, BoundaryRecord)
        with _lock:
            self._facts[key] = found.record
            if len(self._facts) > _MAX_SHAPES:
                self._facts.popitem(last=False)

    def _tensors_of(self, boundary: Boundary | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that the graph takes."""
        if boundary is not None:
            missing = [name for name in self.graph_info.inputs if name not in boundary.tensors]
            if missing or len(boundary.tensors) != len(self.graph_info.inputs):
                got = ", ".join(boundary.tensors)
                raise BadBoundary(f"expected the tensors {', '.join(self.graph_info.inputs)}, got {got:.200}")
            device = self.device
            tensors = [boundary.tensors[name] for name in self.graph_info.inputs]
            return tensors if device is None else [moved(tensor, device) for tensor in tensors]
        inputs = Inputs(*args, **kwargs)
        flat = self.flatten_inputs(inputs)
        check_structure("arguments of the head", self.spec.inputs, flat.spec, is_call=True)
        if flat.plain != self.spec.example.plain:
            raise BadInputs(
                f"expected the arguments {self.spec.example.plain} of the example beside tensors, got {flat.plain}: "
                "they are constants of a compiled stage"
            )
        return list({id(tensor): tensor for tensor in flat.tensors}.values())

    def _check_tensors(self, tensors: list[Tensor]) -> None:
        """Raise if the graph was not captured for these shapes and dtypes."""
        graph = self.graph_info
        if len(tensors) != len(graph.inputs):
            raise BadInputs(f"expected {len(graph.inputs)} different tensors, as on the example, got {len(tensors)}")
        for name, expected, tensor in zip(graph.inputs, graph.dtypes, tensors, strict=True):
            if tensor.dtype is not expected:
                raise BadInputs(f"expected {name!r} of {expected}, as on the example, got {tensor.dtype}")
        if (mismatch := graph.shapes.find_mismatch(tensors)) is not None:
            reasons = "".join(f"; {dim} is fixed: {why}" for dim, why in graph.static.items())
            raise BadInputs(f"the compiled stage {self.index} does not fit: {mismatch}{reasons}")

    def _key(self, boundary: Boundary | None, tensors: list[Tensor]) -> Any:
        """All that the facts of the next boundary depend on."""
        shapes = tuple([(tuple(tensor.shape), tensor.stride(), tensor.requires_grad) for tensor in tensors])
        if boundary is None:
            return shapes
        record = boundary.record
        return shapes, repr(boundary.facts) if record is None else repr(record)

    def _call(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        with torch.no_grad(), _lock:
            try:
                return self._run_graph(*tensors)
            except Exception as error:  # whatever the compiler raises
                cause = getattr(error, "inner_exception", error)
                raise Unsupported(f"stage {self.index} cannot be compiled: {describe_error(cause)[:500]}") from error

    def _verify(self, example: Any) -> str:
        """Compare with the stage on the example."""
        example = example if isinstance(example, Boundary) else Inputs.of(example)
        with torch.no_grad():
            expected = self._eager.run(*copy_example(self, example))
            self.run(*copy_example(self, example))  # the first run of these shapes is eager
            got = self.run(*copy_example(self, example))
        if isinstance(expected, Boundary):
            expected, got = dict(expected.tensors), dict(got.tensors)
        return compare_outputs(got, expected, f"the compiled stage {self.index}")


def compile_stage(stage: Stage, backend: str, dynamic: bool, example: Any, options: dict[str, Any]) -> CompiledStage:
    """Compile the graph of a stage."""
    graph = capture_stage(stage, dynamic=dynamic)
    run = torch.compile(graph.module, backend=backend, fullgraph=True, **options)
    return CompiledStage(stage, graph, run, example_of(stage) if example is None else example)

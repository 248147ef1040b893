"""Write a stage as a program that other runtimes run: torch.export, ONNX, ExecuTorch."""

from __future__ import annotations

import io
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from microtome.errors import BadQuery, MicrotomeError, Unsupported, describe_error
from microtome.files.reading import File
from microtome.files.types import to_plain
from microtome.files.writing import translate_write_errors, write_atomically, write_buffers
from microtome.inputs import Inputs
from microtome.split.boundary.boundary import Boundary
from microtome.split.graph.comparison import compare_outputs
from microtome.split.graph.derived_facts import named_inputs
from microtome.split.graph.exported_stage import (
    ExportedStage,
    ModelOutput,
    ProgramTensor,
    StageMetadata,
    check_expressions,
    structure_digest,
    to_path,
)
from microtome.split.graph.onnx_names import name_sizes, name_values
from microtome.split.graph.runtimes import METADATA, Run, append_digest, import_runtime, run_executorch, run_onnx
from microtome.split.graph.stage_example import example_of, run_example
from microtome.split.graph.stage_graph import StageGraph, capture_stage
from microtome.split.stage import Stage

#: The opset of ONNX files.
OPSET = 20
#: The largest difference of a runtime of other kernels, relative to the largest number of an output.
_TOLERANCE = 1e-5
#: That of weights and activations of 8 bits.
_INT8_TOLERANCE = 0.1
#: The numbers with which ONNX Runtime has kernels for all operators.
_ONNX_DTYPES = (torch.float16, torch.float32, torch.float64)
_METADATA_FILE = "stage.json"
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def export_stage(
    stage: Stage, file: File, *, dynamic: bool = True, example: Any = None, int8: bool = False
) -> ExportedStage:
    """Capture, write, load again and compare a stage; see `Stage.export`."""
    path = to_path(file)
    if path.suffix not in _WRITERS:
        raise BadQuery(f"expected a file that ends in {', '.join(_WRITERS)}, got {str(file)!r}")
    if int8 and path.suffix != ".onnx":
        raise BadQuery(f"expected a file that ends in .onnx, which int8=True is for, got {path.name!r}")
    tolerance = _INT8_TOLERANCE if int8 else _TOLERANCE
    example = example_of(stage) if example is None else example
    if example is None:
        raise Unsupported(
            "an exported stage is compared with the stage before it is written, on an example: the weights before the "
            "stage are not here, so pass the boundary of an example as example="
        )
    expected, tensors = run_example(stage, example if isinstance(example, Boundary) else Inputs.of(example))
    programs: dict[int, _Program] = {}

    def write(graph: StageGraph) -> _Program:
        made = _write(stage, graph, path.suffix, tensors, int8)
        try:
            got = dict(zip(graph.outputs, made.run(tensors), strict=True))
        except Exception as error:  # whatever the runtime raises
            raise Unsupported(f"{path.name} does not run on the example: {describe_error(error):.300}") from error
        if _exclude_ones(graph, made, path.name, tolerance):
            made = _write(stage, graph, path.suffix, tensors, int8)
        return made._replace(verified=compare_outputs(got, expected, path.name, tolerance))

    def reject(graph: StageGraph) -> str | None:
        try:
            programs[id(graph)] = write(graph)
        except Unsupported as error:
            return str(error)
        return None

    with _quiet():
        graph = capture_stage(stage, dynamic=dynamic and path.suffix != ".pte", reject=reject)
        program = programs.get(id(graph)) or write(graph)
    with translate_write_errors(repr(str(path))):
        write_atomically(path, lambda descriptor: write_buffers(descriptor, [program.data]))
    return ExportedStage(str(path), program.details, program.run, program.verified)


class _Program(NamedTuple):
    """A stage as a program: the function that runs it, the bytes of its file, and what they say about the stage."""

    run: Run
    data: bytes
    details: StageMetadata
    verified: str = ""


def _write(stage: Stage, graph: StageGraph, suffix: str, tensors: Sequence[Tensor], int8: bool) -> _Program:
    """Export a graph, and load the program again."""
    details = _describe(stage, graph, suffix)._replace(quantized="int8" if int8 else None)
    try:
        check_expressions(details)
        writer = _write_int8 if int8 else _WRITERS[suffix]
        data, run = writer(graph, tensors, json.dumps(to_plain(details, compact=True)))
    except MicrotomeError:
        raise
    except Exception as error:  # whatever the exporter or the runtime raises
        raise Unsupported(f"cannot export stage {stage.index} as {suffix}: {_describe_cause(error)}") from error
    return _Program(run, data, details)


def _describe_cause(error: BaseException) -> str:
    """The first exception of a chain, in which exporters wrap it; without the colors of a terminal."""
    while (cause := error.__cause__) is not None:
        error = cause
    return _COLORS.sub("", describe_error(error))[:500]


def _exclude_ones(graph: StageGraph, program: _Program, name: str, tolerance: float) -> bool:
    """Exclude the sizes of 1 for which a program computes another output than the stage; return whether there are."""
    tried = list(graph.trials)
    for one in tried:
        try:
            one.compare(lambda tensors: dict(zip(graph.outputs, program.run(tensors), strict=True)), name, tolerance)
        except Unsupported as error:
            graph.trials.remove(one)
            graph.exclude_ones(one.sizes, one.dims, str(error))
    return len(graph.trials) < len(tried)


def _describe(stage: Stage, graph: StageGraph, suffix: str) -> StageMetadata:
    """The metadata of a file with this stage."""
    assert stage.example is not None
    arguments = named_inputs(stage.model, stage.example)
    inputs = zip(graph.inputs, graph.shapes.spelled, graph.dtypes, strict=True)
    return StageMetadata(
        model=type(stage.model).__qualname__,
        params=sum(parameter.numel() for parameter in stage.model.parameters()),
        fingerprint=stage.fingerprint,
        begins_at=stage.begins_at,
        ends_at=stage.ends_at,
        arguments=list(arguments),
        structure=structure_digest(stage.spec.inputs.text),
        plain=stage.spec.example.plain,
        inputs={name: _describe_tensor(shape, dtype) for name, shape, dtype in inputs},
        outputs=list(graph.outputs),
        output=None if stage.ends is not None or graph.plain is None else ModelOutput(graph.order, graph.plain),
        static=graph.static,
        torch=torch.__version__,
        opset=OPSET if suffix == ".onnx" else None,
        conditions=graph.shapes.spell_conditions(),
        output_types={name: _describe_tensor(*one) for name, one in zip(graph.outputs, graph.results, strict=True)},
    )


def _describe_tensor(shape: Sequence[str], dtype: torch.dtype) -> ProgramTensor:
    return ProgramTensor(list(map(str, shape)), str(dtype).removeprefix("torch."))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the notes of exporters."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


# -- formats -----------------------------------------------------------------------------------------------------------

#: The bytes of a file, and a function that runs it.
_Written = tuple[bytes, Run]


def _to_program(graph: StageGraph, tensors: Sequence[Tensor]) -> Any:
    """Return an `ExportedProgram`, with the dynamic sizes of the graph."""
    dynamic = tuple(
        {dim: torch.export.Dim.DYNAMIC for dim, size in enumerate(shape) if not isinstance(size, int)}
        for shape in graph.shapes.shapes
    )
    # A size of 1 is always taken for a fixed one. Values do not matter.
    shapes = graph.shapes.without_ones(tensors)
    examples = tuple(tensor.new_zeros(shape) for tensor, shape in zip(tensors, shapes, strict=True))
    return torch.export.export(graph.module, examples, dynamic_shapes=dynamic, strict=False)


def _write_program(graph: StageGraph, tensors: Sequence[Tensor], metadata: str) -> _Written:
    buffer = io.BytesIO()
    torch.export.save(_to_program(graph, tensors), buffer, extra_files={_METADATA_FILE: metadata})
    module = torch.export.load(io.BytesIO(buffer.getvalue())).module()
    return buffer.getvalue(), lambda inputs: list(module(*inputs).values())


def _write_onnx(graph: StageGraph, tensors: Sequence[Tensor], metadata: str) -> _Written:
    _check_dtypes(graph, _ONNX_DTYPES, "ONNX Runtime computes")
    data = append_digest(_to_onnx(graph, tensors, metadata).SerializeToString())
    return data, run_onnx(data)


def _write_int8(graph: StageGraph, tensors: Sequence[Tensor], metadata: str) -> _Written:
    """Write an ONNX model with weights of 8 bits; ONNX Runtime quantizes activations as it runs."""
    _check_dtypes(graph, [torch.float32], "int8=True quantizes a stage that computes")
    quantization = import_runtime("onnx", "onnxruntime.quantization", "onnx", "onnxscript")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stage.onnx"
        # Its CPU kernel of convolutions takes weights without sign.
        quantization.quantize_dynamic(
            _to_onnx(graph, tensors, metadata), file, weight_type=quantization.QuantType.QUInt8
        )
        data = append_digest(file.read_bytes())
    return data, run_onnx(data)


def _check_dtypes(graph: StageGraph, accepted: Sequence[torch.dtype], who: str) -> None:
    """Raise if a stage has floating-point numbers that a runtime does not compute with."""
    weights = [tensor.dtype for tensor in (*graph.module.parameters(), *graph.module.buffers())]
    for dtype in (*graph.dtypes, *weights, *(dtype for _, dtype in graph.results)):
        if dtype.is_floating_point and dtype not in accepted:
            names = ", ".join(str(one) for one in accepted)
            raise Unsupported(f"{who} with {names}, got a stage of {dtype}: split the model after model.float()")


def _to_onnx(graph: StageGraph, tensors: Sequence[Tensor], metadata: str) -> Any:
    """Return a stage as an ONNX model."""
    import_runtime("onnx", "onnx", "onnxscript", "onnxruntime")
    program = torch.onnx.export(
        _to_program(graph, tensors),
        input_names=list(graph.inputs),
        opset_version=OPSET,
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    name_values(program.model, graph)
    name_sizes(program.model, graph)
    program.model.metadata_props[METADATA] = metadata
    return program.model_proto


def _write_executorch(graph: StageGraph, tensors: Sequence[Tensor], metadata: str) -> _Written:
    exir = import_runtime("executorch", "executorch.exir", "executorch.runtime")
    module = _copy_before_reshape(graph.module)
    program = torch.export.export(module, tuple(tensors), strict=False)
    edge = exir.to_edge_transform_and_lower(program, constant_methods={METADATA: metadata})
    data = append_digest(bytes(edge.to_executorch().buffer))
    return data, run_executorch(data)


def _copy_before_reshape(module: fx.GraphModule) -> fx.GraphModule:
    """A graph that reshapes contiguous tensors alone.

    ExecuTorch decomposes attention to operators whose outputs have other strides, for which a view is none.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.reshape.default):
        with graph.inserting_before(node):
            layout: dict[str, Any] = {"memory_format": torch.contiguous_format}
            copied = graph.call_function(torch.ops.aten.clone.default, node.args[:1], layout)
        node.args = (copied, *node.args[1:])
    return fx.GraphModule(module, graph)


_WRITERS = {".pt2": _write_program, ".onnx": _write_onnx, ".pte": _write_executorch}

"""A stage in a file that another runtime runs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from microtome.errors import (
    BadBoundary,
    BadFile,
    BadInputs,
    BadQuery,
    MicrotomeError,
    Unsupported,
    describe_error,
    describe_value,
)
from microtome.files.reading import File, read_bytes
from microtome.files.types import find_mismatch, from_plain, to_plain
from microtome.split.boundary.boundary import Boundary
from microtome.split.boundary.schema import (
    INPUT_SHAPES,
    BoundaryRecord,
    PlaceholderSpec,
    RepeatedTensor,
    SentTensor,
    StorageView,
)
from microtome.split.graph.runtimes import LOADERS, Run, check_digest
from microtome.split.graph.size_conditions import evaluate, find_unmet
from microtome.split.stage_timing import time_runs

_SCHEMA = 1
#: The most bytes of a file: protobuf, of which ONNX models are made, has no longer messages.
_MAX_BYTES = 1 << 31


class ProgramTensor(NamedTuple):
    """A tensor that a program takes or returns; sizes that are no numbers are symbols, such as `s0`."""

    shape: list[str]
    dtype: str


class ModelOutput(NamedTuple):
    """The model's output, made of the tensors that the last program returns.

    Attributes:
        tensors: Positions among them, in the order of the output; plain: the other values in it.
    """

    tensors: list[int]
    plain: list[bool | int | float | str | None]


class StageMetadata(NamedTuple):
    """The metadata of a program.

    Attributes:
        model: The qualified name of the model's class.
        params: The number of parameters of the whole model.
        arguments: The names of the tensors among the model's arguments.
        structure: A digest of the structure of these arguments.
        plain: The other values among them, which are constants of the program.
        inputs: The tensors that the program takes, by name, in order.
        outputs: The names of those that it returns, in order.
        output: Of the last stage; None: numbers in the output depend on shapes.
        static: Why sizes are fixed, by dimension of `inputs` or of the model's arguments.
        opset: Of an ONNX model.
        quantized: `"int8"`: its weights are integers; None: they are those of the model.
        conditions: On the symbols in the shapes, such as `s0 >= 2`.
        output_types: The tensors of `outputs`, by name; sizes may be expressions of the symbols, such as `s1//2`.
    """

    model: str
    params: int
    fingerprint: str
    begins_at: str | None
    ends_at: str | None
    arguments: list[str]
    structure: str
    plain: list[bool | int | float | str | None]
    inputs: dict[str, ProgramTensor]
    outputs: list[str]
    output: ModelOutput | None
    static: dict[str, str]
    torch: str
    opset: int | None = None
    quantized: str | None = None
    conditions: list[str] = []  # noqa: RUF012
    output_types: dict[str, ProgramTensor] = {}  # noqa: RUF012
    schema: int = _SCHEMA
    kind: str = "stage"


class ExportedStage:
    """A stage that another runtime runs, from a file.

    The first stage takes the tensors among the model's arguments, the others a `Boundary`. The last returns the tensors
    of the model's output by their paths in it, the others a boundary, which has the shapes of the model's inputs in
    place of facts: the next stage derives these.

    Attributes:
        file: The file.
        details: What it says about itself.
        verified: How its outputs on the example differ from those of the stage, if it was written just now.
    """

    def __init__(self, file: str, details: StageMetadata, run: Run, verified: str | None = None) -> None:
        self.file = file
        self.details = details
        self.verified = verified
        self._run = run

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the file: model, fingerprint, cuts, names, shapes and dtypes."""
        plain: dict[str, Any] = to_plain(self.details, compact=True)
        return plain

    @property
    def begins_at(self) -> str | None:
        """The address of the cut where it begins; None for the first stage."""
        return self.details.begins_at

    @property
    def ends_at(self) -> str | None:
        """The address of the cut where it ends; None for the last stage."""
        return self.details.ends_at

    def __call__(self, *args: Any, **kwargs: Any) -> Boundary | dict[str, Tensor]:
        if self.begins_at is not None:
            if len(args) != 1 or kwargs or not isinstance(args[0], Boundary):
                got = ", ".join(type(value).__name__ for value in (*args, *kwargs.values())) or "nothing"
                raise BadInputs(f"{self.file} begins at {self.begins_at!r}: expected one Boundary, got {got}")
            return self.run_boundary(args[0])
        names = list(self.details.inputs)
        given = dict(zip(names, args, strict=False)) | kwargs
        if len(args) > len(names) or given.keys() != self.details.inputs.keys():
            raise BadInputs(f"{self.file} takes the tensors {', '.join(names)}, got {', '.join(given) or 'none'}")
        tensors = [given[name] for name in names]
        return self._finish(self._compute(tensors), [tuple(tensor.shape) for tensor in tensors])

    def time(self, example: Any, *, repeat: int = 30) -> float:
        """Measure the program, and return the median seconds of a run, for `stages` of `microtome.plan`.

        Args:
            example: The inputs of the model or, of another stage than the first, a boundary.
            repeat: The number of runs; fewer if they take longer than five seconds.
        """
        return time_runs(self, example, repeat)

    def run_inputs(self, boundary: Boundary) -> Boundary | dict[str, Tensor]:
        """Run the first stage on the inputs of the model, packed as a boundary."""
        facts = boundary.facts
        if (facts.get("structure"), facts.get("plain")) != (self.details.structure, self.details.plain):
            raise BadInputs(
                f"{self.file} was exported for arguments of another structure, or with other values than "
                f"{self.details.plain} beside tensors: they are constants of the program"
            )
        tensors = list(boundary.tensors.values())
        return self._finish(self._compute(tensors), [tuple(tensor.shape) for tensor in tensors])

    def run_boundary(self, boundary: Boundary) -> Boundary | dict[str, Tensor]:
        """Run another stage than the first one."""
        if (boundary.at, boundary.fingerprint) != (self.begins_at, self.details.fingerprint):
            raise BadBoundary(
                f"expected a boundary of the cut at {self.begins_at!r} with the fingerprint "
                f"{self.details.fingerprint}, got one of {boundary.at!r} with {boundary.fingerprint:.80}"
            )
        if boundary.tensors.keys() != self.details.inputs.keys():
            names, got = ", ".join(self.details.inputs), ", ".join(boundary.tensors)
            raise BadBoundary(f"expected the tensors {names}, got {got:.200}")
        shapes = self._input_shapes(boundary)
        return self._finish(self._compute([boundary.tensors[name] for name in self.details.inputs]), shapes)

    def _input_shapes(self, boundary: Boundary) -> list[tuple[int, ...]]:
        """The shapes of the model's inputs, which a boundary states in either kind of facts."""
        if boundary.record is None and boundary.facts.keys() == {INPUT_SHAPES}:
            shapes = boundary.facts[INPUT_SHAPES]
            if not isinstance(shapes, dict) or shapes.keys() != {*self.details.arguments}:
                expected = ", ".join(self.details.arguments)
                raise BadBoundary(f"{INPUT_SHAPES}: expected the inputs {expected}, got {shapes!r:.200}")
            return [tuple(shapes[name]) for name in self.details.arguments]
        inputs = (boundary.record or BoundaryRecord.from_facts(boundary.facts)).inputs
        if inputs.structure != self.details.structure or inputs.plain != self.details.plain:
            raise BadBoundary(
                f"{self.file} was exported for arguments of another structure, or with other values than "
                f"{self.details.plain} beside tensors: they are constants of the program"
            )
        found: list[tuple[int, ...]] = []
        for item in inputs.tensors:
            if isinstance(item, SentTensor):
                found.append(tuple(boundary.tensors[item.name].shape))
            elif isinstance(item, StorageView | PlaceholderSpec):
                found.append(tuple(item.shape))
            else:
                assert isinstance(item, RepeatedTensor)
        return found

    def _compute(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        self._check(tensors)
        try:
            return dict(zip(self.details.outputs, self._run(tensors), strict=True))
        except Exception as error:  # whatever the runtime raises
            raise Unsupported(f"{self.file} does not run on these shapes: {describe_error(error):.500}") from error

    def _check(self, tensors: Sequence[Tensor]) -> None:
        """Raise if the program is not for these dtypes and shapes."""
        inputs = self.details.inputs
        for (name, expected), tensor in zip(inputs.items(), tensors, strict=True):
            if not isinstance(tensor, Tensor):
                raise BadInputs(
                    f"{self.file}: expected {name!r} as a Tensor, got {describe_value(tensor)}: pass "
                    "torch.as_tensor(...) of it"
                )
            if len(expected.shape) != tensor.dim() or str(tensor.dtype) != f"torch.{expected.dtype}":
                raise BadInputs(
                    f"{self.file}: expected {name!r} of {expected.dtype} and shape [{', '.join(expected.shape)}], got "
                    f"{tensor.dtype} and {tuple(tensor.shape)}"
                )
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if unmet := find_unmet([one.shape for one in inputs.values()], self.details.conditions, shapes):
            described = ", ".join(f"{name}[{', '.join(one.shape)}]" for name, one in inputs.items())
            raise BadInputs(f"{self.file} takes {described}: expected {unmet}")

    def _finish(self, tensors: dict[str, Tensor], shapes: Sequence[tuple[int, ...]]) -> Boundary | dict[str, Tensor]:
        if self.ends_at is None:
            return tensors
        named = {name: list(shape) for name, shape in zip(self.details.arguments, shapes, strict=True)}
        return Boundary(self.ends_at, self.details.fingerprint, tensors, {INPUT_SHAPES: named})

    def __repr__(self) -> str:
        start = "the inputs" if self.begins_at is None else repr(self.begins_at)
        end = "the output" if self.ends_at is None else repr(self.ends_at)
        return f"<Exported stage of {self.details.model} in {self.file}, from {start} to {end}>"


def structure_digest(text: str) -> str:
    """A digest of the structure of arguments, as boundaries state it."""
    return xxh3_64_hexdigest(text.encode())


def load_exported(file: File) -> ExportedStage:
    """Load a stage that `Stage.export` or `microtome split --export` wrote, in the runtime of the file.

    Args:
        file: A path that ends in `.onnx` or `.pte`. A `.pt2` is for `torch.export.load`, which may execute code in it.

    >>> load_exported("head.onnx")
    Traceback (most recent call last):
        ...
    microtome.errors.BadFile: cannot read 'head.onnx': No such file or directory
    """
    path = to_path(file)
    loader = LOADERS.get(path.suffix)
    if loader is None:
        trusted = ": load it with torch.export.load if you trust its source, which it may unpickle"
        hint = trusted if path.suffix == ".pt2" else ""
        raise BadFile(f"expected a file that ends in {', '.join(LOADERS)}, got {str(file)!r}{hint}")
    data = read_bytes(path, _MAX_BYTES)
    try:
        has_digest = check_digest(data)
        with torch.no_grad():
            run, text = loader(data)
    except BadFile as error:
        raise BadFile(f"cannot read {str(path)!r}: {error}") from error
    except MicrotomeError:
        raise
    except Exception as error:  # whatever the runtime raises
        raise BadFile(f"{str(path)!r} is no program that its runtime loads: {describe_error(error):.300}") from error
    details = _parse_metadata(text, path)
    if not has_digest:
        raise BadFile(
            f"cannot read {str(path)!r}: the file is damaged or was changed: expected the digest of its contents at "
            "its end, got none. Export the stage again"
        )
    return ExportedStage(str(path), details, run)


def to_path(file: File) -> Path:
    """The path of a file.

    Raises:
        BadQuery: It is none.
    """
    if not isinstance(file, str | os.PathLike):
        raise BadQuery(f"expected the path of a file, such as 'head.onnx', got {file!r:.80}")
    return Path(file)


def _parse_metadata(text: str, path: Path) -> StageMetadata:
    expected = f"{str(path)!r} was not written by microtome: expected the metadata of a stage"
    try:
        data = json.loads(text)
        details: StageMetadata = from_plain(data, StageMetadata)
    except (ValueError, TypeError, RecursionError, AttributeError) as error:
        raise BadFile(f"{expected}: {describe_error(error):.200}") from error
    if data.get("kind") != "stage" or data.get("schema") != _SCHEMA:
        raise BadFile(f"{expected} of version {_SCHEMA}, got version {data.get('schema')!r:.40}")
    if (mismatch := find_mismatch(details, StageMetadata)) is not None:
        raise BadFile(f"{expected}: {mismatch}")
    try:
        check_expressions(details)
    except ValueError as error:
        raise BadFile(f"{expected}: {error}") from error
    return details


def check_expressions(details: StageMetadata) -> None:
    """Raise a `ValueError` if a size or a condition cannot be evaluated."""
    sizes = [size for one in details.inputs.values() for size in one.shape]
    known = {size: 8 for size in sizes if size.isidentifier()}
    for text in (*sizes, *details.conditions):
        evaluate(text, known)

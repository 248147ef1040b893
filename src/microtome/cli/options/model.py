"""MODEL and its options: `--input`, `--arg`, and for some commands `--weights`, `--stages`, `--meta`, `--device`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from microtome.cli.completion import complete_file, complete_model
from microtome.cli.interrupts import import_torch
from microtome.cli.options.repetition import list_option
from microtome.cli.progress import print_notes, show_progress
from microtome.errors import BadInputs, MicrotomeError, NeedsValues, describe_error
from microtome.units import size

if TYPE_CHECKING:
    from torch import nn

    from microtome.split.graph.exported_stage import ExportedStage
    from microtome.split.stage import Stage
    from microtome.zoo import Resolved

T = TypeVar("T")
#: Models with more bytes of weights have a note on whether these are in memory.
_NOTED_BYTES = 2**30
_INPUT = (
    "Shapes of the inputs, such as 1x3x224x224 or input_ids=1x128:int64, comma-separated (default: an example; for "
    "./file.py:Net, the example_inputs of its class or file, which may be a dict or any other structure)."
)
_ARG = "Keyword argument of the model's class or factory, such as num_classes=10; repeatable."


@dataclass(frozen=True)
class ModelOptions:
    """The model of a command line, and where it runs."""

    name: str
    inputs: str | None
    args: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    stages: str | None = None
    meta: bool = False
    device: str | None = None

    def resolve(self, *, uses_values: bool = False, one_pass: bool = True) -> Resolved:
        """Build the model and its inputs on their device, and print the notes on it.

        Args:
            uses_values: Whether outputs depend on the values of weights; print a note if these are random.
            one_pass: Whether a run is not continued by another, so that a language model need not return a cache.
        """
        self._check_device()
        resolved = self._build(one_pass=one_pass)
        print_notes(resolved.notes)
        if uses_values and resolved.has_random_weights:
            print_notes([f"the weights of {self.name} are random: load trained ones with --weights FILE"])
        if self.device is None:
            return resolved
        with self._wrap_device_errors():
            model = resolved.model.to(self.device)
            return replace(resolved, model=model, inputs=resolved.inputs.to(self.device))

    def count(
        self, run: Callable[[Resolved], T], *, how: Callable[[T], str] = lambda _: "meta", one_pass: bool = True
    ) -> tuple[Resolved, T]:
        """Run a function that measures nothing, if possible on the model without weights, on the meta device.

        The model has weights where options ask for them, where its code needs values, and where it fails without them
        and is small.

        Args:
            how: Returns the kind of tensors of a result which must be of meta tensors: on fake ones, code may branch
                differently than in a real run.
        """
        if self.meta or self.weights is not None or self.device is not None:
            resolved = self.resolve(one_pass=one_pass)
            return resolved, run(resolved)
        without: Resolved | None = None
        try:
            without = replace(self, meta=True)._build(one_pass=one_pass)
            result = run(without)
            if not (kind := how(result)).startswith("meta"):
                raise NeedsValues(f"{self.name} runs on {kind} tensors only")
        except Exception as error:
            if not isinstance(error, NeedsValues) and (without is None or _weight_bytes(without) > _NOTED_BYTES):
                print_notes(() if without is None else without.notes)
                raise
            resolved = self._build(one_pass=one_pass)
            print_notes(resolved.notes)  # also if it does not run
            result = run(resolved)
            if _weight_bytes(resolved) > _NOTED_BYTES:
                print_notes([f"{self.name} has weights in memory, which its code needs: {describe_error(error)}"])
            return resolved, result
        if (nbytes := _weight_bytes(without)) > _NOTED_BYTES:
            why = "nothing is measured, so it is on the meta device"
            print_notes([f"{self.name} is built without its {size(nbytes)} of weights: {why}"])
        print_notes(without.notes)
        return without, result

    def load(self, index: int) -> tuple[nn.Module | Stage, Resolved]:
        """Build the model, and with `--stages` load the stage at this index.

        Returns:
            The model or the stage, and what was built, with the inputs on their device.
        """
        if self.weights is not None and self.stages is not None:
            raise click.UsageError("choose one of --weights and --stages")
        self.check_has_values()
        self._check_device()
        if self.stages is None:
            resolved = self.resolve(uses_values=True, one_pass=False)
            return resolved.model, resolved
        import_torch()
        from microtome.split.checkpoint import load_stage

        built: list[Resolved] = []

        def make() -> nn.Module:
            built.append(self._build(one_pass=False))
            print_notes(built[-1].notes)
            return built[-1].model

        with self._wrap_device_errors():
            stage = load_stage(make, self.stages, index, device=self.device)
            inputs = built[-1].inputs
            return stage, replace(built[-1], inputs=inputs if self.device is None else inputs.to(self.device))

    @property
    def is_exported(self) -> bool:
        """Whether MODEL is the file of an exported stage."""
        return self.name.endswith((".onnx", ".pte", ".pt2"))

    def load_exported(self) -> ExportedStage:
        """Load an exported stage, which needs neither the model nor its inputs."""
        options = {"--input": self.inputs, "--arg": self.args, "--weights": self.weights, "--stages": self.stages}
        if unused := [name for name, value in {**options, "--device": self.device}.items() if value]:
            raise click.UsageError(f"{self.name} is an exported stage: expected no {', '.join(unused)}")
        import_torch()
        from microtome.split.graph.exported_stage import load_exported

        return load_exported(self.name)

    def find_class(self) -> type | None:
        """Return the class of the model without building it; None if only building it tells."""
        import_torch()
        from microtome.zoo.resolver import find_class

        return find_class(self.name, self.args)

    def check_has_values(self) -> None:
        """Raise if the model would be on the meta device."""
        if self.device is not None and self.device.partition(":")[0] == "meta":
            raise BadInputs("--device meta: expected a device that computes values")

    def _check_device(self) -> None:
        """Raise if the device is not of this machine, before the model is built."""
        if self.device is None:
            return
        import_torch()
        import torch

        from microtome.devices.base import available_accelerators

        available = ["cpu", *map(str, available_accelerators())]
        kinds = {name.partition(":")[0] for name in available}
        kind, _, index = self.device.partition(":")
        if kind in kinds | {"meta"} and (not index or self.device in [*available, "cpu:0", "meta:0"]):
            return
        without_cuda = kind == "cuda" and not torch.backends.cuda.is_built()
        build = f" (torch {torch.__version__} is a build without CUDA)" if without_cuda else ""
        got = f"got {self.device!r}{build}"
        raise BadInputs(f"--device {self.device}: expected a device of this machine, {', '.join(available)}, {got}")

    def _build(self, *, one_pass: bool) -> Resolved:
        import_torch()
        with show_progress(f"building {self.name}"):
            from microtome import zoo

            resolved = zoo.resolve(self.name, inputs=self.inputs, args=self.args, meta=self.meta, weights=self.weights)
        return resolved.for_one_pass() if one_pass else resolved

    @contextmanager
    def _wrap_device_errors(self) -> Iterator[None]:
        """Name the device in errors that torch raises."""
        try:
            yield
        except MicrotomeError:
            raise
        except Exception as error:
            if self.device is None:
                raise
            raise BadInputs(f"--device {self.device}: {describe_error(error)}") from error


def _weight_bytes(resolved: Resolved) -> int:
    return sum(parameter.nbytes for parameter in resolved.model.parameters())


def _parse_arguments(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f"expected NAME=VALUE, such as num_classes=10, got {word!r}")
        if name in arguments:
            raise click.BadParameter(f"{name} is set twice")
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[name] = value
    return arguments


_OPTIONS = {
    "model": click.argument("model", shell_complete=complete_model),
    "inputs": list_option("--input", "inputs", metavar="SPEC", help=_INPUT),
    "args": click.option("--arg", "args", multiple=True, metavar="NAME=VALUE", callback=_parse_arguments, help=_ARG),
    "weights": click.option(
        "--weights", type=click.Path(dir_okay=False), metavar="FILE", help="Load weights from this file."
    ),
    "stages": click.option(
        "--stages",
        metavar="FOLDER",
        shell_complete=complete_file,
        help="Load only this side's stage from a folder that `microtome split` wrote.",
    ),
    "meta": click.option(
        "--meta", is_flag=True, help="Build the model on the meta device, without allocating weights."
    ),
    "device": click.option("--device", metavar="D", help="Run the model on this device, such as cuda."),
}


def model_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add MODEL, `--input`, `--arg` and the named options to a command, which receives a `ModelOptions` as `model`."""
    declared = ("model", "inputs", "args", *names)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapper(*args: Any, **options: Any) -> None:
            name, *values = (options.pop(option) for option in declared)
            model = ModelOptions(name, **dict(zip(declared[1:], values, strict=True)))
            command(*args, model=model, **options)

        for option in reversed(declared):
            wrapper = _OPTIONS[option](wrapper)
        return wrapper

    return decorate


@contextmanager
def wrap_model_errors(
    resolved: Resolved, get_inputs: Callable[[], object] | None = None, hint: str = ". Pass others with --input"
) -> Iterator[None]:
    """Raise BadInputs for an error in the model's own code, with its line there and the inputs that it ran on.

    Every command runs the model in such a block: its code may raise anything, and a traceback does not name the inputs.

    Args:
        get_inputs: Returns the inputs of the run that failed, if not those of the model.
    """
    try:
        yield
    except MicrotomeError:
        raise
    except Exception as error:
        from microtome.inputs import RAN_ON
        from microtome.user_code import line_of

        reason = f"{describe_error(error).rstrip('.')}{line_of(error, resolved.file)}"
        from microtome.zoo.packages import explain_operator_error

        if (missing := explain_operator_error(error)) is not None:  # other inputs would fail alike
            hint = f". It calls an operator of torchvision: {missing}"
        elif not _may_be_about_inputs(error):
            hint = ""
        inputs = resolved.arguments if get_inputs is None else get_inputs()
        message = f"{resolved.name} does not run on {inputs}: {reason}{hint}"
        notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(RAN_ON)]
        raise BadInputs("\n  ".join([message, *notes])) from error


def _may_be_about_inputs(error: Exception) -> bool:
    """Whether other inputs may help: not if code, a module or another object of the model lacks a name."""
    import torch

    if isinstance(error, AttributeError):
        return isinstance(error.obj, torch.Tensor | list | tuple | dict | int | float | str | None)
    return not isinstance(error, NameError | ImportError | NotImplementedError)

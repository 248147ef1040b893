"""`ModelHook`: a model run once to be counted and once for its times."""

from __future__ import annotations

import operator
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.compat.subclass_checks import refuse_overrides
from microtome.compat.torchstat.kinds import Misuse, first, warn_caller
from microtome.engine import Call, Probe, Session, tensors_in
from microtome.engine.meta_run import substitute_tensors
from microtome.engine.selectors import check_model, named_modules
from microtome.engine.torch_internals import own_parameters
from microtome.flops.conventions import torchstat
from microtome.inputs import Inputs
from microtome.units import shape

_MB = 1024**2
#: The shape of a layer that never ran.
_NOT_RUN = (0, 0, 0)


class _ModelRun(NamedTuple):
    """Shapes and costs of one call of a module; of one with children, the shapes alone."""

    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    output_bytes: int = 0
    madds: int = 0
    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0


@dataclass(frozen=True)
class ModuleStat:
    """Costs of a module in a forward of one image, all its runs together.

    Attributes:
        leaf: Whether it has no children. What a module with children costs is what they cost.
        runs: How many times it ran.
        input_shape: Of the first tensor it was given first, without the batch; (0, 0, 0) if it never ran.
        output_shape: Of the first tensor it returned last, without the batch; (0, 0, 0) if it never ran.
        parameter_quantity: How many parameters it holds itself, those left out that a module before it holds too.
        inference_memory: The size of its outputs, in MB.
        MAdd: Multiplications and additions.
        Flops: Multiply-accumulates.
        duration: Seconds.
        Memory: Bytes read, bytes written.
    """

    leaf: bool
    runs: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    parameter_quantity: int
    inference_memory: float
    MAdd: int
    Flops: int
    duration: float
    Memory: tuple[int, int]


class ModelHook:
    """Runs a model twice on an image of random numbers, in eval mode and without gradients.

    The first run counts, and warms up; the second takes the times. Model and process are afterwards as they were.

    Args:
        input_size: The sizes of one image, such as `(3, 224, 224)`. The image has the dtype and device of the weights.

    >>> from torch import nn
    >>> leaves = ModelHook(nn.Sequential(nn.Conv2d(3, 10, 5), nn.ReLU()), (3, 224, 224)).retrieve_leaf_modules()
    >>> [(name, leaf.input_shape, leaf.Flops, leaf.Memory) for name, leaf in leaves.items()]
    [('0', (3, 224, 224), 36784000, (605152, 1936000)), ('1', (10, 220, 220), 484000, (1936000, 1936000))]
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        names = ("_hook_model", "_register_buffer", "_retrieve_leaf_modules", "_sub_module_call_hook")
        refuse_overrides(cls, names, "override retrieve_leaf_modules, or use mt.profile")

    def __init__(self, model: nn.Module, input_size: Sequence[int]) -> None:
        self._model = model
        self._input_size = input_size
        image = _image(check_model(model), input_size)
        counter, clock = _Counter(), _Clock(image.args[0].device)
        with substitute_tensors(model, image, "real") as given, torch.no_grad():
            model.eval()
            # On meta tensors nothing is computed, so there is no time to take.
            for probe in (counter,) if clock.device.type == "meta" else (counter, clock):
                with Session(model, [probe], other_threads="unseen"):
                    given.run(model)
        counter.warn()
        #: Every module by its path, the root's being `""`.
        self.modules = _modules(model, counter.runs, clock.seconds)

    def retrieve_leaf_modules(self) -> OrderedDict[str, ModuleStat]:
        """The modules without children, by their paths."""
        return OrderedDict((path, module) for path, module in self.modules.items() if module.leaf)


def _image(model: nn.Module, input_size: Sequence[int]) -> Inputs:
    sizes = _sizes(input_size)
    weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return Inputs.of(f"{shape((1, *sizes))}:{str(weight.dtype).removeprefix('torch.')}").to(weight.device)


def _sizes(input_size: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, input_size)) if isinstance(input_size, list | tuple) else ()
    except TypeError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise Misuse(f"input_size is the sizes of one image without the batch, as (3, 224, 224), got {input_size!r}")
    return sizes


def _modules(
    model: nn.Module, runs: dict[str, list[_ModelRun]], seconds: dict[str, float]
) -> OrderedDict[str, ModuleStat]:
    seen: set[int] = set()
    modules: OrderedDict[str, ModuleStat] = OrderedDict()
    for path, module in named_modules(model):
        own = {id(p): p for p in own_parameters(module).values() if p is not None and id(p) not in seen}
        seen.update(own)
        did = runs.get(path, [])
        modules[path] = ModuleStat(
            leaf=_is_leaf(module),
            runs=len(did),
            input_shape=did[0].input_shape if did else _NOT_RUN,
            output_shape=did[-1].output_shape if did else _NOT_RUN,
            parameter_quantity=sum(p.numel() for p in own.values()),
            inference_memory=sum(run.output_bytes for run in did) / _MB,
            MAdd=sum(run.madds for run in did),
            Flops=sum(run.flops for run in did),
            duration=seconds.get(path, 0.0),
            Memory=(sum(run.read_bytes for run in did), sum(run.write_bytes for run in did)),
        )
    return modules


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


class _Counter(Probe):
    """Counts what each call of a leaf does."""

    def __init__(self) -> None:
        self.runs: dict[str, list[_ModelRun]] = {}
        self._unknown: dict[str, tuple[str, ...]] = {}
        self._failed = False

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        module = call.module
        assert module is not None
        self.runs.setdefault(call.path, []).append(self._run(module, first((args, kwargs)), output))

    def _run(self, module: nn.Module, x: Tensor | None, output: Any) -> _ModelRun:
        out = first(output)
        shapes = _shape(x), _shape(out)
        if not _is_leaf(module):
            return _ModelRun(*shapes)
        # There is one image: a first size other than 1 is of windows or frames, all of them that image's.
        flops, madds = torchstat.flops(module, x, out), torchstat.madds(module, x, out, batch=1)
        memory = torchstat.memory(module, x, out, batch=1)
        counts = {"MAdd": madds, "Flops": flops, "Memory": memory}
        if unknown := tuple(name for name, count in counts.items() if count is None):
            self._unknown[type(module).__name__] = unknown
        read, written = memory or (0, 0)
        size = 0 if x is None else x.element_size()
        nbytes = sum(tensor.nbytes for tensor in tensors_in(output))
        return _ModelRun(*shapes, nbytes, madds or 0, flops or 0, read * size, written * size)

    def fail(self, call: Call, error: BaseException) -> None:
        if not self._failed:  # the innermost is told first
            self._failed = True
            error.add_note(f"in the call {call.address!r} ({type(call.module).__name__})")

    def warn(self) -> None:
        """Say once what was counted as 0 for want of a formula."""
        kinds: dict[tuple[str, ...], list[str]] = {}
        for kind, unknown in self._unknown.items():
            kinds.setdefault(unknown, []).append(kind)
        listed = "; ".join(f"{', '.join(unknown)} of {', '.join(names)}" for unknown, names in kinds.items())
        if listed:
            warn_caller(
                f"torchstat has no formula for these, so they count as 0: {listed}. microtome.profile counts them"
            )


@dataclass
class _Clock(Probe):
    """Takes the time of every call of a leaf."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    _began: dict[Call, float] = field(default_factory=dict)

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._began[call] = self._now()

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.seconds[call.path] = self.seconds.get(call.path, 0.0) + self._now() - self._began.pop(call)

    def _now(self) -> float:
        if self.device.type != "cpu":  # which may be far behind
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def _shape(tensor: Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tuple(tensor.shape[1:])

"""Run a model once to count its operations and once to measure times."""

from __future__ import annotations

import operator
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from microtome.compat.subclass_checks import refuse_overrides
from microtome.compat.torchstat.counting import InvalidArgument, first_tensor, warn_caller
from microtome.devices.base import backend_of
from microtome.engine import Call, Probe, Session, tensors_in
from microtome.engine.meta_run import substitute_tensors
from microtome.engine.selectors import check_model, named_modules
from microtome.engine.snapshot import WriteBackups
from microtome.engine.torch_internals import own_parameters
from microtome.flops.conventions import torchstat
from microtome.inputs import Inputs
from microtome.trace.backup_probe import BackupProbe

_MB = 1024**2


@dataclass(frozen=True)
class ModuleStat:
    """The costs of a module in a forward of one image, summed over its calls.

    Attributes:
        leaf: Whether it has no children. The costs of other modules are those of their children.
        runs: The number of calls.
        input_shape: The shape of the first tensor of its first input, without the batch; (0, 0, 0) if it never ran.
        output_shape: The shape of the first tensor of its last output, without the batch; (0, 0, 0) if it never ran.
        parameter_quantity: The number of its own parameters, without those that an earlier module has too.
        inference_memory: The size of its outputs in MB.
        MAdd: Multiplications and additions.
        Flops: Multiply-accumulates.
        duration: Seconds.
        Memory: Bytes read and bytes written.
    """

    leaf: bool = True
    runs: int = 0
    input_shape: tuple[int, ...] = (0, 0, 0)
    output_shape: tuple[int, ...] = (0, 0, 0)
    parameter_quantity: int = 0
    inference_memory: float = 0.0
    MAdd: int = 0
    Flops: int = 0
    duration: float = 0.0
    Memory: tuple[int, int] = (0, 0)


class ModelHook:
    """Runs a model twice on a random image, in eval mode and without gradients.

    The first run counts and warms up; the second measures times. Model and process are restored afterwards.

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
        image = _random_image(check_model(model), input_size)
        counter = _Counter()
        clock = _Clock(image.args[0].device, counter.stats)
        backups = WriteBackups()
        with substitute_tensors(model, image, "real", backups) as inputs, torch.no_grad():
            model.eval()
            # On meta tensors nothing is computed, so there are no times to measure.
            first: list[Probe] = [counter, BackupProbe(backups)]
            for probes in (first,) if clock.device.type == "meta" else (first, [clock]):
                with _name_batch(input_size), Session(model, probes, other_threads="ignore"):
                    inputs.run(model)
        counter.warn()
        #: The statistics of every module, by path; that of the root is `""`.
        self.modules = OrderedDict((path, counter.stats[path]) for path, _ in named_modules(model))
        _count_parameters(model, self.modules)

    def retrieve_leaf_modules(self) -> OrderedDict[str, ModuleStat]:
        """Return the statistics of the modules without children, by path."""
        return OrderedDict((path, module) for path, module in self.modules.items() if module.leaf)


def _random_image(model: nn.Module, input_size: Any) -> Inputs:
    try:
        sizes = tuple(map(operator.index, input_size)) if isinstance(input_size, list | tuple) else ()
    except TypeError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InvalidArgument(
            "expected input_size to be the sizes of one image without the batch, such as (3, 224, 224), got "
            f"{_describe_size(input_size)}"
        )
    return Inputs(*Inputs.of((1, *sizes), model).args)  # as tensors: no error need explain the shape


def _describe_size(input_size: Any) -> str:
    if isinstance(input_size, Tensor):
        return f"a tensor: pass its sizes, {tuple(input_size.shape[1:])}"
    if isinstance(input_size, list | tuple) and any(isinstance(one, Tensor) for one in input_size):
        return f"a {type(input_size).__name__} of tensors"
    return f"{input_size!r:.80}"


@contextmanager
def _name_batch(input_size: Sequence[int]) -> Iterator[None]:
    """Note on an error of the model that sizes which look like a batch of one image are those of an image."""
    try:
        yield
    except Exception as error:
        if len(input_size) > 3 and input_size[0] == 1:
            expected = "expected the sizes of one image without the batch"
            error.add_note(f"{expected}, such as {tuple(input_size[1:])}, got input_size {tuple(input_size)}")
        raise


def _count_parameters(model: nn.Module, stats: dict[str, ModuleStat]) -> None:
    counted: set[int] = set()
    for path, module in named_modules(model):
        own = {id(p): p for p in own_parameters(module).values() if p is not None and id(p) not in counted}
        counted.update(own)
        quantity = sum(p.numel() for p in own.values())
        stats[path] = replace(stats[path], leaf=_is_leaf(module), parameter_quantity=quantity)


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


class _Counter(Probe):
    """Counts the operations of leaves, by torchstat's formulas.

    Attributes:
        stats: The statistics of modules, by path.
    """

    def __init__(self) -> None:
        self.stats: defaultdict[str, ModuleStat] = defaultdict(ModuleStat)
        self._missing_formulas: dict[str, str] = {}

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        assert call.module is not None
        stat, x, out = self.stats[call.path], first_tensor((args, kwargs)), first_tensor(output)
        input_shape = stat.input_shape if stat.runs else _image_shape(x)
        stat = replace(stat, runs=stat.runs + 1, input_shape=input_shape, output_shape=_image_shape(out))
        if _is_leaf(call.module):
            memory = sum(tensor.nbytes for tensor in tensors_in(output)) / _MB
            stat = replace(self._add_counts(stat, call.module, x, out), inference_memory=stat.inference_memory + memory)
        self.stats[call.path] = stat

    def _add_counts(self, stat: ModuleStat, module: nn.Module, x: Tensor | None, out: Tensor | None) -> ModuleStat:
        # There is one image: a first dimension other than 1 is of windows or frames of that image.
        counts: dict[str, Any] = {
            "MAdd": torchstat.madds(module, x, out, batch=1),
            "Flops": torchstat.flops(module, x, out),
            "Memory": torchstat.memory(module, x, out, batch=1),
        }
        if missing := ", ".join(name for name, count in counts.items() if count is None):
            self._missing_formulas[type(module).__name__] = missing
        read, written = counts["Memory"] or (0, 0)
        itemsize = 0 if x is None else x.element_size()
        return replace(
            stat,
            MAdd=stat.MAdd + (counts["MAdd"] or 0),
            Flops=stat.Flops + (counts["Flops"] or 0),
            Memory=(stat.Memory[0] + read * itemsize, stat.Memory[1] + written * itemsize),
        )

    def warn(self) -> None:
        """Warn once about everything counted as 0 because torchstat has no formula."""
        types: dict[str, list[str]] = {}
        for name, missing in self._missing_formulas.items():
            types.setdefault(missing, []).append(name)
        if types:
            text = "; ".join(f"{missing} of {', '.join(names)}" for missing, names in types.items())
            warn_caller(
                f"torchstat has no formula for these, so they count as 0: {text}. microtome.profile counts them"
            )


class _Clock(Probe):
    """Adds the duration of every call to the statistics of its module."""

    def __init__(self, device: torch.device, stats: dict[str, ModuleStat]) -> None:
        self.device = device
        self._stats = stats
        self._began: dict[Call, float] = {}

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._began[call] = self._now()

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        spent_s, stat = self._now() - self._began.pop(call), self._stats[call.path]
        self._stats[call.path] = replace(stat, duration=stat.duration + spent_s)

    def _now(self) -> float:
        backend_of(self.device).synchronize(self.device)
        return time.perf_counter()


def _image_shape(tensor: Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tuple(tensor.shape[1:])

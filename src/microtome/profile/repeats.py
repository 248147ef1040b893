"""Running a model again and again, for measuring: how often, how long, and with nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from operator import index
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.engine import Call, Probe, Session, tensors_in
from microtome.engine.backward import keep_gradients
from microtome.engine.meta_run import copy_inputs, stand_in
from microtome.engine.probes import AnyOp, Where
from microtome.engine.signals import grad_mode, uninterrupted
from microtome.engine.torch_internals import version_of
from microtome.errors import BadQuery, Unsupported
from microtome.inputs import Inputs
from microtome.profile.call_tree import CallTree

#: Told what is being done, how many steps of it are done and how many there will be.
Progress = Callable[[str, int, int], None]

_WARM_UP_MOST = 20
_STABLE = 0.03
_FEWEST = 3
_BLOCK = 512


def whole_number(value: Any, name: str) -> int:
    try:
        return index(value)
    except TypeError as error:
        raise BadQuery(f"{name} is a whole number, got {value!r}") from error


@dataclass(frozen=True)
class Schedule:
    """How many passes to make.

    Attributes:
        repeat: How many passes are measured.
        budget_s: After so many seconds no further pass begins; three are made in any case.
        warmup: How many passes are made before; None: until two in a row take about the same.
    """

    repeat: int = 30
    budget_s: float = 20.0
    warmup: int | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if whole_number(self.repeat, "repeat") < _FEWEST:
            raise BadQuery(f"a spread needs {_FEWEST} passes or more: repeat is {self.repeat}")
        if not isinstance(self.budget_s, int | float) or not self.budget_s > 0:
            raise BadQuery(f"the budget is a time in seconds above 0, got {self.budget_s!r}")
        if self.warmup is not None and whole_number(self.warmup, "warmup") < 0:
            raise BadQuery(f"warmup is how many passes are made before, 0 or more, got {self.warmup}")
        object.__setattr__(self, "repeat", whole_number(self.repeat, "repeat"))
        if self.warmup is not None:
            object.__setattr__(self, "warmup", whole_number(self.warmup, "warmup"))

    def rounds(self, what: str) -> Iterator[int]:
        """One for each pass that is to be made."""
        began = perf_counter()
        for done in range(self.repeat):
            if done >= _FEWEST and perf_counter() - began > self.budget_s:
                return
            self.tell(what, done, self.repeat)
            yield done

    def tell(self, what: str, done: int, whole: int) -> None:
        if self.progress is not None:
            self.progress(what, done, whole)


class PassTime(NamedTuple):
    """The host's seconds of a pass, and those until all devices were done."""

    forward_s: float
    backward_s: float
    whole_s: float


def _restorable(inputs: Inputs) -> list[Tensor]:
    """The tensors of inputs whose writes can be seen and undone."""
    tensors = tensors_in((inputs.args, inputs.kwargs))
    strided = (tensor for tensor in tensors if not tensor.is_inference() and tensor.layout is torch.strided)
    return [tensor for tensor in strided if tensor.is_leaf]  # a write makes another the result of that write


class _Order(Probe):
    """Notes the calls of a pass in order. It takes operators too, so that the engine sees which draw random numbers."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def op_begins(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        return

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.phase == "forward":
            self.addresses.append(call.address)


def check_calls(made: Sequence[str], expected: Sequence[str]) -> None:
    """Raise where a pass made other calls than it is to make: what is measured of it would go to the wrong ones."""
    if list(made) == list(expected):
        return
    at = next((at for at, pair in enumerate(zip(made, expected, strict=False)) if len({*pair}) > 1), None)
    where = "" if at is None else f", the first at {made[at]!r} where another was at {expected[at]!r}"
    raise Unsupported(f"a pass made {len(made)} calls, and another {len(expected)}{where}: their times have no order")


def _nobody(_: str) -> None:
    return


class Passes:
    """A model with its inputs, ready to be run again and again, each time the same.

    Attributes:
        devices: The CUDA devices that it runs on.
        fast_paths: Whether its calls are all seen on the fast paths that it takes when nobody looks.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, *, backward: bool) -> None:
        self.fast_paths = True
        self.model = model
        self.inputs = self._given = inputs
        self.backward = backward
        self._tensors = (*model.parameters(), *model.buffers(), *tensors_in((inputs.args, inputs.kwargs)))
        self.devices = sorted({tensor.device.index for tensor in self._tensors if tensor.is_cuda})
        self._versions = [(tensor, version_of(tensor), tensor.detach().clone()) for tensor in _restorable(inputs)]
        self._leaves = [tensor for tensor in self._tensors if tensor.is_leaf and tensor.requires_grad]

    def once(self, told: Callable[[str], object] = _nobody) -> PassTime:
        """One pass; devices are waited for before it and after it, and nowhere in between.

        Args:
            told: Told `"forward"` and `"backward"` when these begin, and `"none"` when they have ended.
        """
        self.renew()
        self.wait()
        grad = torch.is_grad_enabled() or self.backward
        with grad_mode(grad):
            told("forward")
            began = perf_counter()
            output = self.inputs.run(self.model)
            forward = perf_counter()
            told("none")
            roots, seeds = self._seeds(output) if self.backward else ([], [])
            with keep_gradients(roots):
                told("backward")
                middle = perf_counter()
                if roots:
                    torch.autograd.backward(roots, seeds)
                ended = perf_counter()
                told("none")
            del output, roots, seeds
        self.wait()
        whole = perf_counter() - began - (middle - forward)
        self._forget_gradients()
        gc.collect(0)  # cycles that hold tensors would pile up
        return PassTime(forward - began, ended - middle, whole)

    def forward_alone(self) -> Passes:
        """The same without a backward."""
        alone = copy(self)
        alone.backward = False
        return alone

    def session(self, probe: Probe, tree: CallTree) -> Session:
        """What shows a probe the calls of a tree."""
        return Session(self.model, [probe], at=tree.selector(), fast_paths=self.fast_paths, other_threads="unseen")

    def look(self, tree: CallTree) -> None:
        """Find out whether fast paths hide calls, and whether a pass makes the calls that it is to make."""
        for self.fast_paths in (True, False):
            order = _Order()
            with self.session(order, tree):
                self.once()
            if order.addresses == tree.order:
                return
        check_calls(order.addresses, tree.order)

    def resident_bytes(self) -> int:
        """What weights, buffers and inputs take of the allocator of CUDA devices, which gives out whole blocks."""
        storages = {
            storage.data_ptr(): storage.nbytes()
            for tensor in self._tensors
            if tensor.is_cuda and (storage := tensor.untyped_storage())
        }
        return sum(-(-size // _BLOCK) * _BLOCK for size in storages.values())

    def renew(self) -> None:
        """Restore the inputs as they were given: the last pass may have written to them, or to objects among them."""
        for at, (tensor, version, before) in enumerate(self._versions):
            if version_of(tensor) != version:
                with torch.no_grad():
                    tensor.copy_(before)
                self._versions[at] = tensor, version_of(tensor), before
        self.inputs = copy_inputs(self._given, self.model, shared=[tensor for tensor, _, _ in self._versions])

    def again(self) -> None:
        """One pass, without waiting for devices."""
        self.renew()
        with grad_mode(torch.is_grad_enabled() or self.backward):
            output = self.inputs.run(self.model)
            if self.backward:
                roots, seeds = self._seeds(output)
                with keep_gradients(roots):
                    torch.autograd.backward(roots, seeds)
        self._forget_gradients()

    def wait(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)

    def _forget_gradients(self) -> None:
        """Forget those of a backward that the forward runs, so that the next pass does not add to them."""
        for leaf in self._leaves:
            leaf.grad = None

    def warm_up(self, schedule: Schedule) -> int:
        """Run before measuring; until two passes in a row take about the same, if it is not said how often."""
        if schedule.warmup is not None:
            for done in range(schedule.warmup):
                schedule.tell("warming up", done, schedule.warmup)
                self.once()
            return schedule.warmup
        last, began = self.once().whole_s, perf_counter()
        for done in range(2, _WARM_UP_MOST + 1):
            schedule.tell("warming up", done - 1, _WARM_UP_MOST)
            now = self.once().whole_s
            if abs(now - last) <= _STABLE * last or perf_counter() - began > schedule.budget_s / 4:
                return done
            last = now
        return _WARM_UP_MOST

    def _seeds(self, output: Any) -> tuple[list[Tensor], list[Tensor]]:
        """What the backward begins at: the sum of the outputs."""
        roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        return roots, [torch.ones_like(tensor) for tensor in roots]


@uninterrupted
def passes(model: nn.Module, inputs: Inputs, *, backward: bool) -> Iterator[Passes]:
    """A model ready to be run for the time of the block, without garbage collection; it is as found afterwards."""
    _check(model, inputs)
    gc.collect()
    with stand_in(model, inputs, "real") as given:  # which turns garbage collection off
        yield Passes(model, given, backward=backward)


def _check(model: nn.Module, inputs: Inputs) -> None:
    tensors = (*model.parameters(), *model.buffers(), *tensors_in((inputs.args, inputs.kwargs)))
    other = sorted({tensor.device.type for tensor in tensors} - {"cpu", "cuda"})
    if other:
        raise Unsupported(f"CPU and CUDA devices can be measured, and there are tensors on {', '.join(other)}")

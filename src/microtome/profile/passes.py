"""Run a model repeatedly for measurements, from the same state each time, and restore it afterwards."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.devices.base import Backend, accelerators_of, backend_of
from microtome.engine import Call, Probe, Session, tensors_in
from microtome.engine.backward import preserve_gradients
from microtome.engine.meta_run import copy_inputs, substitute_tensors
from microtome.engine.signals import grad_mode, signal_safe
from microtome.engine.snapshot import WriteBackups
from microtome.engine.torch_internals import version_of
from microtome.errors import BadQuery, Unsupported
from microtome.inputs import Inputs
from microtome.profile.call_tree import CallTree
from microtome.trace.backup_probe import BackupProbe

#: Called with the current task, the number of completed steps and that of all steps.
Progress = Callable[[str, int, int], None]

_MAX_WARM_UP = 20
_STABLE = 0.03
_MIN_PASSES = 3


def to_integer(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise BadQuery(f"expected {name} to be an integer, got {value!r}") from error


@dataclass(frozen=True)
class PassSchedule:
    """The number of passes.

    Attributes:
        repeat: The number of measured passes.
        budget_s: The time after which no further pass begins; at least three are made.
        warmup: The number of passes before; None: until two in a row take about the same time.
    """

    repeat: int = 30
    budget_s: float = 20.0
    warmup: int | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "repeat", to_integer(self.repeat, "repeat"))
        if self.repeat < _MIN_PASSES:
            raise BadQuery(f"expected repeat to be at least {_MIN_PASSES}, for a spread, got {self.repeat}")
        if not isinstance(self.budget_s, int | float) or not self.budget_s > 0:
            raise BadQuery(f"expected budget_s to be above 0 seconds, got {self.budget_s!r}")
        if self.warmup is not None:
            object.__setattr__(self, "warmup", to_integer(self.warmup, "warmup"))
            if self.warmup < 0:
                raise BadQuery(f"expected warmup to be 0 passes or more, got {self.warmup}")

    def rounds(self, task: str) -> Iterator[int]:
        """Yield once for each pass to make."""
        began = perf_counter()
        for done in range(self.repeat):
            if done >= _MIN_PASSES and perf_counter() - began > self.budget_s:
                return
            self.report(task, done, self.repeat)
            yield done

    def report(self, task: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(task, done, total)


class PassTime(NamedTuple):
    """The host's seconds of a pass, and those until all devices were synchronized."""

    forward_s: float
    backward_s: float
    whole_s: float


def _restorable(inputs: Inputs) -> list[Tensor]:
    """Return the input tensors whose in-place writes can be detected and undone."""
    tensors = tensors_in((inputs.args, inputs.kwargs))
    strided = (tensor for tensor in tensors if not tensor.is_inference() and tensor.layout is torch.strided)
    return [tensor for tensor in strided if tensor.is_leaf]  # an in-place write changes the grad_fn of others


class _CallOrder(BackupProbe):
    """Collects the calls of a pass in order. Its operator callback makes the engine detect random operators."""

    def __init__(self, backups: WriteBackups) -> None:
        super().__init__(backups)
        self.addresses: list[str] = []

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.phase == "forward":
            self.addresses.append(call.address)


def check_calls(calls: Sequence[str], expected: Sequence[str]) -> None:
    """Raise if a pass made other calls than expected: measurements would be attributed to the wrong ones."""
    if list(calls) == list(expected):
        return
    differing = ((got, call) for got, call in zip(calls, expected, strict=False) if got != call)
    where = next((f", the first difference at {got!r} in place of {call!r}" for got, call in differing), "")
    raise Unsupported(
        f"calls differ between passes, so their times cannot be aligned: expected {len(expected)} calls, got "
        f"{len(calls)}{where}"
    )


def _ignore(_: str) -> None:
    return


class Passes:
    """A model with its inputs, which runs repeatedly from the same state.

    Attributes:
        devices: The accelerators that it runs on; empty on the CPU.
        backend: Their backend.
        fast_paths: Whether all calls can be observed on torch's fast paths, which the model takes unobserved.
    """

    def __init__(
        self, model: nn.Module, inputs: Inputs, backups: WriteBackups | None = None, *, backward: bool
    ) -> None:
        self.fast_paths = True
        self._backups = WriteBackups() if backups is None else backups
        self.model = model
        self.inputs = self._original_inputs = inputs
        self.backward = backward
        self._tensors = (*model.parameters(), *model.buffers(), *tensors_in((inputs.args, inputs.kwargs)))
        self.devices = accelerators_of(self._tensors)
        self.backend: Backend = backend_of(self.devices[0] if self.devices else "cpu")
        self._versions = [(tensor, version_of(tensor), tensor.detach().clone()) for tensor in _restorable(inputs)]
        self._leaves = [tensor for tensor in self._tensors if tensor.is_leaf and tensor.requires_grad]

    def once(self, on_phase: Callable[[str], object] = _ignore) -> PassTime:
        """Run one pass; devices are synchronized before and after it, and not in between.

        Args:
            on_phase: Called with `"forward"` and `"backward"` when these begin, and with `"none"` when they end.
        """
        self.restore_inputs()
        self.synchronize()
        grad = torch.is_grad_enabled() or self.backward
        with grad_mode(grad):
            on_phase("forward")
            began = perf_counter()
            output = self.inputs.run(self.model)
            forward = perf_counter()
            on_phase("none")
            roots, seeds = self._seeds(output) if self.backward else ([], [])
            with preserve_gradients(roots):
                on_phase("backward")
                middle = perf_counter()
                if roots:
                    torch.autograd.backward(roots, seeds)
                ended = perf_counter()
                on_phase("none")
            del output, roots, seeds
        self.synchronize()
        whole = perf_counter() - began - (middle - forward)
        self._clear_gradients()
        gc.collect(0)  # reference cycles that hold tensors would accumulate
        return PassTime(forward - began, ended - middle, whole)

    def forward_only(self) -> Passes:
        """Return the same passes without a backward."""
        forward = copy(self)
        forward.backward = False
        return forward

    def session(self, probe: Probe, tree: CallTree) -> Session:
        """Return a session in which a probe observes the calls of a tree."""
        return Session(self.model, [probe], at=tree.selector(), fast_paths=self.fast_paths, other_threads="ignore")

    def choose_fast_paths(self, tree: CallTree) -> None:
        """Disable fast paths if they hide calls, and check that a pass makes the calls of the tree.

        These passes come first. The tensors that they write to are restored at the end; later ones are not observed.
        """
        for self.fast_paths in (True, False):
            order = _CallOrder(self._backups)
            with self.session(order, tree):
                self.once()
            if order.addresses == tree.order:
                return
        check_calls(order.addresses, tree.order)

    def resident_bytes(self) -> int:
        """Return the bytes that weights, buffers and inputs take in the allocators of accelerators."""
        storages = {
            storage.data_ptr(): storage.nbytes()
            for tensor in self._tensors
            if tensor.device in self.devices and (storage := tensor.untyped_storage())
        }
        return sum(map(self.backend.allocated_bytes, storages.values()))

    def restore_inputs(self) -> None:
        """Restore the inputs: the last pass may have written to them, or to objects among them."""
        for index, (tensor, version, before) in enumerate(self._versions):
            if version_of(tensor) != version:
                with torch.no_grad():
                    tensor.copy_(before)
                self._versions[index] = tensor, version_of(tensor), before
        self.inputs = copy_inputs(self._original_inputs, self.model, shared=[tensor for tensor, _, _ in self._versions])

    def once_async(self) -> None:
        """Run one pass without synchronizing devices."""
        self.restore_inputs()
        with grad_mode(torch.is_grad_enabled() or self.backward):
            output = self.inputs.run(self.model)
            if self.backward:
                roots, seeds = self._seeds(output)
                with preserve_gradients(roots):
                    torch.autograd.backward(roots, seeds)
        self._clear_gradients()

    def synchronize(self) -> None:
        for device in self.devices:
            self.backend.synchronize(device)

    def _clear_gradients(self) -> None:
        """Clear the gradients of a backward inside the forward, so that the next pass does not accumulate into them."""
        for leaf in self._leaves:
            leaf.grad = None

    def warm_up(self, schedule: PassSchedule) -> int:
        """Run passes before measuring, by default until two in a row take about the same time; return their number."""
        if schedule.warmup is not None:
            for done in range(schedule.warmup):
                schedule.report("warming up", done, schedule.warmup)
                self.once()
            return schedule.warmup
        last, began = self.once().whole_s, perf_counter()
        for done in range(2, _MAX_WARM_UP + 1):
            schedule.report("warming up", done - 1, _MAX_WARM_UP)
            now = self.once().whole_s
            if abs(now - last) <= _STABLE * last or perf_counter() - began > schedule.budget_s / 4:
                return done
            last = now
        return _MAX_WARM_UP

    def _seeds(self, output: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return the roots of the backward and their gradients, those of the sum of the outputs."""
        roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        return roots, [torch.ones_like(tensor) for tensor in roots]


@signal_safe
def open_passes(model: nn.Module, inputs: Inputs, *, backward: bool) -> Iterator[Passes]:
    """Yield the passes of a model, without garbage collection; the model is restored afterwards."""
    _check_devices(model, inputs)
    gc.collect()
    backups = WriteBackups()
    with substitute_tensors(model, inputs, "real", backups) as run:  # which turns garbage collection off
        yield Passes(model, run, backups, backward=backward)


def _check_devices(model: nn.Module, inputs: Inputs) -> None:
    tensors = (*model.parameters(), *model.buffers(), *tensors_in((inputs.args, inputs.kwargs)))
    types = sorted({tensor.device.type for tensor in tensors} - {"cpu"})
    if "meta" in types or len(types) > 1:
        raise Unsupported(
            f"expected tensors on the CPU and on devices of one type, got {' and '.join(types)}: move the model to one"
        )

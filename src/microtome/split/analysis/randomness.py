"""Random numbers that a model draws, by operators or in Python code, and the calls that vary by them."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from microtome.devices.base import default_generators
from microtome.engine import Call, Probe
from microtome.engine.probes import AnyOp, Where
from microtome.engine.pytree import tensors_in
from microtome.engine.random_states import code_refers_to, numpy_state
from microtome.engine.torch_internals import OpOverload
from microtome.flops.composite import AttentionArguments
from microtome.inputs import Inputs
from microtome.results.trace import Op
from microtome.trace.trace import record

if TYPE_CHECKING:
    from microtome.trace.recorder import TraceRecorder

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_is_seeded: dict[Any, bool] = {}

#: How many more runs are compared to find calls that vary. What these have in common by chance is found when the model
#: is split or run.
_RUNS = 6


# -- operators ---------------------------------------------------------------------------------------------------------


class Draw(NamedTuple):
    """An operator that draws random numbers.

    Attributes:
        is_composite: Whether it is a function that is recorded whole: which operators it runs depends on the device.
        is_dropout: Whether it is part of a dropout function.
        has_gradient: Whether a gradient may flow through it to its arguments.
    """

    name: str
    is_composite: bool
    is_dropout: bool
    has_gradient: bool

    @classmethod
    def of(cls, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
        name = op_name(func)
        is_dropout = "dropout" in getattr(where.function, "__name__", "")
        requires_grad = any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        takes_shape_alone = name.partition(".")[0].endswith("_like")
        return cls(name, not isinstance(func, OpOverload), is_dropout, requires_grad and not takes_shape_alone)

    def can_be_sent(self, op: Op, *, is_fused: bool) -> bool:
        """Whether the operator runs as recorded on the model's device, and returns all that it draws.

        Args:
            is_fused: Whether dropout is one kernel on that device.
        """
        return not self.is_composite and not (is_fused and self.is_dropout) and set(op.mutates) <= set(op.outputs)


def op_name(func: AnyOp) -> str:
    """The name of an operator, such as `rand.default`."""
    return str(getattr(func, "__name__", func))


def is_random(func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers when it is called with these arguments."""
    if func is _ATTENTION:
        return AttentionArguments(*args, **kwargs).dropout_p > 0
    if func in _RECURRENT:
        return any(rate > 0 and train for rate, train in pairwise(args) if isinstance(rate, float))
    if func not in _is_seeded:
        _is_seeded[func] = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    if not _is_seeded[func]:
        return False
    name = op_name(func)
    # These draw nothing at a rate of 0, or outside of training.
    if "dropout" in name:
        return bool(args[2] if len(args) > 2 else kwargs.get("train", True)) and (args[1] if len(args) > 1 else 1) > 0
    if "attention" in name:
        return bool(kwargs.get("dropout_p", 0.0))
    if "rrelu" in name:
        return bool(args[4] if len(args) > 4 else kwargs.get("training", False))
    return True


# -- Python code -------------------------------------------------------------------------------------------------------


class PythonDraw(NamedTuple):
    """A draw from a generator of Python or numpy in the code of a call itself.

    Attributes:
        package: Whose generator it is, in words.
        ended: The number of calls that had ended before.
    """

    call: int
    package: str
    ended: int


class PythonDrawProbe(Probe):
    """Records which calls draw from the generators of `random` and `numpy.random` in their own code.

    To read the state of a generator takes 7 to 22 microseconds. Of a package that the code of the model does not refer
    to, it is read at the beginning and the end of the run.

    Args:
        every_call: Read all states at every call.

    Attributes:
        is_incomplete: Whether the run drew from a generator whose state was not read at every call.
    """

    def __init__(self, model: nn.Module, *, every_call: bool = False) -> None:
        self.draws: list[PythonDraw] = []
        self.is_incomplete = False
        self._stack: list[int] = []
        self._begun = self._ended = 0
        is_alone = threading.active_count() == 1  # otherwise another thread may draw meanwhile
        classes = {cls for module in model.modules() for cls in type(module).__mro__}
        self._packages = [name for name in _STATES if (is_alone and every_call) or code_refers_to(classes, name)]
        self._others = [name for name in _STATES if is_alone and name not in self._packages]
        self._first_states = _states_of(self._others)
        self._last_states = _states_of(self._packages)

    def _attribute_draws(self) -> None:
        """Attribute the draws since the last call began or ended to the running call."""
        states = _states_of(self._packages)
        for package, before, now in zip(self._packages, self._last_states, states, strict=True):
            if before != now and self._stack:
                self.draws.append(PythonDraw(self._stack[-1], _NAMES[package], self._ended))
        self._last_states = states

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._attribute_draws()
        self._stack.append(self._begun)
        self._begun += 1

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._attribute_draws()
        self._stack.pop()
        self._ended += 1
        if not self._stack:
            self.is_incomplete |= _states_of(self._others) != self._first_states

    def fail(self, call: Call, error: BaseException) -> None:
        self.exit(call, (), {}, None)


def _states_of(packages: Iterable[str]) -> list[Any]:
    return [_STATES[name]() for name in packages]


_STATES: dict[str, Callable[[], Any]] = {"random": random.getstate, "numpy": numpy_state}
_NAMES = {"random": "Python's random", "numpy": "numpy.random"}


# -- calls that vary ---------------------------------------------------------------------------------------------------


class CallOrderProbe(Probe):
    """Records which modules each call calls, in order.

    Attributes:
        children: The paths of the modules, by the address of the call.
        reads_values: Whether operators returned Python values.
    """

    def __init__(self) -> None:
        self.children: dict[str, list[str]] = {}
        self.reads_values = False

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.parent is not None:
            self.children.setdefault(call.parent.address, []).append(call.path)

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.reads_values |= isinstance(output, bool | int | float)


def find_varying_calls(
    model: nn.Module, example: Inputs, first: CallOrderProbe, generators: Collection[torch.Generator]
) -> frozenset[str]:
    """Run the model several times; return the addresses of the calls that make other calls than in the first run."""
    probes: list[CallOrderProbe] = []

    def make_probes(_: TraceRecorder) -> list[Probe]:
        probes.append(CallOrderProbe())
        return [probes[-1]]

    devices = devices_of(model, example)
    varying: set[str] = set()
    restore = save_random_state(devices, generators, draws=True, packages=_NAMES.values())
    try:
        for _ in range(_RUNS):
            # Each run restores the random states that it drew from, so that the next one would draw the same.
            for generator in (*default_generators(devices), *generators):
                torch.rand(1, generator=generator, device=generator.device)
            random.random()
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.random()
            record(model, example, make_probes=make_probes, values=True)
            children = probes[-1].children  # of the last attempt: on meta tensors, or else on real ones
            varying |= {address for address, paths in first.children.items() if paths != children.get(address)}
    finally:
        restore()
    return frozenset(varying)


def devices_of(model: nn.Module, inputs: Inputs) -> set[torch.device]:
    """The devices of the weights and the inputs of a model."""
    tensors = (*model.parameters(), *model.buffers(), *tensors_in((inputs.args, inputs.kwargs)))
    return {tensor.device for tensor in tensors}


def save_random_state(
    devices: Iterable[torch.device], generators: Iterable[torch.Generator], *, draws: bool, packages: Collection[str]
) -> Callable[[], None]:
    """Save the state of all generators that a run may draw from; return a function that restores it.

    Where there are other threads, which may draw too, only those that the model draws from are restored.

    Args:
        generators: Those that the model draws from beside the default ones.
        draws: Whether an operator of the model draws.
        packages: The packages of its `PythonDraw`s.
    """
    is_alone = threading.active_count() == 1
    saved: list[tuple[Callable[[Any], object], Any]] = []
    if is_alone or draws:
        every = (*default_generators(devices), *generators)
        saved += [(generator.set_state, generator.get_state()) for generator in every]
    if is_alone or _NAMES["random"] in packages:
        saved.append((random.setstate, random.getstate()))
    if (numpy := sys.modules.get("numpy")) and (is_alone or _NAMES["numpy"] in packages):
        saved.append((numpy.random.set_state, numpy.random.get_state(legacy=False)))

    def restore() -> None:
        for set_state, state in saved:
            set_state(state)

    return restore

"""Random numbers that Python code has, and by which a model may choose the calls that it makes."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import nn

from microtome.devices.base import default_generators
from microtome.engine import Call, Probe
from microtome.engine.probes import AnyOp, Where
from microtome.engine.random_states import code_refers_to
from microtome.split.random_ops import save_random_state

#: So many more runs are compared where code reads elements of tensors and random numbers are drawn. What all of them
#: have in common by chance is found when the model is split or run.
_RUNS = 6


class PythonDraw(NamedTuple):
    """A draw from a generator of Python or numpy in the code of a call itself.

    Attributes:
        call: The index of the call.
        package: Whose generator it is.
        ended: How many calls had ended before.
    """

    call: int
    package: str
    ended: int


class PythonDrawProbe(Probe):
    """Notes which calls draw from the generators of `random` and `numpy.random` in their own code."""

    def __init__(self, model: nn.Module) -> None:
        self._stack: list[int] = []
        self._begun = self._ended = 0
        alone = threading.active_count() == 1  # or another thread may draw meanwhile
        classes = {cls for module in model.modules() for cls in type(module).__mro__}
        self._packages = [name for name in ("random", "numpy") if alone or code_refers_to(classes, name)]
        self._last = self._states()
        self.found: list[PythonDraw] = []

    def _states(self) -> list[Any]:
        return [_STATES[name]() for name in self._packages]

    def _note(self) -> None:
        """Attribute the draws since the last call began or ended to the code that ran since."""
        states = self._states()
        for package, before, now in zip(self._packages, self._last, states, strict=True):
            if before != now and self._stack:
                self.found.append(PythonDraw(self._stack[-1], _NAMES[package], self._ended))
        self._last = states

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._note()
        self._stack.append(self._begun)
        self._begun += 1

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._note()
        self._stack.pop()
        self._ended += 1

    def fail(self, call: Call, error: BaseException) -> None:
        self.exit(call, (), {}, None)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    held = numpy.random.get_state(legacy=False)
    state = [part.tobytes() if hasattr(part, "tobytes") else part for part in held["state"].values()]
    return state, held.get("has_gauss"), held.get("gauss")


_STATES = {"random": random.getstate, "numpy": _numpy_state}
_NAMES = {"random": "Python's random", "numpy": "numpy.random"}


class CallOrderProbe(Probe):
    """Notes which modules each call calls, in order.

    Attributes:
        children: The paths of the modules, by the address of the call.
        reads: Whether operators gave Python values.
    """

    def __init__(self) -> None:
        self.children: dict[str, list[str]] = {}
        self.reads = False

    def enter(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.parent is not None:
            self.children.setdefault(call.parent.address, []).append(call.path)

    def op(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.reads |= isinstance(output, bool | int | float)


def find_varying(
    first: CallOrderProbe,
    run: Callable[[], CallOrderProbe],
    devices: Collection[torch.device] = (),
    generators: Collection[torch.Generator] = (),
) -> frozenset[str]:
    """The addresses of the calls that make other calls in other runs.

    Args:
        run: Runs the model once more, and returns the calls that it made.
        devices: Those that the model computes on.
        generators: Those that it draws from beside the default ones.
    """
    varying: set[str] = set()
    restore = save_random_state(devices, generators, draws=True, packages=_NAMES.values())
    try:
        for _ in range(_RUNS):
            # Each run restores what it drew from, and would draw the same again.
            for generator in (*default_generators(devices), *generators):
                torch.rand(1, generator=generator, device=generator.device)
            random.random()
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.random()
            other = run()
            varying |= {address for address, paths in first.children.items() if paths != other.children.get(address)}
    finally:
        restore()
    return frozenset(varying)

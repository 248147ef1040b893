"""Restore the random states that a run drew from, and no others, which another thread may be using."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from microtome.devices.base import default_generators
from microtome.engine.attributes import read_attribute
from microtome.engine.code_references import references_of


class RandomUse:
    """The default generators that the run of a thread drew from.

    Attributes:
        operators_observed: Whether an `OpMode` has observed operators of the thread.
        devices: The devices whose default generators were drawn from.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.operators_observed = False
        self.devices: set[torch.device] = set()


_open: list[RandomUse] = []


def mark_operators_observed() -> None:
    """Record that operators of this thread are observed from now on."""
    for use in _open:
        use.operators_observed |= use.thread == threading.get_ident()


def record_draw(output: Any, arguments: Iterable[Any]) -> None:
    """Record that an operator drew from a default generator, unless it has its own or its outputs have no values."""
    if not _open or any(isinstance(argument, torch.Generator) for argument in arguments):
        return
    outputs = output if isinstance(output, tuple | list) else (output,)
    tensors = [item for item in outputs if isinstance(item, Tensor)]
    devices = {tensor.device for tensor in tensors if not tensor.is_meta and type(tensor).__name__ != "FakeTensor"}
    for use in _open:
        if use.thread == threading.get_ident():
            use.devices |= devices


@contextmanager
def preserve_random_states(classes: Iterable[type], devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore, after the block, the states of torch, `random` and numpy that a run in the block drew from.

    Without other threads, every state that changed is restored. Otherwise a state of torch is restored if an operator
    of this thread drew from it, or if operators were not observed; those of `random` and numpy if they changed and the
    model's code refers to them.
    """
    generators = default_generators(devices)
    before = [(generator, generator.get_state(), generator.initial_seed()) for generator in generators]
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_before, numpy_key = None if numpy is None else numpy.random.get_state(legacy=False), numpy_state()
    use = RandomUse()
    _open.append(use)
    try:
        yield
    finally:
        _open.remove(use)
        is_alone = threading.active_count() == 1
        may_have_drawn = is_alone or not use.operators_observed
        for generator, state, seed in before:
            drew = may_have_drawn or generator.device in use.devices or generator.initial_seed() != seed
            if drew and not generator.get_state().equal(state):
                generator.set_state(state)
        if random.getstate() != python and (is_alone or code_refers_to(classes, "random")):
            random.setstate(python)
        has_changed = numpy is not None and numpy_state() != numpy_key
        if numpy is not None and has_changed and (is_alone or code_refers_to(classes, "numpy")):
            numpy.random.set_state(numpy_before)


class SavedRandomStates:
    """The states of torch's generator of the CPU, `random` and numpy, to be restored in a process of one thread."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = None if (numpy := sys.modules.get("numpy")) is None else numpy.random.get_state(legacy=False)

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def numpy_state() -> Any:
    """The state of numpy's global generator in a form that can be compared; None while numpy is not imported."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    return _comparable(numpy.random.get_state(legacy=False))


def _comparable(state: Any) -> Any:
    """Replace arrays in dicts by their bytes."""
    if isinstance(state, dict):
        return {key: _comparable(part) for key, part in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


def code_refers_to(classes: Iterable[type], package: str) -> bool:
    """Whether the code of a model refers to a package, one of its functions, or a method of one of its objects."""
    for name in references_of(classes).globals:
        value = name.namespace.get(name.name)
        modules = (
            read_attribute(value, "__name__"),
            read_attribute(value, "__module__"),
            type(read_attribute(value, "__self__")).__module__,
        )
        if any(isinstance(module, str) and module.partition(".")[0] == package for module in modules):
            return True
    return False

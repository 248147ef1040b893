"""Restore the random states that a run drew from, and no others: another thread may be drawing from them."""

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
from microtome.engine.code_references import globals_of
from microtome.engine.pytree import read_attribute


class RandomUse:
    """The generators that the run of a thread drew from, as far as operators tell.

    Attributes:
        operators_observed: Whether operators of the thread were shown to us since this began.
        devices: The devices whose default generators were drawn from.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.operators_observed = False
        self.devices: set[torch.device] = set()


_open: list[RandomUse] = []


def mark_operators_observed() -> None:
    """Note that from here on operators of this thread are shown to us."""
    for use in _open:
        use.operators_observed |= use.thread == threading.get_ident()


def record_draw(output: Any, arguments: Iterable[Any]) -> None:
    """Note that an operator drew from a default generator, unless it was given another or computed nothing."""
    if not _open or any(isinstance(one, torch.Generator) for one in arguments):
        return
    made = [one for one in (output if isinstance(output, tuple | list) else (output,)) if isinstance(one, Tensor)]
    real = {one.device for one in made if not one.is_meta and type(one).__name__ != "FakeTensor"}
    for use in _open:
        if use.thread == threading.get_ident():
            use.devices |= real


@contextmanager
def preserve_random_states(classes: Iterable[type], devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore, after the block, the states of torch, `random` and numpy that the run in the block drew from.

    Without other threads, every state that changed is restored. With others, a state of torch is restored if an
    operator of this thread drew from it, or nobody saw the operators; those of `random` and numpy if they changed and
    the model's code refers to them.
    """
    generators = default_generators(devices)
    before = [(generator, generator.get_state(), generator.initial_seed()) for generator in generators]
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state(legacy=False)
    use = RandomUse()
    _open.append(use)
    try:
        yield
    finally:
        _open.remove(use)
        alone = threading.active_count() == 1
        for generator, state, seed in before:
            drew = (
                alone
                or not use.operators_observed
                or generator.device in use.devices
                or generator.initial_seed() != seed
            )
            if drew and not generator.get_state().equal(state):
                generator.set_state(state)
        if random.getstate() != python and (alone or code_refers_to(classes, "random")):
            random.setstate(python)
        changed = numpy is not None and _text(numpy.random.get_state(legacy=False)) != _text(of_numpy)
        if numpy is not None and changed and (alone or code_refers_to(classes, "numpy")):
            numpy.random.set_state(of_numpy)


def _text(state: Any) -> str:
    """The state of a bit generator of numpy, as something to compare: arrays of any length are written whole."""
    return str({name: _text(part) if isinstance(part, dict) else _plain(part) for name, part in state.items()})


def _plain(part: Any) -> Any:
    return part.tolist() if hasattr(part, "tolist") else part


def code_refers_to(classes: Iterable[type], package: str) -> bool:
    """Whether the code of a model refers to a package, one of its functions, or a method of an object of it."""
    for one in globals_of(classes):
        value = one.namespace.get(one.name)
        places = (
            read_attribute(value, "__name__"),
            read_attribute(value, "__module__"),
            type(read_attribute(value, "__self__")).__module__,
        )
        if any(isinstance(place, str) and place.partition(".")[0] == package for place in places):
            return True
    return False

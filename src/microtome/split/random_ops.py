"""Operators that draw random numbers, and the random state that they draw from."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from microtome.devices.base import default_generators
from microtome.engine.probes import AnyOp, Where
from microtome.engine.torch_internals import OpOverload
from microtome.flops.composite import AttentionArguments
from microtome.results.trace import Op

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_seeded: dict[Any, bool] = {}


class Draw(NamedTuple):
    """An operator of a run that draws random numbers.

    Attributes:
        name: Of the operator.
        is_whole: Whether it is a function that is recorded whole: which operators draw in it depends on the device.
        is_dropout: Whether it is part of a dropout function.
    """

    name: str
    is_whole: bool
    is_dropout: bool

    @classmethod
    def of(cls, where: Where, func: AnyOp) -> Draw:
        dropout = "dropout" in getattr(where.function, "__name__", "")
        return cls(op_name(func), not isinstance(func, OpOverload), dropout)

    def can_be_sent(self, op: Op, *, is_fused: bool) -> bool:
        """Whether the operator of a real run is the one recorded, and all it draws is in what it returns.

        Args:
            is_fused: Whether dropout is one kernel on the device, and not the operators recorded.
        """
        return not self.is_whole and not (is_fused and self.is_dropout) and set(op.mutates) <= set(op.outputs)


def op_name(func: AnyOp) -> str:
    return str(getattr(func, "__name__", func))


def is_random(func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers when it is called with these arguments."""
    known = _seeded.get(func)
    if known is None:
        known = _seeded[func] = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    if func is _ATTENTION:
        return AttentionArguments(*args, **kwargs).dropout_p > 0
    if not known and func not in _RECURRENT:
        return False
    if func in _RECURRENT:
        return any(rate > 0 and train for rate, train in pairwise(args) if isinstance(rate, float))
    name = getattr(func, "__name__", "")
    # These draw nothing when they are told not to drop anything.
    if "dropout" in name:
        return bool(args[2] if len(args) > 2 else kwargs.get("train", True)) and (args[1] if len(args) > 1 else 1) > 0
    if "attention" in name:
        return bool(kwargs.get("dropout_p", 0.0))
    if "rrelu" in name:
        return bool(args[4] if len(args) > 4 else kwargs.get("training", False))
    return True


def save_random_state(
    devices: Iterable[torch.device], generators: Iterable[torch.Generator], *, draws: bool, packages: Collection[str]
) -> Callable[[], None]:
    """Take the state of all generators that a run may draw from; return a function that sets them to it again.

    Where there are other threads, which may draw too, it sets only those that the model draws from.

    Args:
        devices: Those that the run computes on, beside the CPU.
        generators: Those that the model draws from beside the default ones.
        draws: Whether an operator of the model draws.
        packages: Of `PythonDraw`: whose generators its Python code draws from.
    """
    alone = threading.active_count() == 1
    restore: list[tuple[Callable[[Any], object], Any]] = []
    if alone or draws:
        every = (*default_generators(devices), *generators)
        restore += [(generator.set_state, generator.get_state()) for generator in every]
    if alone or "Python's random" in packages:
        restore.append((random.setstate, random.getstate()))
    if (numpy := sys.modules.get("numpy")) and (alone or "numpy.random" in packages):
        restore.append((numpy.random.set_state, numpy.random.get_state(legacy=False)))

    def reset() -> None:
        for put, state in restore:
            put(state)

    return reset

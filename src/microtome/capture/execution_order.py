"""In which order the calls of a model run, known without running it."""

from __future__ import annotations

import random
import sys
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from microtome.engine import Call, Probe, Session
from microtome.engine.meta_run import stand_in
from microtome.engine.probes import AnyOp, Where
from microtome.engine.pytree import dict_of
from microtome.engine.selectors import named
from microtome.engine.thread_stacks import runs_elsewhere
from microtome.inputs import Inputs
from microtome.results.trace import TensorMode

#: The orders that were found, by the id of the model and by what they depend on.
_known: dict[int, tuple[weakref.ref[nn.Module], OrderedDict[Any, tuple[str, ...] | None]]] = {}
_MOST = 16
_DEEPEST = 6
_STANDS: tuple[TensorMode, ...] = ("meta", "fake")


def order_of(model: nn.Module, inputs: Inputs, *, fast_paths: bool) -> tuple[str, ...] | None:
    """The addresses of the calls in the order they end; None where that may depend on values or on chance.

    The model is run on tensors without values: one that runs so cannot branch on them, unless its code catches the
    error or asks whether it has values. The answer is remembered for these shapes, as long as the model and what its
    modules hold stay as they are. None, too, while another thread runs the model.
    """
    key = _key(model, inputs, fast_paths)
    orders = _orders(model)
    if key is not None and key in orders:
        orders.move_to_end(key)
        return orders[key]
    if runs_elsewhere(module for _, module in named(model)):  # it must not find stand-ins in place of weights
        return None
    order = _find(model, inputs, fast_paths)
    if key is not None:
        orders[key] = order
        while len(orders) > _MOST:
            orders.popitem(last=False)
    return order


def _orders(model: nn.Module) -> OrderedDict[Any, tuple[str, ...] | None]:
    found = _known.get(id(model))
    if found is None or found[0]() is not model:
        key = id(model)
        found = _known[key] = weakref.ref(model, lambda _: _known.pop(key, None) and None), OrderedDict()
    return found[1]


class _Ends(Probe):
    """Notes the calls as they end. It takes operators too, so that the engine sees which draw random numbers."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def op_begins(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        return

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.addresses.append(call.address)


def _find(model: nn.Module, inputs: Inputs, fast_paths: bool) -> tuple[str, ...] | None:
    for stand in _STANDS:
        ends = _Ends()
        try:
            with (
                stand_in(model, inputs, stand) as standing,
                Session(model, [ends], fast_paths=fast_paths, other_threads="refused"),
            ):
                before = _random_states()
                standing.run(model)
                if _random_states() != before:
                    return None
        except Exception:  # noqa: BLE001  whatever a model raises without values, it may run with them
            continue
        return tuple(ends.addresses)
    return None


def _random_states() -> Any:
    """What chance goes by on the CPU."""
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else str(numpy.random.get_state())
    return torch.get_rng_state().tolist(), random.getstate(), drawn


def _key(model: nn.Module, inputs: Inputs, fast_paths: bool) -> Any:
    """What the order depends on, as something to compare; None if that cannot be told."""
    try:
        given = _described((inputs.args, inputs.kwargs))
        state = tuple((path, type(module), _described(vars(module))) for path, module in named(model))
    except _UnknownOrder:
        return None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return given, state, modes, fast_paths


class _UnknownOrder(Exception):
    """It cannot be told whether this is as it was."""


def _described(value: Any, depth: int = 0) -> Any:
    """A value as something that is equal when it is the same to a model that sees no values of tensors."""
    if isinstance(value, int | bool | str | float | None):
        return value.__class__, value
    if isinstance(value, Tensor):
        if value.is_nested:  # it has several shapes
            raise _UnknownOrder
        return "tensor", tuple(value.shape), value.dtype, value.device
    if isinstance(value, nn.Module | type) or callable(value):
        return id(value)
    if depth > _DEEPEST:
        raise _UnknownOrder
    if isinstance(value, list | tuple | set | frozenset):
        return (value.__class__, *(_described(item, depth + 1) for item in value))
    if isinstance(value, dict):
        return (value.__class__, *((str(name), _described(item, depth + 1)) for name, item in value.items()))
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if type(value).__dictoffset__:  # it has a `__dict__`
        return type(value), _described(dict_of(value), depth + 1)
    raise _UnknownOrder

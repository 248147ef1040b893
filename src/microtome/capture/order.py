"""In which order the calls of a model run, known without running it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from microtome.engine import Call, Probe, Session
from microtome.engine.select import named
from microtome.engine.standin import Stand, stand_in
from microtome.inputs import Inputs

#: The orders that were found, by the id of the model and by what they depend on.
_known: dict[int, tuple[weakref.ref[nn.Module], OrderedDict[Any, tuple[str, ...] | None]]] = {}
_MOST = 16
_STANDS: tuple[Stand, ...] = ("meta", "fake")


def order_of(model: nn.Module, inputs: Inputs) -> tuple[str, ...] | None:
    """The addresses of the calls in the order they end; None where that may depend on values.

    The model is run on tensors without values: one that runs so cannot branch on them. The answer is remembered for
    these shapes, as long as the model and its attributes stay as they are.
    """
    key = _key(model, inputs)
    orders = _orders(model)
    if key is not None and key in orders:
        orders.move_to_end(key)
        return orders[key]
    order = _find(model, inputs)
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
    def __init__(self) -> None:
        self.addresses: list[str] = []

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.addresses.append(call.address)


def _find(model: nn.Module, inputs: Inputs) -> tuple[str, ...] | None:
    for stand in _STANDS:
        ends = _Ends()
        try:
            with stand_in(model, inputs, stand) as standing, Session(model, [ends]):
                standing.run(model)
        except Exception:  # noqa: BLE001  whatever a model raises without values, it may run with them
            continue
        return tuple(ends.addresses)
    return None


def _key(model: nn.Module, inputs: Inputs) -> Any:
    """What the order depends on, as something to compare; None if that cannot be told."""
    given = _described((inputs.args, inputs.kwargs))
    if given is None:
        return None
    plain = (int, bool, str, float, type(None))
    state = tuple(
        (path, type(module), *((name, value) for name, value in vars(module).items() if isinstance(value, plain)))
        for path, module in named(model)
    )
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return given, state, modes


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype, value.device
    if isinstance(value, int | bool | str | float | None):
        return type(value), value
    if isinstance(value, list | tuple):
        parts = [_described(item) for item in value]
        return None if None in parts else (type(value), *parts)
    if type(value) is dict:
        items = [(name, _described(item)) for name, item in value.items()]
        return None if any(item is None for _, item in items) else (dict, *items)
    return None

"""Find the order in which the calls of a model end, from a run on tensors without values."""

from __future__ import annotations

import random
import sys
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from microtome.capture.model_state import NotHashable, attribute_key
from microtome.engine import Call, Probe, Session
from microtome.engine.meta_run import substitute_tensors
from microtome.engine.probes import AnyOp, Where
from microtome.engine.selectors import named_modules
from microtome.engine.thread_stacks import runs_in_other_thread
from microtome.inputs import Inputs
from microtome.results.trace import TensorMode

#: The cached orders, by the id of the model and by cache key.
_cache: dict[int, tuple[weakref.ref[nn.Module], OrderedDict[Any, tuple[str, ...] | None]]] = {}
_CACHE_SIZE = 16
_TENSOR_MODES: tuple[TensorMode, ...] = ("meta", "fake")


def order_of(model: nn.Module, inputs: Inputs, *, fast_paths: bool) -> tuple[str, ...] | None:
    """Return the addresses of the calls in the order they end; None if it may depend on values or random numbers.

    A model that runs on tensors without values cannot branch on them, unless its code catches the error or checks
    whether they have values. The order is cached for these shapes, as long as the model and the attributes of its
    modules do not change. None, too, while another thread runs the model.
    """
    key = _cache_key(model, inputs, fast_paths)
    orders = _cached_orders(model)
    if key is not None and key in orders:
        orders.move_to_end(key)
        return orders[key]
    if runs_in_other_thread(
        module for _, module in named_modules(model)
    ):  # the other thread must not find stand-ins for weights
        return None
    order = _find_order(model, inputs, fast_paths)
    if key is not None:
        orders[key] = order
        while len(orders) > _CACHE_SIZE:
            orders.popitem(last=False)
    return order


def _cached_orders(model: nn.Module) -> OrderedDict[Any, tuple[str, ...] | None]:
    entry = _cache.get(id(model))
    if entry is None or entry[0]() is not model:
        key = id(model)
        entry = _cache[key] = weakref.ref(model, lambda _: _cache.pop(key, None) and None), OrderedDict()
    return entry[1]


class _CallEnds(Probe):
    """Collects the addresses of calls as they end. Its operator callback makes the engine detect random operators."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def op_begins(self, where: Where, func: AnyOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        return

    def exit(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.addresses.append(call.address)


def _find_order(model: nn.Module, inputs: Inputs, fast_paths: bool) -> tuple[str, ...] | None:
    for mode in _TENSOR_MODES:
        ends = _CallEnds()
        try:
            with (
                substitute_tensors(model, inputs, mode) as stand_ins,
                Session(model, [ends], backward=False, fast_paths=fast_paths, other_threads="refuse"),
            ):
                before = _random_states()
                stand_ins.run(model)
                if _random_states() != before:
                    return None
        except Exception:  # noqa: BLE001  a model may raise anything without values, and run with them
            continue
        return tuple(ends.addresses)
    return None


def _random_states() -> Any:
    """Return the states of the CPU's random generators: torch, Python and numpy."""
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else str(numpy.random.get_state())
    return torch.get_rng_state().tolist(), random.getstate(), numpy_state


def _cache_key(model: nn.Module, inputs: Inputs, fast_paths: bool) -> Any:
    """Return a hashable key of everything the order depends on; None if there is no such key."""
    try:
        state = tuple((path, type(module), attribute_key(vars(module))) for path, module in named_modules(model))
        return run_key(inputs), state, fast_paths
    except NotHashable:
        return None


def run_key(inputs: Inputs) -> Any:
    """Return a hashable key of what the order depends on besides the model.

    Raises:
        NotHashable: There is none.
    """
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return attribute_key((inputs.args, inputs.kwargs)), modes

"""Detect changes of a model's modules and of their attributes, on which the order of its calls may depend."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from microtome.engine.attributes import dict_of
from microtome.engine.selectors import named_modules
from microtome.engine.torch_internals import own_buffers, own_children, own_parameters

_MAX_DEPTH = 6
#: Values that cannot change in what a model can distinguish, so that their identity is a key.
_IMMUTABLE = (int, bool, str, float, type(None), type, nn.Module, torch.dtype, torch.device)


def _is_immutable(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_immutable, value))
    return isinstance(value, _IMMUTABLE) or (callable(value) and not isinstance(value, Tensor))


class NotHashable(Exception):
    """A value whose changes cannot be detected."""


def attribute_key(value: Any, depth: int = 0) -> Any:
    """Return a key that is equal for values a model cannot distinguish without the values of tensors."""
    if isinstance(value, int | bool | str | float | None):
        return value.__class__, value
    if isinstance(value, Tensor):
        if value.is_nested:  # it has several shapes
            raise NotHashable
        return "tensor", tuple(value.shape), value.dtype, value.device
    if isinstance(value, nn.Module | type) or callable(value):
        return id(value)
    if depth > _MAX_DEPTH:
        raise NotHashable
    if isinstance(value, list | tuple | set | frozenset):
        return (value.__class__, *(attribute_key(item, depth + 1) for item in value))
    if isinstance(value, dict):
        return (value.__class__, *((str(name), attribute_key(item, depth + 1)) for name, item in value.items()))
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if type(value).__dictoffset__:  # it has a `__dict__`
        return type(value), attribute_key(dict_of(value), depth + 1)
    raise NotHashable


class ModelState:
    """The modules of a model and their attributes at one time, to detect changes at little cost.

    Most attributes are compared by identity, tensors by their metadata, and other mutable objects by `attribute_key`.

    Args:
        attributes: Whether to compare all attributes; False: only the classes and children of modules.

    Raises:
        NotHashable: Changes of an attribute cannot be detected.
    """

    def __init__(self, model: nn.Module, *, attributes: bool = True) -> None:
        self._walked = [module for _, module in named_modules(model)]
        self._classes = list(map(type, self._walked))
        self._namespaces = [vars(module) for module in self._walked] if attributes else []
        self._dicts: list[dict[str, Any]] = []
        self._empty: list[Collection[Any]] = []
        self._tensors: list[Tensor] = []
        self._objects: dict[int, Any] = {}
        if attributes:
            for module in self._walked:
                self._add(module, vars(module))
        else:
            self._dicts = [children for module in self._walked if (children := own_children(module))]
        self._names = list(chain.from_iterable(self._dicts))
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))
        self._keys = self._find_keys()

    def _add(self, module: nn.Module, namespace: dict[str, Any]) -> None:
        if any(isinstance(value, Tensor) for value in namespace.values()):
            self._objects[id(namespace)] = namespace  # by metadata: a model may replace it in each run
            return
        self._dicts.append(namespace)
        for value in namespace.values():
            if type(value) in (dict, OrderedDict):
                self._add_items(module, value)
            elif type(value) in (set, list) and not value:
                self._empty.append(value)
            elif not _is_immutable(value):
                self._objects[id(value)] = value

    def _add_items(self, module: nn.Module, items: dict[str, Any]) -> None:
        if not items:
            self._empty.append(items)
        elif items is own_parameters(module) or items is own_buffers(module):
            self._dicts.append(items)
            self._tensors += [tensor for tensor in items.values() if tensor is not None]
        elif items is own_children(module):
            self._dicts.append(items)
        else:
            self._objects[id(items)] = items

    def _find_keys(self) -> Any:
        """Return what a model can distinguish of tensors and of other mutable objects."""
        if any(tensor.is_nested for tensor in self._tensors):
            raise NotHashable
        tensors = [(tensor.shape, tensor.dtype, tensor.device) for tensor in self._tensors]
        return tensors, list(map(attribute_key, self._objects.values()))

    def is_current(self) -> bool:
        """Return whether nothing has changed since."""
        if any(self._empty) or list(map(type, self._walked)) != self._classes:
            return False
        if self._namespaces and not all(map(is_, map(vars, self._walked), self._namespaces)):
            return False
        values = list(chain.from_iterable(map(dict.values, self._dicts)))
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            return False
        if list(chain.from_iterable(self._dicts)) != self._names:
            return False
        try:
            return bool(self._find_keys() == self._keys)
        except NotHashable:
            return False

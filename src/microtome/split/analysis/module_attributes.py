"""The attributes of modules, and which of them a call has changed."""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from microtome.split.analysis.call_arguments import state_of

PLAIN = frozenset((int, float, bool, str))
CONTAINERS = frozenset((list, dict, set))
_MISSING = object()
#: The weights of recurrent layers in one list, which `flatten_parameters` makes.
_RECURRENT_WEIGHTS = {"_flat_weights", "_flat_weight_refs"}
#: Attributes of modules that are not state of the user's.
TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__) | {"_is_hf_initialized"} | _RECURRENT_WEIGHTS


def module_state(module: nn.Module | None) -> dict[str, Any]:
    """Something to compare each attribute and buffer of a module by, except for torch's own attributes."""
    if module is None:
        return {}
    attributes = vars(module)
    state = {
        name: value if type(value) in PLAIN else state_of(value, 3) if type(value) in CONTAINERS else (id(value),)
        for name, value in attributes.items()
        if name not in TORCH_ATTRIBUTES
    }
    for name, value in attributes.get("_buffers", {}).items():
        state[name] = (id(value),)
    return state


def changed_attributes(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, ...]:
    """The names whose state differs, sorted."""
    if before is now or before == now:
        return ()
    names = before.keys() | now.keys()
    return tuple(sorted(name for name in names if before.get(name, _MISSING) != now.get(name, _MISSING)))


class _KnownState(NamedTuple):
    """The state of a module at the beginning of a run, and the objects that it was computed from.

    Attributes:
        attributes: The `__dict__` of the module.
        buffers: The identities of its buffers.
    """

    state: dict[str, Any]
    attributes: dict[str, Any]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    buffer_names: tuple[str, ...]
    buffers: list[int]

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """The state of a module; None where the identity of its attributes does not tell that they are unchanged.

        A tensor is not kept, since that would change its lifetime.
        """
        attributes = vars(module)
        own = (value for name, value in attributes.items() if name not in TORCH_ATTRIBUTES)
        if any(type(value) in CONTAINERS or isinstance(value, Tensor) for value in own):
            return None
        buffers = attributes.get("_buffers", {})
        values = tuple(attributes.values())
        return cls(module_state(module), attributes, (*attributes,), values, (*buffers,), [*map(id, buffers.values())])

    def is_current(self, attributes: dict[str, Any]) -> bool:
        """Whether all attributes and buffers are the same objects."""
        buffers = attributes.get("_buffers") or {}
        return (
            self.attributes is attributes
            and self.names == (*attributes,)
            and all(map(is_, self.values, attributes.values()))
            and self.buffer_names == (*buffers,)
            and self.buffers == [*map(id, buffers.values())]
        )


class ModuleStates:
    """The states of the modules of a model in a run: what `module_state` returns, computed once while unchanged."""

    def __init__(self) -> None:
        self._known: dict[int, _KnownState] = {}

    def begin(self, model: nn.Module | None) -> None:
        """Begin a run of a model: read the states of its modules, which it keeps alive."""
        modules = () if model is None else model.modules()
        self._known = {id(module): known for module in modules if (known := _KnownState.of(module)) is not None}

    def of(self, module: nn.Module | None) -> dict[str, Any]:
        """The state of a module now."""
        known = self._known.get(id(module))
        if known is not None and module is not None and known.is_current(module.__dict__):
            return known.state
        return module_state(module)

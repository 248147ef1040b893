"""Copy the state of containers, tensors and models, and restore it after a run."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import FunctionType, MemberDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.engine.code_references import Global, references_of
from microtome.engine.pytree import attributes_of, dict_of
from microtome.engine.signals import complete_step, signal_safe

_SCALARS = (str, int, float, bool, type(None), type)

# -- containers --------------------------------------------------------------------------------------------------------

CONTAINERS = (dict, list, set, deque)
_MISSING = object()


def copy_container(held: Any) -> Any:
    """Copy the contents of a container, past methods that a subclass overrides."""
    if isinstance(held, dict):
        return dict(OrderedDict.items(held) if isinstance(held, OrderedDict) else dict.items(held))
    return held.copy()


def restore_containers(states: list[tuple[Any, Any]]) -> None:
    """Put back what was kept without emptying anything on the way, since other threads may read it."""
    for held, before in states:
        if isinstance(held, dict):
            restore_dict(held, before or {})
        elif isinstance(held, list):
            held[:] = before
        elif isinstance(held, set):
            if held != set(before):  # or its order would change, and with it that of a loop over it
                held.intersection_update(before)
                held.update(before)
        elif len(held) != len(before) or any(one is not other for one, other in zip(held, before, strict=True)):
            held.clear()
            held.extend(before)


def restore_dict(held: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Give a dict the items of another, in their order, without emptying it on the way."""
    if not held and not before:
        return
    for key, value in before.items():
        if dict.get(held, key, _MISSING) is not value:
            held[key] = value
    if len(held) > len(before):
        for key in [key for key in held if key not in before]:
            del held[key]
    if list(held) != list(before):
        for key, value in before.items():
            held.pop(key, None)
            held[key] = value


# -- tensors -----------------------------------------------------------------------------------------------------------


class WriteBackups:
    """The tensors that a real run may write to. Each is put back if it was copied before that."""

    def __init__(self) -> None:
        self._by_storage: dict[int, list[Tensor]] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._outside: dict[int, torch.UntypedStorage] = {}

    def watch(self, tensor: Tensor) -> None:
        self._by_storage.setdefault(id(tensor.untyped_storage()), []).append(tensor)

    def before_write(self, tensor: Tensor) -> None:
        """Copy what lies in the memory of this tensor, if it is watched."""
        for original in self._by_storage.pop(id(tensor.untyped_storage()), ()):
            self._copies.append((original, original.detach().to("cpu", copy=True)))  # a GPU may have no room for it

    def before_write_outside(self, tensor: Tensor) -> None:
        """Copy the whole memory of a tensor that was there before the run, and that no module holds."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._outside:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._outside[id(storage)] = storage
            self._copies.append((whole, whole.to("cpu", copy=True)))

    def copy_all(self) -> None:
        for backups in list(self._by_storage.values()):
            self.before_write(backups[0])

    def restore(self) -> None:
        for original, before in self._copies:
            original.data.copy_(before)


# -- models ------------------------------------------------------------------------------------------------------------


def user_classes(modules: Iterable[nn.Module]) -> set[type]:
    """Return the classes of these modules, and their bases, other than torch's and Python's own."""
    classes = {cls for module in modules for cls in type(module).__mro__}
    return {cls for cls in classes if not cls.__module__.startswith(("torch.", "builtins"))}


class _TensorState(NamedTuple):
    """A tensor as it was: another tensor in its memory, a copy of its values, and its gradient."""

    tensor: Tensor
    alias: Tensor
    values: Tensor | None
    grad: Tensor | None


class Snapshot:
    """The state that the modules of a model hold: attributes, containers and objects with their items, and tensors.

    Values of parameters are kept by name only, where a run is known to write into them: they take the most memory.
    """

    def __init__(self, model: nn.Module, written: Collection[str] = ()) -> None:
        wanted = {id(parameter) for name, parameter in model.named_parameters() if name in written}
        self._holders: list[tuple[Any, Any]] = []
        self._tensors: list[_TensorState] = []
        modules = list(model.modules())
        self._classes = [(cls, dict(vars(cls))) for cls in user_classes(modules)]
        pending: list[Any] = [vars(module) for module in modules]
        seen: set[int] = set()
        while pending:
            item = pending.pop()
            if isinstance(item, _SCALARS) or id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, Tensor):
                self._add_tensor(item, copies=not isinstance(item, nn.Parameter) or id(item) in wanted)
            elif isinstance(item, CONTAINERS):
                before = copy_container(item)
                self._holders.append((item, before))
                pending += before.values() if isinstance(before, dict) else before
            elif isinstance(item, tuple):
                pending += item
            elif isinstance(item, nn.Module) or is_dataclass(item):
                pending.append(dict_of(item))

    def _add_tensor(self, tensor: Tensor, *, copies: bool) -> None:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            return
        values = tensor.detach().clone() if copies else None
        grad = tensor.grad if tensor.is_leaf else None
        self._tensors.append(_TensorState(tensor, tensor.detach(), values, grad))

    def restore(self) -> None:
        """Have the model hold what it held; again, if it was interrupted."""
        restore_containers(self._holders)
        _restore_classes(self._classes)
        for states in self._tensors:
            _restore_tensor(states)


def _restore_tensor(states: _TensorState) -> None:
    tensor = states.tensor
    if tensor.data_ptr() != states.alias.data_ptr():  # another was set as its `data`
        tensor.data = states.alias
    if states.values is not None and not torch.equal(
        tensor, states.values
    ):  # batch norms write without torch counting it
        with torch.inference_mode(tensor.is_inference()):
            tensor.detach().copy_(states.values)
    if tensor.is_leaf and tensor.grad is not states.grad:
        tensor.grad = states.grad


@signal_safe
def restore_afterwards(model: nn.Module, written: Collection[str] = ()) -> Iterator[Snapshot]:
    """Have the model hold after the block what it held before, also if the block raises."""
    snapshot = Snapshot(model, written)
    try:
        yield snapshot
    finally:
        snapshot.restore()


# -- runs on other tensors ---------------------------------------------------------------------------------------------


def preserve_state(modules: list[nn.Module], classes: set[type], stack: ExitStack) -> list[Tensor]:
    """Put back, afterwards, what modules, parameters, classes and globals hold; return the tensors among it.

    Dicts, lists, sets, tuples and objects of classes written in Python are looked into, but those of torch and of
    Python's own library.
    """
    own = [(cls, dict(vars(cls))) for cls in classes]
    found = [(one, one.namespace.get(one.name, _MISSING)) for one in references_of(classes).globals]
    pending: list[Any] = [module.__dict__ for module in modules]
    pending += [tensor.__dict__ for module in modules for tensor in module._parameters.values() if tensor is not None]
    pending += [value for _, attributes in own for value in attributes.values()]
    pending += [value for _, value in found]
    seen: set[int] = set()
    states: list[tuple[Any, Any]] = []
    slotted: list[tuple[Any, tuple[str, ...], dict[str, Any]]] = []
    tensors: list[Tensor] = []
    while pending:
        # Most of what modules hold are the empty dicts of hooks, and there are many: so this is a flat pass.
        level, pending = pending, []
        for item in [item for item in level if item.__class__ not in _ATOMS]:
            if id(item) in seen:
                continue
            seen.add(id(item))
            kind: Any = type(item)
            if isinstance(item, CONTAINERS):
                before = copy_container(item) if item else ()
                states.append((item, before))
                if before:
                    pending.extend(before.values() if isinstance(before, dict) else before)
            elif isinstance(item, Tensor):
                tensors.append(item)
            elif isinstance(item, tuple):
                pending.extend(item)
            elif isinstance(item, torch.Generator):
                stack.callback(item.set_state, item.get_state())
            elif isinstance(item, nn.Module) or _has_own_state(kind):  # in a list: a hidden part of the model
                pending.append(dict_of(item))
                if slots := _slots_of(kind):
                    held = attributes_of(item)
                    before = [(name, held[name]) for name in slots if name in held]
                    slotted.append((item, slots, dict(before)))
                    pending.extend(value for _, value in before)
    stack.callback(complete_step, restore_containers, states)
    stack.callback(complete_step, _restore_slots, slotted)
    stack.callback(complete_step, _restore_classes, own)
    stack.callback(complete_step, _restore_globals, [(one, value) for one, value in found if one.is_assigned])
    return tensors


_ATOMS = frozenset((str, int, float, bool, type(None), type, FunctionType, property, staticmethod, classmethod))


@cache
def _has_own_state(kind: Any) -> bool:
    """Whether instances are objects of a class written in Python, by somebody who may keep state in them."""
    top = kind.__module__.partition(".")[0]
    written_in_python = bool(kind.__flags__ & 1 << 9)  # Py_TPFLAGS_HEAPTYPE
    is_object = not issubclass(kind, type | Enum | Tensor | BaseException)
    return written_in_python and is_object and top not in ("torch", "numpy") and top not in sys.stdlib_module_names


@cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    return tuple(name for cls in kind.__mro__ for name, slot in vars(cls).items() if type(slot) is MemberDescriptorType)


def _restore_slots(states: list[tuple[Any, tuple[str, ...], dict[str, Any]]]) -> None:
    for item, slots, before in states:
        held = attributes_of(item)
        for name in slots:
            if name in before:
                object.__setattr__(item, name, before[name])
            elif name in held:
                object.__delattr__(item, name)


def _restore_classes(states: list[tuple[type, dict[str, Any]]]) -> None:
    for cls, before in states:
        for name, value in list(vars(cls).items()):
            if name not in before:
                delattr(cls, name)
            elif value is not before[name]:
                setattr(cls, name, before[name])


def _restore_globals(states: list[tuple[Global, Any]]) -> None:
    for one, before in states:
        if before is _MISSING:
            one.namespace.pop(one.name, None)
        else:
            one.namespace[one.name] = before


def preserve_tensors(tensors: list[Tensor], stack: ExitStack, backups: WriteBackups | None) -> None:
    """Put back the values of tensors that a real run may write to, and gradients, which start as None."""
    found = [t for t in tensors if t.layout is torch.strided and not t.is_nested and not t.is_meta]
    before = [(t, t.detach(), t.grad if t.is_leaf else None, t.requires_grad) for t in found]
    watched = WriteBackups() if backups is None else backups
    for tensor in found:
        watched.watch(tensor)
        if tensor.is_leaf:
            tensor.grad = None
    if backups is None:
        watched.copy_all()
    stack.callback(complete_step, watched.restore)
    stack.callback(complete_step, _restore_storages, before)


def _restore_storages(before: list[tuple[Tensor, Tensor, Tensor | None, bool]]) -> None:
    for tensor, as_found, _, _ in before:
        if tensor.untyped_storage() is not as_found.untyped_storage():  # another was set as its `data`
            tensor.data = as_found
    restore_gradients([(tensor, grad, requires_grad) for tensor, _, grad, requires_grad in before])


def restore_gradients(before: list[tuple[Tensor, Tensor | None, bool]]) -> None:
    for tensor, grad, requires_grad in before:
        if tensor.is_leaf:
            if tensor.grad is not grad:
                tensor.grad = grad
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)

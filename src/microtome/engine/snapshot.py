"""Save the state of containers, tensors and models, and restore it after a run."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from operator import is_
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microtome.engine.attributes import attributes_of, dict_of
from microtome.engine.code_references import Global, references_of
from microtome.engine.signals import complete_step, signal_safe

_SCALARS = (str, int, float, bool, type(None), type)
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)

# -- containers --------------------------------------------------------------------------------------------------------

CONTAINERS = (dict, list, set, deque)
_MISSING = object()


def copy_container(container: Any) -> Any:
    """Copy the contents of a container without methods that a subclass overrides."""
    if type(container) is dict:
        return container.copy()
    if isinstance(container, dict):
        return dict(OrderedDict.items(container) if isinstance(container, OrderedDict) else dict.items(container))
    return container.copy()


def has_same_items(container: Any, copied: Any) -> bool:
    """Whether a container has the very items that it had when it was copied, in the same order."""
    if len(container) != len(copied):
        return False
    if not isinstance(container, dict):
        return all(map(is_, container, copied))
    return all(map(is_, dict.keys(container), copied)) and all(map(is_, dict.values(container), copied.values()))


def restore_containers(states: list[tuple[Any, Any]]) -> None:
    """Restore containers without emptying any on the way, since other threads may read it."""
    for container, before in states:
        if isinstance(container, dict):
            restore_dict(container, before or {})
        elif isinstance(container, list):
            container[:] = before
        elif isinstance(container, set):
            if container != set(before):  # else its iteration order would change
                container.intersection_update(before)
                container.update(before)
        elif len(container) != len(before) or any(a is not b for a, b in zip(container, before, strict=True)):
            container.clear()
            container.extend(before)


def restore_dict(target: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Give a dict the items of another, in their order, without emptying it on the way."""
    if not target and not before:
        return
    for key, value in before.items():
        if dict.get(target, key, _MISSING) is not value:
            target[key] = value
    if len(target) > len(before):
        for key in [key for key in target if key not in before]:
            del target[key]
    if list(target) != list(before):
        for key, value in before.items():
            target.pop(key, None)
            target[key] = value


# -- tensors -----------------------------------------------------------------------------------------------------------


class WriteBackups:
    """Tensors that a real run may mutate, each copied before the first write, and restored from that copy.

    A storage is copied as a whole: a view of it may be expanded, so that it cannot be written to.
    """

    def __init__(self) -> None:
        self._by_storage: dict[int, list[Tensor]] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._outside: dict[int, torch.UntypedStorage] = {}

    def watch(self, tensor: Tensor) -> None:
        self._by_storage.setdefault(id(tensor.untyped_storage()), []).append(tensor)

    def before_write(self, tensor: Tensor) -> None:
        """Copy the storage of this tensor if it is that of a watched one."""
        if not _is_strided(tensor):
            return
        storage = tensor.untyped_storage()
        originals = self._by_storage.pop(id(storage), [])
        if any(type(original) in _PLAIN for original in originals):
            originals = [_bytes_of(storage)]
        for original in originals:  # of a subclass, whose storage may have no memory
            self._copies.append((original, original.detach().to("cpu", copy=True)))  # a GPU may lack the memory

    def before_write_outside(self, tensor: Tensor) -> None:
        """Copy the whole storage of a tensor that existed before the run and that no module holds."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._outside:
            whole = _bytes_of(storage)
            self._outside[id(storage)] = storage
            self._copies.append((whole, whole.to("cpu", copy=True)))

    def restore(self) -> None:
        for original, before in self._copies:
            original.data.copy_(before)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    with torch.inference_mode(False):  # else it could not be restored outside of inference mode
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# -- models ------------------------------------------------------------------------------------------------------------


def user_classes(modules: Iterable[nn.Module]) -> set[type]:
    """The classes of these modules and their bases, without torch's and Python's own."""
    classes = {cls for module in modules for cls in type(module).__mro__}
    return {cls for cls in classes if not cls.__module__.startswith(("torch.", "builtins"))}


class _TensorState(NamedTuple):
    """The state of a tensor: an alias of its storage, a copy of its values, and its gradient."""

    tensor: Tensor
    alias: Tensor
    values: Tensor | None
    grad: Tensor | None


class Snapshot:
    """The state of a model's modules: attributes, containers and objects with their contents, and tensors.

    Args:
        written: The names of the parameters whose values are copied, since a run mutates them. Those of all others are
            not, since they take the most memory.
    """

    def __init__(self, model: nn.Module, written: Collection[str] = ()) -> None:
        copied = {id(parameter) for name, parameter in model.named_parameters() if name in written}
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[_TensorState] = []
        modules = list(model.modules())
        self._classes = [(cls, dict(vars(cls))) for cls in user_classes(modules)]
        pending: list[Any] = [vars(module) for module in modules]
        visited: set[int] = set()
        while pending:
            item = pending.pop()
            if isinstance(item, _SCALARS) or id(item) in visited:
                continue
            visited.add(id(item))
            if isinstance(item, Tensor):
                self._add_tensor(item, copy_values=not isinstance(item, nn.Parameter) or id(item) in copied)
            elif isinstance(item, CONTAINERS):
                before = copy_container(item)
                self._containers.append((item, before))
                pending += before.values() if isinstance(before, dict) else before
            elif isinstance(item, tuple):
                pending += item
            elif isinstance(item, nn.Module) or is_dataclass(item):
                pending.append(dict_of(item))

    def _add_tensor(self, tensor: Tensor, *, copy_values: bool) -> None:
        if not _is_strided(tensor):
            return
        values = tensor.detach().clone() if copy_values else None
        grad = tensor.grad if tensor.is_leaf else None
        self._tensors.append(_TensorState(tensor, tensor.detach(), values, grad))

    def restore(self) -> None:
        """Restore the model. It may be repeated if it was interrupted."""
        restore_containers(self._containers)
        _restore_classes(self._classes)
        for state in self._tensors:
            _restore_tensor(state)


def _restore_tensor(state: _TensorState) -> None:
    tensor = state.tensor
    if tensor.data_ptr() != state.alias.data_ptr():  # its `data` was set
        tensor.data = state.alias
    # Not by its version, which batch norms do not increment.
    if state.values is not None and not torch.equal(tensor, state.values):
        with torch.inference_mode(tensor.is_inference()):
            tensor.detach().copy_(state.values)
    if tensor.is_leaf and tensor.grad is not state.grad:
        tensor.grad = state.grad


@signal_safe
def restore_afterwards(model: nn.Module, written: Collection[str] = ()) -> Iterator[Snapshot]:
    """Restore the model after the block, also if the block raises."""
    snapshot = Snapshot(model, written)
    try:
        yield snapshot
    finally:
        snapshot.restore()


# -- runs on substitute tensors ----------------------------------------------------------------------------------------


def preserve_state(modules: list[nn.Module], classes: set[type], stack: ExitStack) -> list[Tensor]:
    """Restore modules, parameters, classes and globals when the exit stack closes; return the tensors in them."""
    class_states = [(cls, dict(vars(cls))) for cls in classes]
    variables = [(one, one.namespace.get(one.name, _MISSING)) for one in references_of(classes).globals]
    roots: list[Any] = [module.__dict__ for module in modules]
    roots += [tensor.__dict__ for module in modules for tensor in module._parameters.values() if tensor is not None]
    roots += [value for _, attributes in class_states for value in attributes.values()]
    roots += [value for _, value in variables]
    graph = _ObjectGraph(roots)
    for generator, state in graph.generators:
        stack.callback(generator.set_state, state)
    stack.callback(complete_step, restore_containers, graph.containers)
    stack.callback(complete_step, _restore_slots, graph.slots)
    stack.callback(complete_step, _restore_classes, class_states)
    stack.callback(complete_step, _restore_globals, [(one, value) for one, value in variables if one.is_assigned])
    return graph.tensors


class _ObjectGraph:
    """The containers, slots and generators that are reachable from some objects, with their state, and the tensors.

    Dicts, lists, sets, tuples and objects of Python classes are traversed, except for those of torch and of Python's
    standard library.
    """

    def __init__(self, roots: list[Any]) -> None:
        self.containers: list[tuple[Any, Any]] = []
        self.slots: list[tuple[Any, tuple[str, ...], dict[str, Any]]] = []
        self.generators: list[tuple[torch.Generator, Tensor]] = []
        self.tensors: list[Tensor] = []
        visited: set[int] = set()
        pending = roots
        while pending:
            # Most items are the many empty dicts of hooks: so this is a flat pass.
            level, pending = pending, []
            for item in [item for item in level if item.__class__ not in _ATOMS]:
                if id(item) not in visited:
                    visited.add(id(item))
                    self._add(item, pending)

    def _add(self, item: Any, pending: list[Any]) -> None:
        cls: Any = type(item)
        if isinstance(item, CONTAINERS):
            contents = copy_container(item) if item else ()
            self.containers.append((item, contents))
            if contents:
                pending.extend(contents.values() if isinstance(contents, dict) else contents)
        elif isinstance(item, Tensor):
            self.tensors.append(item)
        elif isinstance(item, tuple):
            pending.extend(item)
        elif isinstance(item, torch.Generator):
            self.generators.append((item, item.get_state()))
        elif isinstance(item, nn.Module) or _has_own_state(cls):  # a module in a list is a hidden part of the model
            pending.append(dict_of(item))
            if slots := _slots_of(cls):
                attributes = attributes_of(item)
                values = {name: attributes[name] for name in slots if name in attributes}
                self.slots.append((item, slots, values))
                pending.extend(values.values())


_ATOMS = frozenset((str, int, float, bool, type(None), type, FunctionType, property, staticmethod, classmethod))


@cache
def _has_own_state(cls: Any) -> bool:
    """Whether a class is written in Python, outside torch and the standard library, and may keep state in instances."""
    top = cls.__module__.partition(".")[0]
    is_python = bool(cls.__flags__ & 1 << 9)  # Py_TPFLAGS_HEAPTYPE
    is_object = not issubclass(cls, type | ModuleType | Enum | Tensor | BaseException)
    return is_python and is_object and top not in ("torch", "numpy") and top not in sys.stdlib_module_names


@cache
def _slots_of(cls: Any) -> tuple[str, ...]:
    """The attributes that classes declare in `__slots__`; those of classes written in C may be read-only."""
    bases = [base for base in cls.__mro__ if "__slots__" in vars(base)]
    return tuple(name for base in bases for name, slot in vars(base).items() if type(slot) is MemberDescriptorType)


def _restore_slots(states: list[tuple[Any, tuple[str, ...], dict[str, Any]]]) -> None:
    for item, slots, before in states:
        attributes = attributes_of(item)
        for name in slots:
            if name in before:
                object.__setattr__(item, name, before[name])
            elif name in attributes:
                object.__delattr__(item, name)


def _restore_classes(states: list[tuple[type, dict[str, Any]]]) -> None:
    for cls, before in states:
        for name, value in list(vars(cls).items()):
            if name not in before:
                delattr(cls, name)
            elif value is not before[name]:
                setattr(cls, name, before[name])


def _restore_globals(states: list[tuple[Global, Any]]) -> None:
    for variable, before in states:
        if before is _MISSING:
            variable.namespace.pop(variable.name, None)
        else:
            variable.namespace[variable.name] = before


def preserve_tensors(tensors: list[Tensor], stack: ExitStack, backups: WriteBackups) -> None:
    """Restore the values and gradients of tensors when the exit stack closes; in the run, gradients start as None.

    Args:
        backups: To be notified before a tensor is mutated.
    """
    strided = [tensor for tensor in tensors if _is_strided(tensor)]
    gradients = [(tensor, tensor.grad if tensor.is_leaf else None, tensor.requires_grad) for tensor in strided]
    aliases = [(tensor, tensor.detach()) for tensor in strided]
    for tensor in strided:
        backups.watch(tensor)
        if tensor.is_leaf:
            tensor.grad = None
    stack.callback(complete_step, backups.restore)
    stack.callback(complete_step, restore_gradients, gradients)
    stack.callback(complete_step, _restore_storages, aliases)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def _restore_storages(aliases: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, alias in aliases:
        if tensor.untyped_storage() is not alias.untyped_storage():  # its `data` was set
            tensor.data = alias


def restore_gradients(states: list[tuple[Tensor, Tensor | None, bool]]) -> None:
    """Restore `grad` and `requires_grad` of tensors."""
    for tensor, grad, requires_grad in states:
        if tensor.is_leaf:
            if tensor.grad is not grad:
                tensor.grad = grad
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)

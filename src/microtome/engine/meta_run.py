"""Running a model on stand-ins for its weights, so that nothing is computed and nothing of the model is changed."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import cache
from types import FunctionType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from microtome.engine import integer_values, self_test
from microtome.engine.arguments import CannotStand, as_result, copy_arguments, modules_in
from microtome.engine.code_references import Global, references_of
from microtome.engine.container_state import CONTAINERS, copy_container, restore_containers
from microtome.engine.function_caches import keep_closures, replace_caches
from microtome.engine.modes import Modes
from microtome.engine.module_index import refuse_script
from microtome.engine.placement import stand_for
from microtome.engine.pytree import accelerators_in, attributes_of, dict_of, tensors_in
from microtome.engine.random_states import keep_random_states
from microtome.engine.selectors import named
from microtome.engine.signals import finish, uninterrupted
from microtome.engine.thread_exclusion import exclude_other_threads
from microtome.engine.torch_internals import FAKE_TENSOR_LOGGER, fake_tensor_types
from microtome.engine.write_backups import WriteBackups
from microtome.errors import Unsupported
from microtome.inputs import Inputs
from microtome.results.trace import TensorMode

#: Held while a model has stand-ins: two threads that look at one model would take the other's for what it holds.
LOOKING = threading.RLock()


@uninterrupted
def stand_in(
    model: nn.Module, inputs: Inputs, stand: TensorMode, originals: WriteBackups | None = None
) -> Iterator[Inputs]:
    """For the time of the block, give the model stand-ins for weights and buffers; yield such inputs as go with them.

    Afterwards every module holds what it held, in lists and dicts too, and random states are as they were. While the
    block runs, no other thread may run the model; one that wants to look at a model, too, waits.

    Args:
        originals: What is told before a tensor is written to in a real run; without it, all are copied first.
    """
    self_test.CALLS.ensure()
    refuse_script(named(model))
    _refuse_lazy(model)
    if stand != "real":
        self_test.SHAPES.ensure()
    with LOOKING, ExitStack() as stack:
        stack.push(Modes().restore_after)
        found = [module for _, module in named(model)] + modules_in(inputs)
        modules = list({id(module): module for module in found}.values())
        if stand != "real":
            stack.enter_context(exclude_other_threads(model, modules))
        if gc.isenabled():  # so many small objects would set it off, with little for it to free
            gc.disable()
            stack.callback(_enable_collector)
        classes = {cls for module in modules for cls in type(module).__mro__ if not cls.__module__.startswith(_NOT_OWN)}
        given = (*model.parameters(), *model.buffers(), *tensors_in((inputs.args, inputs.kwargs)))
        # Code that names its device draws there in a run on meta tensors, too.
        stack.enter_context(keep_random_states(classes, accelerators_in(given)))
        if stand == "meta":
            stack.enter_context(stand_for(given))
        tensors = _keep(modules, classes, stack)
        if stand == "real":
            _keep_tensors(tensors, stack, originals)
        else:  # what is no parameter or buffer has no stand-in, and autograd writes its gradient
            leaves = [tensor for tensor in tensors if tensor.is_leaf and not tensor.is_inference()]
            stack.callback(_put_back_gradients, [(leaf, leaf.grad, leaf.requires_grad) for leaf in leaves])
            references = references_of(classes)
            replace_caches(references.caches, stack)
            keep_closures(references.functions, stack)
        make = stack.enter_context(_maker(stand))
        for module in modules:
            spaces: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for space in spaces:
                for name, tensor in list(space.items()):
                    if tensor is not None and (stand != "real" or space is module._buffers):
                        space[name] = make(tensor)
        standing = copy_arguments(inputs, make, modules)
        stack.push(Modes().restore_after)
        yield standing


def _enable_collector() -> None:
    """Enable garbage collection, and collect now what is overdue.

    Else the next allocation would, which may be the one in `PyObject_ClearWeakRefs`. CPython 3.11 crashes when weak
    references are collected there.
    """
    gc.enable()
    gc.collect(0)


def copy_inputs(inputs: Inputs, model: nn.Module | None = None, shared: Iterable[Tensor] = ()) -> Inputs:
    """Copy inputs deeply, the tensors inside objects included; tensors that share memory share it in the copy.

    Args:
        model: Its modules are not copied where inputs refer to them.
        shared: Tensors that are not copied either.
    """
    made = {id(tensor): tensor for tensor in shared}
    tensors = tensors_in((inputs.args, inputs.kwargs))
    given = [t for t in tensors if t.layout is torch.strided and not t.is_nested and type(t) in _PLAIN]
    storages = Counter(id(tensor.untyped_storage()) for tensor in given)
    for tensor in given:
        if id(tensor) not in made and storages[id(tensor.untyped_storage())] == 1:
            made[id(tensor)] = _dressed(_clone_span(tensor), tensor)
    with _maker("real") as make:

        def copy_tensor(tensor: Tensor) -> Tensor:
            return made[id(tensor)] if id(tensor) in made else make(tensor)

        return copy_arguments(inputs, copy_tensor, [] if model is None else [module for _, module in named(model)])


def _clone_span(tensor: Tensor) -> Tensor:
    """Clone a tensor with its strides, and of its memory only what lies between its first element and its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    span = tensor.detach().as_strided((last + 1 if tensor.numel() else 0,), (1,)).clone()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(span.untyped_storage(), 0, tensor.size(), tensor.stride())


# -- making ------------------------------------------------------------------------------------------------------------


@contextmanager
def _maker(stand: TensorMode) -> Iterator[Callable[[Tensor], Tensor]]:
    """What makes one stand-in for each tensor; those of tensors that share memory share theirs."""
    made: dict[int, Tensor] = {}
    memories: dict[int, torch.UntypedStorage] = {}

    def once(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def maker(tensor: Tensor) -> Tensor:
            if tensor.is_nested:
                raise Unsupported("a nested tensor cannot be traced: expected one shape and one memory; pad it")
            if stand != "real" and type(tensor) not in _PLAIN:
                raise CannotStand(f"a {type(tensor).__name__} may act otherwise than a tensor")
            if id(tensor) not in made:
                made[id(tensor)] = _dressed(make(tensor), tensor)
            return made[id(tensor)]

        return maker

    def copy(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or type(tensor) not in _PLAIN:
            if stand == "meta":
                raise CannotStand(f"a tensor of layout {tensor.layout} does not lie in one place")
            return tensor.detach().clone()
        storage = tensor.untyped_storage()
        if id(storage) not in memories:
            new = torch.UntypedStorage(storage.nbytes(), device="meta") if stand == "meta" else storage.clone()
            memories[id(storage)] = new
            if stand == "meta" and tensor.dtype in integer_values.DTYPES and not tensor.is_meta:
                integer_values.remember(new, storage)
        empty = torch.empty(0, dtype=tensor.dtype, device=memories[id(storage)].device)
        return empty.set_(memories[id(storage)], tensor.storage_offset(), tensor.size(), tensor.stride())

    if stand != "fake":
        yield once(copy)
        return
    self_test.FAKE.ensure()
    mode = fake_tensor_types()[1](allow_non_fake_inputs=True)
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    quiet, logger.disabled = logger.disabled, True  # what it logs is raised too
    try:
        with warnings.catch_warnings(), mode:
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # which recurrent layers do
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # from_tensor does
            yield once(mode.from_tensor)
    finally:
        logger.disabled = quiet


_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def _dressed(made: Tensor, original: Tensor) -> Tensor:
    """The stand-in as a parameter if the original is one, with whatever was attached to it."""
    if isinstance(original, nn.Parameter):
        made = nn.Parameter(made.detach(), requires_grad=original.requires_grad)
    elif original.requires_grad and not original.is_leaf:
        made = as_result(made.detach())  # a leaf could not be written in place
    elif made.is_leaf:
        made.requires_grad_(original.requires_grad)
    made.__dict__.update(original.__dict__)
    if made.is_leaf and made.grad is not None:
        made.grad = None
    return made


# -- putting back ------------------------------------------------------------------------------------------------------


def _keep(modules: list[nn.Module], classes: set[type], stack: ExitStack) -> list[Tensor]:
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
    kept: list[tuple[Any, Any]] = []
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
                kept.append((item, before))
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
    stack.callback(finish, restore_containers, kept)
    stack.callback(finish, _put_back_slots, slotted)
    stack.callback(finish, _put_back_classes, own)
    stack.callback(finish, _put_back_globals, [(one, value) for one, value in found if one.is_assigned])
    return tensors


_MISSING = object()
_NOT_OWN = ("torch.", "builtins")
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


def _put_back_slots(kept: list[tuple[Any, tuple[str, ...], dict[str, Any]]]) -> None:
    for item, slots, before in kept:
        held = attributes_of(item)
        for name in slots:
            if name in before:
                object.__setattr__(item, name, before[name])
            elif name in held:
                object.__delattr__(item, name)


def _put_back_classes(kept: list[tuple[type, dict[str, Any]]]) -> None:
    for cls, before in kept:
        for name, value in list(vars(cls).items()):
            if name not in before:
                delattr(cls, name)
            elif value is not before[name]:
                setattr(cls, name, before[name])


def _put_back_globals(kept: list[tuple[Global, Any]]) -> None:
    for one, before in kept:
        if before is _MISSING:
            one.namespace.pop(one.name, None)
        else:
            one.namespace[one.name] = before


def _keep_tensors(tensors: list[Tensor], stack: ExitStack, originals: WriteBackups | None) -> None:
    """Put back the values of tensors that a real run may write to, and gradients, which start as None."""
    watched = originals or WriteBackups()
    found = [t for t in tensors if t.layout is torch.strided and not t.is_nested and not t.is_meta]
    before = [(t, t.detach(), t.grad if t.is_leaf else None, t.requires_grad) for t in found]
    for tensor in found:
        watched.watch(tensor)
        if tensor.is_leaf:
            tensor.grad = None
    if originals is None:
        watched.copy_all()
    stack.callback(finish, watched.put_back)
    stack.callback(finish, _put_back_tensors, before)


def _put_back_tensors(before: list[tuple[Tensor, Tensor, Tensor | None, bool]]) -> None:
    for tensor, as_found, _, _ in before:
        if tensor.untyped_storage() is not as_found.untyped_storage():  # another was set as its `data`
            tensor.data = as_found
    _put_back_gradients([(tensor, grad, requires_grad) for tensor, _, grad, requires_grad in before])


def _put_back_gradients(before: list[tuple[Tensor, Tensor | None, bool]]) -> None:
    for tensor, grad, requires_grad in before:
        if tensor.is_leaf:
            if tensor.grad is not grad:
                tensor.grad = grad
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)


def _refuse_lazy(model: nn.Module) -> None:
    for path, module in named(model):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if isinstance(tensor, UninitializedTensorMixin):
                raise Unsupported(
                    f"{path or 'the model'} ({type(module).__name__}) has no shape yet: run the model once on real "
                    "inputs, so that its lazy modules learn theirs"
                )
